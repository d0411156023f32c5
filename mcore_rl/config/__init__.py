"""Every setting, its default, and the rules between settings."""
