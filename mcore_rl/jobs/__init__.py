"""Commands from start to end: check inputs, warm start, train, evaluate, export, report."""
