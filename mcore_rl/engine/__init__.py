"""Training engines behind `BaseEngine`, and the worker that has one."""
