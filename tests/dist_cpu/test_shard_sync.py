"""Shards from real engines into real vLLM workers: every parameter is that of a fresh vLLM model.

Training layouts of two ranks, each into vLLM on one worker, on two, and on two that share experts.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import served_ranks
import sync_jobs
import tiny_families
import tiny_models

from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout

LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2, first_stage_layers=1),
    "vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "tp2etp2": Layout(tp=2, etp=2),
}
SERVERS = {
    "1": GenerationLayout(),
    "2": GenerationLayout(tp=2),
    "2ep": GenerationLayout(tp=2, ep=2),
}
FAMILIES = ("qwen2", "qwen3", "llama", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe")


def layouts_of(family: str) -> list[str]:
    has_experts = family in ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe")
    return [name for name in LAYOUTS if has_experts or LAYOUTS[name].ep * LAYOUTS[name].etp == 1]


def servers_of(family: str) -> list[str]:
    return [name for name in SERVERS if SERVERS[name].ep == 1 or len(layouts_of(family)) == 7]


CASES = [
    (family, layout, server)
    for family in FAMILIES
    for layout in layouts_of(family)
    for server in servers_of(family)
]


MEASURED = {"qwen3_moe": (1, 8)}  # layers


def saved(family: str, path: Path, num_layers: int = 4) -> Path:
    """Of four layers: two stages of two chunks each."""
    config = tiny_families.served_config(family)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * num_layers
    return tiny_families.save_served(tiny_models.build_from(config), path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("syncs")
    orders: dict[int, list[served_ranks.Order]] = {1: [], 2: []}
    two: dict[str, Any] = {}
    for family in FAMILIES:
        path, exported = saved(family, folder / family), folder / f"{family}-new"
        servers = {name: SERVERS[name] for name in servers_of(family)}
        for name in layouts_of(family):
            spec = replace(ranks.engine_spec(path, LAYOUTS[name]), total_steps=0)
            key = f"{family}-{name}"
            two[key] = ranks.job(sync_jobs.serve_syncs, spec, servers, key, folder, exported)
        syncs = tuple(f"{family}-{name}" for name in layouts_of(family))
        for world, of_world in orders.items():
            ep = {n: s.ep > 1 for n, s in servers.items() if s.world_size == world}
            of_world.append(served_ranks.Order(path, exported, syncs, ep))
    for family, num_layers in ((f, n) for f, depths in MEASURED.items() for n in depths):
        key = f"{family}-{num_layers}"
        path = saved(family, folder / key, num_layers)
        spec = replace(ranks.engine_spec(path, LAYOUTS["tp2"]), total_steps=0)
        one = {"1": SERVERS["1"]}
        two[key] = ranks.job(sync_jobs.serve_syncs, spec, one, key, folder, path)
        order = served_ranks.Order(path, path, (key,), {"1": False}, is_measured=True)
        orders[1].append(order)
    workers = [_start(world, folder, orders[world]) for world in (1, 2)]
    try:
        ranks.spawn(2, two)
        pipes = [pipe for _, found in workers for pipe in found]
        assert all(pipe.poll(served_ranks.WAIT_S) for pipe in pipes)
        return [line for pipe in pipes for line in pipe.recv()]
    finally:
        for processes, _ in workers:
            for process in processes:
                process.kill()
                process.join()


def _start(
    world: int, folder: Path, orders: list[served_ranks.Order]
) -> tuple[list[Any], list[Any]]:
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes, pipes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe()
        arguments = (rank, world, port, folder, orders, theirs)
        process = context.Process(target=served_ranks.serve, args=arguments)
        process.start()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes


@pytest.mark.parametrize(("family", "layout", "server"), CASES)
def test_every_parameter_is_that_of_a_model_loaded_from_the_export(
    complaints, family, layout, server
):
    about = f"{family}-{layout}-{server},"
    assert [line for line in complaints if line.startswith(about)] == []
    assert [line for line in complaints if line.startswith("vLLM rank")] == []


def test_one_module_is_in_memory_twice_at_any_time(complaints):
    assert [line for line in complaints if line.startswith("modules:")] == []


@pytest.mark.parametrize("family", MEASURED)
def test_memory_of_an_update_is_that_of_one_module_at_every_depth(complaints, family):
    """Besides the two buckets, which are the trainer's."""
    lines = [line.partition(":")[2] for line in complaints if line.startswith("memory:")]
    found = [json.loads(line) for line in lines]
    shallow, deep = (
        [one for one in found if one["model"] == f"{family}-{num_layers}"]
        for num_layers in MEASURED[family]
    )
    assert len(shallow) == len(deep) == 2  # versions
    assert {one["peak"] for one in shallow} == {one["peak"] for one in deep}
    # As it came, what vLLM makes of it (packs are padded, much at this size), and temporaries.
    assert all(one["module"] < one["peak"] < 4 * one["module"] for one in deep)
