"""Attributes of vLLM's model runners that our hooks use exist in the pinned source.

Both runners are read and not imported: V2 is the GPU's default, and needs Triton to be imported.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from mcore_rl.config.errors import ConfigError

VLLM = Path(importlib.util.find_spec("vllm").origin).parent  # found, not imported
PACKAGE = Path(__file__).parents[3] / "mcore_rl/inference/vllm"
MIXIN = "v1/worker/lora_model_runner_mixin.py"  # of both runners
V1, V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
ON_CPU = "v1/worker/cpu_model_runner.py"  # a subclass of V1's, extended by patches/cpu.py


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def definition(file: str, name: str) -> ast.ClassDef:
    return next(n for n in ast.walk(tree(VLLM / file)) if getattr(n, "name", "") == name)


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)


def list_members(owner: ast.ClassDef) -> set[str]:
    """Return the methods of a class, and the attributes that they assign."""
    nodes = list(ast.walk(owner))
    assigned = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
        if isinstance(node.ctx, ast.Store)
    }
    return assigned | {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}


def list_runner_attributes(file: str) -> set[str]:
    """Return the attributes of a model runner that a file of ours reads."""
    owners = ("runner", "model_runner", "self.model_runner", "worker.model_runner")
    return {
        node.attr
        for node in ast.walk(tree(PACKAGE / file))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


def list_calls(function: ast.AST, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    ]


@pytest.mark.parametrize("runner", [V1, V2])
def test_attributes_that_hooks_read_exist_in_a_runner(runner):
    files = ("worker.py", "patches/sleep.py", "drafts.py", "trace.py")
    used = {file: list_runner_attributes(file) for file in files}
    assert used == {
        "worker.py": {"get_model", "lora_manager", "reload_weights"},
        "patches/sleep.py": {"kv_caches"},
        "drafts.py": {"get_model", "get_draft_model"},
        "trace.py": {"get_model", "device", "dtype"},
    }
    owner, mixin = definition(runner, "GPUModelRunner"), definition(MIXIN, "LoRAModelRunnerMixin")
    assert mixin.name in map(ast.unparse, owner.bases)
    assert set().union(*used.values()) <= list_members(owner) | list_members(mixin)


@pytest.mark.parametrize("runner", [V1, V2])
def test_a_runner_reloads_a_folder_by_the_layerwise_reload(runner):
    reload = method(definition(runner, "GPUModelRunner"), "reload_weights")
    assert "weights_path" in {argument.arg for argument in reload.args.args}
    assert len(list_calls(reload, "reload_weights")) == 1  # reload/inplace.py, the same for both
    assert "reload" in {
        part
        for node in ast.walk(tree(VLLM / runner))
        if isinstance(node, ast.ImportFrom)
        and "reload_weights" in {alias.name for alias in node.names}
        for part in str(node.module).split(".")
    }


@pytest.mark.parametrize("runner", [V1, V2])
def test_pages_of_a_runner_are_tensors_or_lists_of_them(runner):
    """measure_memory and clear_woken_cache read them so: no dict of layers, no other pool."""
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
        assert {name for name in wired if list_calls(owner, name)} == expected
    check = definition("config/vllm.py", "VllmConfig")
    refusal = ast.unparse(method(check, "_verify_aux_output_compatibility"))
    assert "not self.use_v2_model_runner" in refusal


def test_methods_that_record_experts_extends_exist_in_the_cpus_runner():
    methods = list_members(definition(ON_CPU, "CPUModelRunner"))
    methods |= list_members(definition(V1, "GPUModelRunner"))
    used = list_runner_attributes("patches/cpu.py")
    assert used == {"input_batch", "model", "query_start_loc", "vllm_config"}
    assert used | {"initialize_kv_cache", "execute_model", "sample_tokens"} <= methods


def test_workers_of_both_runners_wake_and_update_by_the_same_methods():
    worker = definition("v1/worker/gpu_worker.py", "Worker")
    assert {"wake_up", "sleep", "start_weight_update", "_weight_update_active"} <= list_members(
        worker
    )
    assert "use_v2_model_runner" not in ast.unparse(method(worker, "wake_up"))


@pytest.mark.parametrize("version", ["0", "1", None])
def test_a_runner_that_records_no_experts_is_refused_when_they_are_recorded(monkeypatch, version):
    from mcore_rl.inference.vllm import worker as vllm_worker

    monkeypatch.setattr(type(vllm_worker.current_platform), "is_cpu", lambda _: False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if version is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", version)
    assert vllm_worker.build_expert_arguments(False) == {"enable_return_routed_experts": False}
    if version == "0":
        with pytest.raises(ConfigError, match="model runner V1 records no experts, and VLLM_USE_V"):
            vllm_worker.build_expert_arguments(True)
    else:
        assert vllm_worker.build_expert_arguments(True) == {"enable_return_routed_experts": True}


def test_the_index_of_patches_names_them_all():
    """Patches run once a process: cached functions, and those that take the server's name."""
    folder, patches = PACKAGE / "patches", set()
    for file in folder.glob("[a-z]*.py"):
        for node in tree(file).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                is_cached = any("cache" in ast.unparse(d) for d in node.decorator_list)
                if is_cached or [argument.arg for argument in node.args.args] == ["server"]:
                    patches.add(f"{file.stem}.{node.name}")
    index = ast.get_docstring(tree(folder / "__init__.py"))
    assert set(re.findall(r"^([a-z]+\.\w+):", index, re.MULTILINE)) == patches
