"""The loops, and the parts of a step: samples, scores, advantages, updates, checkpoints."""
