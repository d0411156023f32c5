"""The rates that `mcore-rl plan calibrate` measures, beside those of the card's hardware file."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import measure

from mcore_rl.planner.calibrate import calibrate
from mcore_rl.planner.hardware import load_hardware


def check(arguments: argparse.Namespace) -> measure.Result:
    device = measure.device().type
    expected = load_hardware("h100" if device == "cuda" else "cpu")
    measured = calibrate(device, expected)
    result: measure.Result = asdict(measured)
    del result["sources"]
    assert set(measured.peak_flops) >= {"float32", "bfloat16"}, result
    if device == "cuda":  # of another card than an H100 the rates are within the same bounds
        rates = {f"{name} flops": (rate, expected.peak_flops[name])
                 for name, rate in measured.peak_flops.items()}  # fmt: skip
        rates["memory"] = measured.memory_bandwidth, expected.memory_bandwidth
        rates["host"] = measured.host_bandwidth, expected.host_bandwidth
        result["shares"] = shares = {name: rate / peak for name, (rate, peak) in rates.items()}
        assert all(0.2 < share < 3 for share in shares.values()), result
        assert 1e-6 < measured.kernel_latency_s < 3e-5, result
    return result


if __name__ == "__main__":
    measure.report(check)
