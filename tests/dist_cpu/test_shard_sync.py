"""Shards from real engines into real vLLM workers: every parameter is that of a fresh vLLM model.

Training layouts of two ranks, each into vLLM on one worker, on two, and on two that share experts.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import served_ranks
import sync_jobs
import tiny_families
import tiny_models

from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.rollout.vllm_server import _QUIET

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


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[served_ranks.Report]:
    """Of every rank of both worlds."""
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
    names = {world: f"{os.getpid()}-{secrets.token_hex(4)}" for world in orders}
    workers = [_start(world, name, folder, orders[world]) for world, name in names.items()]
    pipes = [pipe for _, found in workers for pipe in found]
    try:
        ranks.spawn(2, two)
        assert all(pipe.poll(served_ranks.WAIT_S) for pipe in pipes)
        return [pipe.recv() for pipe in pipes]
    except AssertionError as error:  # trainers wait in vain for a server that has failed
        said = [line for pipe in pipes if pipe.poll() for line in pipe.recv().complaints]
        raise AssertionError("\n".join(said)) from error
    finally:
        for processes, _ in workers:
            for process in processes:
                process.kill()
                process.join()
        for name in names.values():
            for file in Path("/dev/shm").glob(f"*mcore_rl_{name}*"):
                file.unlink(missing_ok=True)


def _start(
    world: int, name: str, folder: Path, orders: list[served_ranks.Order]
) -> tuple[list[Any], list[Any]]:
    """Forked from one process, which has imported vLLM; this one need not."""
    multiprocessing.set_forkserver_preload(served_ranks.IMPORTED)
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe()
        arguments = (rank, world, name, folder, orders, theirs)
        process = context.Process(target=served_ranks.serve, args=arguments)
        with mock.patch.dict(os.environ, _QUIET):
            process.start()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes


@pytest.fixture(scope="module")
def complaints(reports: list[served_ranks.Report]) -> list[str]:
    return [line for report in reports for line in report.complaints]


@pytest.mark.parametrize(("family", "layout", "server"), CASES)
def test_every_parameter_is_that_of_a_model_loaded_from_the_export(
    complaints, family, layout, server
):
    about = f"{family}-{layout}-{server},"
    assert [line for line in complaints if line.startswith(about)] == []
    assert [line for line in complaints if line.startswith("vLLM rank")] == []


@pytest.mark.parametrize(("family", "layout", "server"), CASES)
def test_it_generates_token_for_token_what_a_server_started_from_the_export_does(
    reports, family, layout, server
):
    key = f"{family}-{layout}-{server}"
    by_rank = [report.answers[key] for report in reports if key in report.answers]
    assert len(by_rank) == SERVERS[server].world_size
    for answers in by_rank:
        assert answers.after == answers.exported
        assert answers.after != answers.before


def test_one_module_is_in_memory_twice_at_any_time(complaints):
    assert [line for line in complaints if line.startswith("modules:")] == []


@pytest.mark.parametrize("family", MEASURED)
def test_memory_of_an_update_is_that_of_one_module_at_every_depth(reports, family):
    """Besides the two buckets, which are the trainer's."""
    found = [memory for report in reports for memory in report.memory]
    shallow, deep = (
        [memory for memory in found if memory.model == f"{family}-{num_layers}"]
        for num_layers in MEASURED[family]
    )
    assert len(shallow) == len(deep) == 2  # versions
    assert {memory.peak for memory in shallow} == {memory.peak for memory in deep}
    # As it came, what vLLM makes of it (packs are padded, much at this size), and temporaries.
    assert all(memory.module < memory.peak < 4 * memory.module for memory in deep)
