"""Shards from real engines into real vLLM workers: every parameter is that of a fresh vLLM model.

Training layouts of two ranks, each into vLLM on one worker, on two, and on two that share experts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import serving_ranks
import tiny_families
import tiny_models
import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf_writer import write_checkpoint
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.controller import reaper
from mcore_rl.engine.base import EngineSpec
from mcore_rl.inference.vllm.engine_arguments import QUIET_ENVIRONMENT
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightUpdate, connect
from tests.nightly import all_but

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
EXPERTS = (
    "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "qwen3_next",
    "qwen3_5_moe", "minimax_m2",
)  # fmt: skip
# With prediction layers, which trainers train and servers draft with.
DRAFTS = {f"{name}_mtp": name for name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")}
DRAFTS |= {"qwen3_next_mtp": "qwen3_next"}
EXPERTS += tuple(DRAFTS)
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_5", *EXPERTS)
# vLLM's delta nets on a CPU take nothing else.
BFLOAT16 = ("qwen3_next", "qwen3_next_mtp", "qwen3_5_moe", "qwen3_5")


def layouts_of(family: str) -> list[str]:
    most = 2 if family in EXPERTS else 1
    names = [name for name, layout in LAYOUTS.items() if layout.ep <= most and layout.etp <= most]
    return [name for name in names if family != "gpt_oss" or LAYOUTS[name].etp == 1]


def servers_of(family: str) -> list[str]:
    return [name for name in SERVERS if SERVERS[name].ep == 1 or family in EXPERTS]


CASES = all_but(
    [
        ("qwen3_moe", "tp2", "2ep"), ("qwen3_moe", "tp2ep2", "1"), ("qwen3_moe", "pp2", "2"),
        ("deepseek_v3", "vpp2", "2ep"), ("qwen2", "dp2", "1"), ("qwen3", "cp2", "1"),
        ("mixtral", "tp2etp2", "1"), ("glm4_moe_lite", "tp2", "2ep"),
        ("qwen3_next", "tp2", "2ep"), ("qwen3_5_moe", "tp2", "2ep"),
        ("gpt_oss", "tp2ep2", "2"), ("gpt_oss", "tp2", "2ep"), ("minimax_m2", "tp2ep2", "2"),
        ("deepseek_v3_mtp", "tp2ep2", "1"), ("glm4_moe_mtp", "pp2", "2ep"),
    ],
    [
        (family, layout, server)
        for family in FAMILIES
        for layout in layouts_of(family)
        for server in servers_of(family)
    ],
)  # fmt: skip


MEASURED = {"qwen3_moe": (1, 8)}  # layers


def saved(family: str, path: Path, num_layers: int = 4) -> Path:
    """Save a model of four layers: two stages of two chunks each."""
    config = tiny_families.served_config(DRAFTS.get(family, family))
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        period = text.layer_types[: 2 if family == "gpt_oss" else None]
        text.layer_types = (period * num_layers)[:num_layers]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["dense", *["sparse"] * (num_layers - 1)]
    if family in DRAFTS:
        if getattr(config, "layer_types", None):  # a prediction layer is like the last one
            config.layer_types[-1] = "full_attention"
        path.mkdir()
        return tiny_families.save_with_mtp(DRAFTS[family], path, config)
    return tiny_families.save_served(tiny_models.build_from(config), path)


BUCKET_BYTES = 32 << 10  # rows of the tiny models are cut, and there are some dozen buckets


@ranks.spawn_on_ranks(2)
def serve_syncs(
    spec: EngineSpec,
    servers: Mapping[str, GenerationLayout],
    key: str,
    folder: Path,
    exported: Path,
) -> ranks.Result:
    """Version 1 has weights times -2, version 2 times 4, which are exported as well."""
    engine = ranks.start_engine(spec)
    rank = dist.get_rank()
    settings = WeightSyncConfig(bucket_bytes=BUCKET_BYTES, verify="full", timeout_s=60)
    ends, open_ = {}, []
    for name, layout in servers.items():
        if rank == 0:
            open_.append(RendezvousServer("127.0.0.1"))
            endpoint_fields = asdict(open_[-1].endpoint)
        else:
            endpoint_fields = {}
        objects = [endpoint_fields]
        dist.broadcast_object_list(objects, src=0)
        endpoint = RendezvousEndpoint(**objects[0])
        dtype = spec.model.dtype
        num_mtp = engine.num_mtp_layers
        spec_ = TransferSpec(engine.layout, num_mtp, layout, dtype, settings, drafts=num_mtp > 0)
        if rank == 0:
            aside = folder / f"{key}-{name}.partial"
            aside.write_text(json.dumps([objects[0], spec_.to_dict()]))
            aside.rename(folder / f"{key}-{name}.json")
        ends[name] = connect(spec_, endpoint, engine.hf_config, rank, engine.device)
    for version in (1, 2):
        with torch.no_grad():
            for tensor in (t for c in engine.chunks for t in (*c.parameters(), *c.buffers())):
                tensor.mul_(-2)
        for end in ends.values():
            end.send(engine.get_local_weights(), WeightUpdate(version))
    if not exported.exists():
        tensors = engine.get_per_tensor_param()
        if rank == 0:
            aside = exported.with_suffix(".partial")
            write_checkpoint(aside, tensors, reference=spec.model.path)
            aside.rename(exported)  # servers wait for it
        else:
            assert list(tensors) == []
    dist.barrier()
    return {}


def selected(request: pytest.FixtureRequest) -> dict[str, dict[str, list[str]]]:
    """Return the cases that will run: by family the layouts, and the servers of each.

    These in the order of SERVERS, in which trainers and servers take part in a sync.
    """
    cases = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and "server" in item.fixturenames
    ]
    chosen = {(case["family"], case["layout"], case["server"]) for case in cases}
    by_family: dict[str, dict[str, list[str]]] = {}
    for family in FAMILIES:
        for layout in LAYOUTS:
            names = [name for name in SERVERS if (family, layout, name) in chosen]
            if names:
                by_family.setdefault(family, {})[layout] = names
    return by_family


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[serving_ranks.Report]:
    """Return the reports of every rank of both worlds."""
    folder = tmp_path_factory.mktemp("syncs")
    orders: dict[int, list[serving_ranks.Order]] = {1: [], 2: []}
    two: list[Callable[[], Any]] = []
    for family, layouts in selected(request).items():
        path, exported = saved(family, folder / family), folder / f"{family}-new"
        for layout, names in layouts.items():
            dtype = "bfloat16" if family in BFLOAT16 else "float32"
            spec = replace(ranks.build_engine_spec(path, LAYOUTS[layout], dtype), total_steps=0)
            spec.engine.mtp_loss_coef = 0.1 * (family in DRAFTS)
            key, servers = f"{family}-{layout}", {name: SERVERS[name] for name in names}
            two.append(partial(serve_syncs, spec, servers, key, folder, exported))
        syncs = {f"{family}-{layout}": tuple(names) for layout, names in layouts.items()}
        named = {name for names in layouts.values() for name in names}
        in_use = {name: server for name, server in SERVERS.items() if name in named}
        for world, of_world in orders.items():
            ep = {n: s.ep > 1 for n, s in in_use.items() if s.world_size == world}
            if ep:
                dtype = "bfloat16" if family in BFLOAT16 else "float32"
                num_drafts = int(family in DRAFTS)
                of_world.append(
                    serving_ranks.Order(
                        path, exported, syncs, ep, dtype=dtype, num_drafts=num_drafts
                    )
                )
    for family, num_layers in ((f, n) for f, depths in MEASURED.items() for n in depths):
        key = f"{family}-{num_layers}"
        path = saved(family, folder / key, num_layers)
        spec = replace(ranks.build_engine_spec(path, LAYOUTS["tp2"]), total_steps=0)
        single_server = {"1": SERVERS["1"]}
        two.append(partial(serve_syncs, spec, single_server, key, folder, path))
        order = serving_ranks.Order(path, path, {key: ("1",)}, {"1": False}, is_measured=True)
        orders[1].append(order)
    names = {world: f"{os.getpid()}-{secrets.token_hex(4)}" for world in orders}
    workers = [_start(world, name, folder, orders[world]) for world, name in names.items()]
    pipes = [pipe for _, connections in workers for pipe in connections]
    try:
        for send in two:
            send()
        assert all(pipe.poll(serving_ranks.WAIT_S) for pipe in pipes)
        return [pipe.recv() for pipe in pipes]
    except AssertionError as error:  # trainers wait in vain for a server that has failed
        complaints = [line for pipe in pipes if pipe.poll() for line in pipe.recv().complaints]
        raise AssertionError("\n".join(complaints)) from error
    finally:
        everybody = [process for members, _ in workers for process in members]
        mapped = reaper.list_mapped_inodes({process.pid for process in everybody})
        for process in everybody:
            process.kill()
            process.join()
        for file, inode in reaper.list_shared_memory().items():
            if inode in mapped or any(f"mcore_rl_{name}" in file for name in names.values()):
                Path("/dev/shm", file).unlink(missing_ok=True)


def _start(
    world: int, name: str, folder: Path, orders: list[serving_ranks.Order]
) -> tuple[list[Any], list[Any]]:
    """Forked from one process, which has imported vLLM; this one need not."""
    multiprocessing.set_forkserver_preload(serving_ranks.IMPORTED)
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], []
    for rank in range(world):
        parent_end, child_end = context.Pipe()
        arguments = (rank, world, name, folder, orders, child_end)
        process = context.Process(target=serving_ranks.serve, args=arguments)
        with mock.patch.dict(os.environ, QUIET_ENVIRONMENT):
            process.start()
        processes.append(process)
        pipes.append(parent_end)
    return processes, pipes


@pytest.fixture(scope="module")
def complaints(reports: list[serving_ranks.Report]) -> list[str]:
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
    measurements = [memory for report in reports for memory in report.memory]
    shallow, deep = (
        [memory for memory in measurements if memory.model == f"{family}-{num_layers}"]
        for num_layers in MEASURED[family]
    )
    assert len(shallow) == len(deep) == 2  # versions
    assert {memory.peak for memory in shallow} == {memory.peak for memory in deep}
    # As it came, what vLLM makes of it (packs are padded, much at this size), and temporaries.
    assert all(memory.module < memory.peak < 4 * memory.module for memory in deep)
