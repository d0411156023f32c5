"""Memory, time and layouts of a run, predicted before it starts, without a GPU."""
