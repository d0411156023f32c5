"""Parts of a run outside of the package, and toy tasks. mcore_rl/examples links to this folder."""
