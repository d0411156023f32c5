"""The tokens of each expert in a step, as a heatmap and in numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_rl.observability.expert_load import ExpertLoad


def compute_relative_load(load: ExpertLoad) -> npt.NDArray[np.float64]:
    """Return the tokens of each expert over the mean of its layer, [layers, experts]."""
    tokens = np.array(load.tokens, np.float64)
    means = tokens.mean(1, keepdims=True)
    loads: npt.NDArray[np.float64] = tokens / np.where(means == 0, 1, means)  # without tokens: 0
    return loads


def describe_balance(load: ExpertLoad) -> str:
    """Return the largest load and the variation in words, on two lines.

    The variation is the standard deviation over the mean of a layer, averaged over the layers.
    """
    relative = compute_relative_load(load)
    row, expert = divmod(int(relative.argmax()), relative.shape[1])
    return (
        f"largest {relative.max():.3g} (layer {load.layers[row]}, expert {expert})<br>"
        f"variation {relative.std(1).mean():.3g}"
    )


def build_load_heatmap(load: ExpertLoad) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return data and layout of a heatmap of layers and experts."""
    relative = compute_relative_load(load)
    trace = {
        "type": "heatmap",
        "x": [*map(str, range(relative.shape[1]))],
        "y": [*map(str, load.layers)],
        "z": np.round(relative, 3).tolist(),
        "zmin": 0,
        "zmax": max(2.0, float(relative.max())),
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "of the mean"}},
        "hovertemplate": "layer %{y}, expert %{x}: %{z}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": f"expert<br>{describe_balance(load)}"}, "type": "category"},
        "yaxis": {"title": {"text": "layer"}, "type": "category"},
    }
    return [trace], layout
