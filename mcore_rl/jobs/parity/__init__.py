"""`mcore-rl verify parity`: log-probs of the same tokens by several engines."""
