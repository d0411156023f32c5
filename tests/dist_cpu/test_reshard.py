"""Exchanges on real ranks: what arrives is what vLLM's rules cut from the checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lora_jobs
import pytest
import ranks
import reshard_jobs as jobs
import tiny_families
import tiny_models
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.rules import Block
from tests.nightly import all_but

FAMILIES = ("qwen3_moe", "deepseek_v3")
LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "pp2": Layout(pp=2, first_stage_layers=1),
    "pp2vpp2": Layout(pp=2, vpp=2),
    "tp2etp2": Layout(tp=2, etp=2),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
}
# Where a server has one rank, it runs on the second of the two devices.
SERVERS = {
    "tp1": (GenerationLayout(), (1,)),
    "tp2": (GenerationLayout(tp=2), (0, 1)),
    "ep2": (GenerationLayout(tp=2, ep=2), (0, 1)),
}
TP2 = {"tp2": SERVERS["tp2"]}
LAYERS = {"pp2vpp2": 4}
BIG_BUCKETS = 1 << 22


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reshard")
    paths = {}
    for family in FAMILIES:
        for num_layers in (3, 4):
            config = tiny_families.cases()[family].config
            config.num_hidden_layers = num_layers
            path = folder / f"{family}-{num_layers}"
            paths[f"{family}/{num_layers}"] = tiny_families.save(
                tiny_models.build_from(config), path
            )
    paths["mtp"] = tiny_families.save_with_mtp("deepseek_v3", folder)
    path = folder / "qwen3_moe"  # the name tells lora_jobs what to adapt
    paths["lora"] = tiny_families.save(lora_jobs.build("qwen3_moe"), path)
    return paths


@pytest.fixture(scope="session")
def results(checkpoints) -> dict[str, list[dict[str, Any]]]:
    two: dict[str, Any] = {}
    four: dict[str, Any] = {}
    for family in FAMILIES:
        for name, layout in LAYOUTS.items():
            path = checkpoints[f"{family}/{LAYERS.get(name, 3)}"]
            spec = replace(ranks.build_engine_spec(path, layout), total_steps=0)
            two[f"colocated/{family}/{name}"] = ranks.make_job(jobs.colocated, spec, SERVERS)
            job = ranks.make_job(jobs.disaggregated, path, layout, SERVERS)
            four[f"disaggregated/{family}/{name}"] = job
    two |= _special(checkpoints)
    moe = checkpoints["deepseek_v3/3"]
    for dtype in ("float32", "bfloat16"):
        job = ranks.make_job(jobs.disaggregated, moe, LAYOUTS["tp2ep2"], TP2, dtype, BIG_BUCKETS)
        four[f"big/{dtype}"] = job
    layouts = Layout(tp=2, pp=2), GenerationLayout(tp=4)
    for num_layers, is_ordered in ((2, False), (16, False), (16, True)):
        config = jobs.tiny_dense(num_layers)
        job = ranks.make_job(jobs.random_model, config, *layouts, 4096, is_ordered)
        four[f"{'ordered' if is_ordered else 'memory'}/{num_layers}"] = job
    return ranks.Results({2: two, 4: four})


def _special(checkpoints: dict[str, Path]) -> dict[str, Any]:
    """Casts, adapters and prediction layers."""
    moe = checkpoints["deepseek_v3/3"]
    inference = replace(ranks.build_engine_spec(moe, LAYOUTS["pp2"]), total_steps=0)
    adapters = lora_jobs.lora_spec(checkpoints["lora"], LAYOUTS["tp2ep2"])
    mtp = replace(ranks.build_engine_spec(checkpoints["mtp"], LAYOUTS["pp2"]), total_steps=0)
    mtp.engine.mtp_loss_coef = 0.1
    return {
        "cast": ranks.make_job(jobs.colocated, inference, TP2, "bfloat16"),
        "lora": ranks.make_job(jobs.colocated, replace(adapters, total_steps=0), TP2),
        "mtp": ranks.make_job(jobs.colocated, mtp, TP2),
        "ordered": ranks.make_job(jobs.colocated, inference, SERVERS, "float32", True),
    }


def compute_expected(
    path: Path, layout: Layout, generation: GenerationLayout, tensors: dict[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """By generation rank, what the rules of vLLM cut from whole tensors."""
    config = json.loads((path / "config.json").read_text())
    _, served = jobs.sides(config, layout, generation)

    def read(block: Block) -> torch.Tensor:
        return tensors[block.tensor.name][block.box.slices]

    return [jobs.filled(served, rank, read) for rank in range(generation.world_size)]


def assert_equal(actual, expected, dtype=torch.float32, scale=1.0) -> None:
    """Bit for bit; the router's bias in float32 whatever the dtype."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        expected_dtype = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        assert actual[name].dtype == expected_dtype, name
        torch.testing.assert_close(
            actual[name],
            (tensor * scale).to(expected_dtype),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=name,
        )


CASES = [(f, name, server) for f in FAMILIES for name in LAYOUTS for server in SERVERS]
# The others are nightly. In one run of a case all servers take part.
COLOCATED = [
    ("qwen3_moe", "tp2ep2"), ("qwen3_moe", "pp2vpp2"), ("deepseek_v3", "tp2etp2"),
    ("deepseek_v3", "pp2"), ("qwen3_moe", "cp2"), ("qwen3_moe", "dp2"),
]  # fmt: skip
DISAGGREGATED = [("qwen3_moe", "tp2ep2"), ("deepseek_v3", "pp2"), ("deepseek_v3", "cp2")]


def every_server(runs: list[tuple[str, str]]) -> list[Any]:
    return all_but([(*run, server) for run in runs for server in SERVERS], CASES)


@pytest.mark.parametrize(("family", "name", "server"), every_server(COLOCATED))
def test_colocated_servers_get_their_slices_of_the_engine_in_two_syncs(
    results, checkpoints, family, name, server
):
    path, (generation, hosts) = checkpoints[f"{family}/{LAYERS.get(name, 3)}"], SERVERS[server]
    tensors = load_file(path / "model.safetensors")
    expected = compute_expected(path, LAYOUTS[name], generation, tensors)
    actual = [result[server] for result in results[f"colocated/{family}/{name}"]]
    for rank, host in enumerate(hosts):
        for number, scale in enumerate((1.0, -2.0)):
            assert_equal(actual[host]["syncs"][number], expected[rank], scale=scale)
    assert all(result["wire"] == result["planned"] for result in actual)


@pytest.mark.parametrize(("family", "name", "server"), every_server(DISAGGREGATED))
def test_servers_on_other_devices_get_their_slices(results, checkpoints, family, name, server):
    path, (generation, _) = checkpoints[f"{family}/{LAYERS.get(name, 3)}"], SERVERS[server]
    tensors = load_file(path / "model.safetensors")
    expected = compute_expected(path, LAYOUTS[name], generation, tensors)
    actual = [result[server] for result in results[f"disaggregated/{family}/{name}"]]
    for rank, parameters in enumerate(expected):
        assert_equal(actual[2 + rank]["syncs"][0], parameters)
    assert all(result["wire"] == result["planned"] for result in actual)
    sent, received = (sum(result["wire"][way] for result in actual) for way in (0, 1))
    assert sent == received > 0


def test_replicas_that_a_device_has_itself_do_not_travel(results):
    """Data and context parallel ranks hold all there is."""
    for name in ("dp2", "cp2"):
        for result in results[f"colocated/qwen3_moe/{name}"]:
            assert result["tp2"]["wire"] == [0, 0]


@pytest.mark.parametrize("key", ["cast", "lora", "mtp"])
def test_casts_adapters_and_prediction_layers(results, checkpoints, key):
    """Weights are cast at the source and merged with their adapters: they equal the export."""
    name = {"cast": "deepseek_v3/3"}.get(key, key)
    layout = LAYOUTS["tp2ep2" if key == "lora" else "pp2"]
    dtype = torch.bfloat16 if key == "cast" else torch.float32
    generation, _ = SERVERS["tp2"]
    actual = results[key]
    for number in (0, 1):
        exported = actual[0]["exported"][number]
        expected = compute_expected(checkpoints[name], layout, generation, exported)
        for rank in range(2):
            assert_equal(actual[rank]["tp2"]["syncs"][number], expected[rank], dtype)
    original = load_file(checkpoints[name] / "model.safetensors")
    merged = any(not torch.equal(actual[0]["exported"][0][n], t) for n, t in original.items())
    assert merged == (key == "lora")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_messages_of_many_parameters_carry_both_dtypes(results, checkpoints, dtype):
    path = checkpoints["deepseek_v3/3"]
    tensors = load_file(path / "model.safetensors")
    expected = compute_expected(path, LAYOUTS["tp2ep2"], GenerationLayout(tp=2), tensors)
    for rank in range(2):
        actual = results[f"big/{dtype}"][2 + rank]["tp2"]["syncs"][0]
        assert_equal(actual, expected[rank], getattr(torch, dtype))


def test_memory_is_bounded_by_four_buckets_and_does_not_grow_with_the_model(results):
    small, large = ([r["allocated"] for r in results[f"memory/{n}"]] for n in (2, 16))
    assert small == large
    for sizes in large:
        assert len(sizes) == 3  # two buckets, and the outbox
        assert sum(sizes) <= 4 * 4096
    planned = [sum(r["planned"][1] for r in results[f"memory/{n}"]) for n in (2, 16)]
    assert planned[1] > 5 * planned[0] > 20 * 4096


def test_transfers_that_wait_for_those_before_them_come_to_an_end_and_bring_the_same(
    results, checkpoints
):
    """A device's transfers run in the order in which it starts them, like those of NCCL."""
    path = checkpoints["deepseek_v3/3"]
    tensors = load_file(path / "model.safetensors")
    for server, (generation, hosts) in SERVERS.items():
        expected = compute_expected(path, LAYOUTS["pp2"], generation, tensors)
        for rank, host in enumerate(hosts):
            assert_equal(results["ordered"][host][server]["syncs"][0], expected[rank])
    for result in results["ordered/16"]:
        assert result["wire"] == result["planned"] != [0, 0]


def test_a_peer_that_is_silent_or_dies_ends_in_an_error_that_names_it(tmp_path):
    context = mp.get_context("spawn")
    answers = context.Queue()
    arguments = (str(tmp_path / "store"), answers)
    processes = [
        context.Process(target=jobs.lost_peers, args=(rank, *arguments)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    silent, dead = (answers.get(timeout=60) for _ in range(2))
    for process in processes:
        process.join(30)
    for message in (silent, dead):
        assert message.startswith("rank 0, receiving from rank 1, bucket "), message
    assert "imed out" in silent
    assert "imed out" not in dead
