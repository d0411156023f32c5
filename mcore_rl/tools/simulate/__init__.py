"""A run of a loop with ranks that only take the predicted time: `mcore-rl plan simulate`."""
