"""Benchmarks: those of `mcore-rl bench`, and scripts. mcore_rl/benchmarks links to this folder."""
