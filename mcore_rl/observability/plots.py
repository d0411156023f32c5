"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

# The figure class with its own Agg canvas: no display, and none of pyplot's global state.
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mcore_rl.config.atomic_file import write_atomically

_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"  # distinct for colour-blind people too


def plot_reward_curve(
    path: Path,
    rewards: Sequence[float],
    *,
    before: float | None = None,
    after: float | None = None,
    held_out: str = "held-out reward",
) -> None:
    """Write a PNG of the mean training reward of steps 1, 2, ...

    Results on held-out prompts, labelled `held_out`, are dashed lines across it.
    """
    figure = Figure(figsize=(8.0, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color=_BLUE, marker="o", markersize=4, label="training reward (mean)")
    lines = {"before": (before, _ORANGE), "after": (after, _GREEN)}
    for when, (value, color) in lines.items():
        if value is not None:
            label = f"{held_out} {when}: {value:.3f}"
            axes.axhline(value, color=color, linestyle="--", linewidth=1.5, label=label)
    values = [*rewards, *(value for value, _ in lines.values() if value is not None)]
    axes.set_ylim(min([0.0, *values]), max([1.0, *values]) * 1.04)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("reward")
    axes.set_title("Reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", framealpha=0.9)
    _save(figure, path)


def plot_traffic(path: Path, traffic: NDArray[np.int64]) -> None:
    """Write a PNG heatmap of bytes [generation ranks, training ranks], on a logarithmic scale."""
    figure = Figure(figsize=(8.0, 7.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    megabytes = np.ma.masked_equal(traffic / 1e6, 0)
    image = axes.imshow(megabytes, norm=LogNorm(), aspect="auto", interpolation="nearest")
    figure.colorbar(image, label="MB", format="%g")
    axes.set_xlabel("training rank")
    axes.set_ylabel("generation rank")
    axes.set_title("Weights on their way")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with write_atomically(path) as partial_path:
        figure.savefig(partial_path, format="png")
