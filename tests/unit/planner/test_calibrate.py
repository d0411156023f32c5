"""Rates of a machine from the seconds of its measurements."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.planner import calibrate


def test_rates_are_flops_and_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measure_seconds", lambda function, device, calls=1: 0.5)
    # A product of n rows, columns and sums has 2 n^3 flops; n is 768 on a CPU.
    assert calibrate.measure_matmul("cpu", torch.bfloat16) == 2 * 768**3 / 0.5
    assert calibrate.measure_memory("cpu") == 2 * (256 << 20) / 0.5  # read and written
    assert calibrate.measure_host_copy("cpu") == (256 << 20) / 0.5  # crossing the link once
    assert calibrate.measure_launch("cpu") == 0.5


def test_seconds_are_the_shortest_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a call moves on: 9 seconds to warm up, then 7 times 4 calls."""
    clock_s, steps = [0.0], iter([9.0, *[3.0] * 8, *[2.0] * 4, *[5.0] * 16])
    monkeypatch.setattr(calibrate.time, "thread_time", lambda: clock_s[0])

    def call() -> None:
        clock_s[0] += next(steps)

    assert calibrate.measure_seconds(call, "cpu", calls=4) == 2.0
    assert next(steps, None) is None
