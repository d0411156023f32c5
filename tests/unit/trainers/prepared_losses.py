"""Losses outside of the package that are prepared by mini-batch, as the text of a module."""

PREPARED = """
import numpy as np
from mcore_rl.algorithms.prepared import prepared_by

def first(inputs):
    drawn = np.random.default_rng(inputs.seed).integers(0, 99, len(inputs.log_probs.values))
    return {"drawn": inputs.log_probs.with_values(drawn)}

@prepared_by(first)
def good(inputs):
    return inputs.prepared("drawn") * inputs.log_probs, {}

@prepared_by(lambda inputs: {"rewards": inputs.log_probs})
def taken(inputs):
    return inputs.log_probs, {}

@prepared_by(lambda inputs: {"ranks": inputs.log_probs.values})
def flat(inputs):
    return inputs.log_probs, {}

@prepared_by(lambda inputs: {"ranks": inputs.log_probs.with_values(np.full(9, np.nan))})
def nan(inputs):
    return inputs.log_probs, {}
"""
