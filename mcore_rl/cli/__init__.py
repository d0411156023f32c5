"""The `mcore-rl` command, and command lines as typed settings."""
