"""`mcore-rl samples`: trajectories of a run, in a table or on pages."""
