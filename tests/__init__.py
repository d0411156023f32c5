"""A regular package: one of the test environment has this name, too."""
