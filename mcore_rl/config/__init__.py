"""Every setting, its default and the rules between settings; how files are opened and published."""
