"""`mcore-rl doctor`: faults of nodes, and differences between them."""
