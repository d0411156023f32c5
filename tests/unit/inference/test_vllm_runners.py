"""What our hooks use of vLLM's model runners, against the source of the pinned ones.

Both are read and not imported: V2 is the GPU's default, and needs Triton to be imported.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from mcore_rl.config.errors import ConfigError

VLLM = Path(importlib.util.find_spec("vllm").origin).parent  # found, not imported
OURS = Path(__file__).parents[3] / "mcore_rl/inference/vllm"
V1, V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
# A subclass of the runner of V1, which inference/vllm/routing.py extends.
ON_CPU = "v1/worker/cpu_model_runner.py"


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def definition(file: str, name: str) -> ast.ClassDef:
    return next(n for n in ast.walk(tree(VLLM / file)) if getattr(n, "name", "") == name)


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)


def members(owner: ast.ClassDef) -> set[str]:
    """Methods of a class, and what its methods assign to self."""
    nodes = list(ast.walk(owner))
    assigned = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
        if isinstance(node.ctx, ast.Store)
    }
    return assigned | {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}


def used_of_runners(file: str) -> set[str]:
    """What a file of ours reads of a model runner."""
    owners = ("runner", "model_runner", "self.model_runner", "worker.model_runner")
    return {
        node.attr
        for node in ast.walk(tree(OURS / file))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


def calls(function: ast.AST, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    ]


@pytest.mark.parametrize("runner", [V1, V2])
def test_all_that_hooks_use_of_a_runner_is_there(runner):
    """Of bytes kept and cleared pages, reload and traces."""
    used = {file: used_of_runners(file) for file in ("sleep.py", "worker.py")}
    assert used == {
        "sleep.py": {"get_model", "kv_caches"},
        "worker.py": {"get_model", "reload_weights"},
    }
    assert used_of_runners("trace.py") == {"get_model", "device", "dtype"}
    there = members(definition(runner, "GPUModelRunner"))
    assert set().union(*used.values(), used_of_runners("trace.py")) <= there


@pytest.mark.parametrize("runner", [V1, V2])
def test_a_runner_reloads_a_folder_by_the_layerwise_reload(runner):
    reload = method(definition(runner, "GPUModelRunner"), "reload_weights")
    assert "weights_path" in {argument.arg for argument in reload.args.args}
    assert len(calls(reload, "reload_weights")) == 1  # reload/inplace.py, the same for both
    assert "reload" in {
        part
        for node in ast.walk(tree(VLLM / runner))
        if isinstance(node, ast.ImportFrom)
        and "reload_weights" in {alias.name for alias in node.names}
        for part in str(node.module).split(".")
    }


@pytest.mark.parametrize("runner", [V1, V2])
def test_pages_of_a_runner_are_tensors_or_lists_of_them(runner):
    """As kept_bytes and clear_woken_cache walk them: no dict of layers, no pool of its own."""
    owner = definition(runner, "GPUModelRunner")
    values = {
        type(node.value)
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if ast.unparse(target) == "self.kv_caches"
    }
    assert values and values <= {ast.List, ast.ListComp}


def test_the_experts_of_tokens_are_recorded_by_the_runner_that_vllm_demands_for_them():
    """V1 of GPUs has no such calls: vLLM refuses it, and so do the arguments of a server."""
    wired = {"get_aux_output_connector", "begin_step", "prepare_output"}
    for runner, expected in ((V1, set()), (V2, wired)):
        owner = definition(runner, "GPUModelRunner")
        assert {name for name in wired if calls(owner, name)} == expected
    check = definition("config/vllm.py", "VllmConfig")
    refusal = ast.unparse(method(check, "_verify_aux_output_compatibility"))
    assert "not self.use_v2_model_runner" in refusal


def test_what_routing_extends_on_a_cpu_is_there():
    methods = members(definition(ON_CPU, "CPUModelRunner"))
    methods |= members(definition(V1, "GPUModelRunner"))
    used = used_of_runners("routing.py")
    assert used == {"input_batch", "model", "query_start_loc", "vllm_config"}
    assert used | {"initialize_kv_cache", "execute_model", "sample_tokens"} <= methods


def test_workers_of_both_runners_wake_and_update_by_the_same_methods():
    worker = definition("v1/worker/gpu_worker.py", "Worker")
    assert {"wake_up", "sleep", "start_weight_update", "_weight_update_active"} <= members(worker)
    assert "use_v2_model_runner" not in ast.unparse(method(worker, "wake_up"))


@pytest.mark.parametrize("asked", ["0", "1", None])
def test_a_runner_that_records_no_experts_is_refused_where_they_are_asked_for(monkeypatch, asked):
    from mcore_rl.inference.vllm import routing as vllm_routing

    monkeypatch.setattr(type(vllm_routing.current_platform), "is_cpu", lambda _: False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    assert vllm_routing.arguments(False) == {"enable_return_routed_experts": False}
    if asked == "0":
        with pytest.raises(ConfigError, match="model runner V1 records no experts, and VLLM_USE_V"):
            vllm_routing.arguments(True)
    else:
        assert vllm_routing.arguments(True) == {"enable_return_routed_experts": True}
