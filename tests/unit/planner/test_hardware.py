"""Hardware files: complete, with sources, and one error for what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mcore_rl.config.errors import ConfigError
from mcore_rl.planner.hardware import FOLDER, list_hardware, load_hardware


@pytest.mark.parametrize("name", list_hardware())
def test_each_file_of_the_package_loads_and_survives_a_round_trip(
    name: str, tmp_path: Path
) -> None:
    hardware = load_hardware(name)
    path = tmp_path / "copy.yaml"
    path.write_text(hardware.to_yaml())
    assert load_hardware(str(path)) == hardware


def test_rates_of_an_h100_are_its_datasheet_times_the_measured_shares() -> None:
    h100 = load_hardware("H100")
    assert h100.get_flops("bfloat16") == pytest.approx(989.4e12 * 0.785)
    assert h100.memory_rate == pytest.approx(3.35e12 * 0.9)
    # Eight devices share a board; sixteen, or eight in steps of two, do not.
    assert h100.get_link(8).rate == pytest.approx(450e9 * 0.83)
    assert h100.get_link(16) == h100.get_link(8, stride=2)
    assert h100.get_link(16).predict_s(45e9, 3) == pytest.approx(1 + 3 * 20e-6)


def test_a_dtype_without_a_peak_runs_at_the_rate_of_the_next() -> None:
    a100 = load_hardware("a100_80")
    assert a100.get_flops("float8") == a100.get_flops("bfloat16")
    assert a100.get_peak_flops("float8") == 312e12
    with pytest.raises(ConfigError, match=r"int4.*allowed: float32"):
        a100.get_flops("int4")


def test_unknown_hardware_lists_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"did you mean h100.*a100_40.*h200.*\.yaml"):
        load_hardware("h1000")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "gpu"}, "device='gpu'; allowed: 'cuda', 'cpu'"),
        ({"memory_bandwidth": -1}, "memory_bandwidth=-1; allowed: a number above 0"),
        ({"nvlink_domain": 0.5}, "nvlink_domain=0.5; allowed: a whole number"),
        ({"matmul_share": 1.2}, "matmul_share=1.2; allowed: above 0, up to 1"),
        ({"peak_flops": {"bfloat16": 1e12}}, "peak_flops=.*allowed: float32"),
        ({"speed": 3}, "has unknown speed; allowed: name, device, memory_bytes"),
        ({"sources": {}}, "sources has no memory_bytes"),
    ],
)
def test_file_with_an_impossible_field_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load((FOLDER / "h100.yaml").read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_hardware(str(path))


def test_an_all_reduce_is_a_ring_in_a_domain_and_a_tree_over_domains() -> None:
    device = replace(
        load_hardware("h100"),
        nvlink_bandwidth=2e9, nvlink_share=0.5, nvlink_latency_s=0.1, nvlink_domain=8,
        network_bandwidth=2e8, network_share=0.5, network_latency_s=0.2,
    )  # fmt: skip
    assert device.predict_all_reduce(8e9, 1) == 0
    assert device.predict_all_reduce(8e9, 8) == pytest.approx(0.1 + 2 * 8 * 7 / 8)
    # Four domains: up and down two levels, over eight ports of 1e8 bytes a second each.
    expected = 0.1 + 2 * 8 * 31 / 32 + 4 * 0.2 + 2 * 8e9 / 8e8
    assert device.predict_all_reduce(8e9, 32) == pytest.approx(expected)
