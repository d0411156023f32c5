"""Calls of branches for GPUs, against the source of the pinned packages.

Transformer Engine cannot be imported here: what its release has stands in transformer_engine.json,
written by tests/record_transformer_engine.py.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch.multiprocessing.reductions

sys.path.insert(0, str(Path(__file__).parents[2]))

import record_transformer_engine as recorded

RECORD = json.loads(recorded.RECORD.read_text())
MODULES = RECORD["modules"]
MEGATRON = list(recorded.list_megatron_files())
EXTENSION = next(file for file in MEGATRON if file.match("extensions/transformer_e*.py"))
# What Megatron-core asks for under `try`, or of older releases only, and does without.
MISSING = {
    "transformer_engine.pytorch.attention": {"_SplitAlongDim", "apply_rotary_pos_emb"},
    "transformer_engine.pytorch.cpp_extensions": {"cast_to_fp8"},
    "transformer_engine.pytorch.module.base": {"get_workspace"},
}


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def test_the_record_is_of_the_pinned_release():
    pins = (Path(__file__).parents[3] / "launch/requirements/gpu.txt").read_text()
    assert re.search(r"^transformer-engine-cu13==(.*)$", pins, re.M)[1] == RECORD["version"]


def test_all_that_megatron_imports_is_there():
    used_names = set[tuple[str, str]]()
    for tree in map(parse, MEGATRON):
        used_names |= recorded.list_used_names(tree)
    missing: dict[str, set[str]] = {}
    for module, name in used_names:
        if name not in MODULES.get(module, {}):
            missing.setdefault(module, set()).add(name)
    assert missing == MISSING


LINEARS = {"TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear"}


def keywords(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg}


def wrappers() -> list[tuple[str, str, ast.Call]]:
    """(class of Megatron, class of Transformer Engine, the call of its __init__)."""
    calls = []
    for node in ast.walk(parse(EXTENSION)):
        if not isinstance(node, ast.ClassDef):
            continue
        base = ast.unparse(node.bases[0]) if node.bases else ""
        if base.startswith("te.pytorch.") and base.count(".") == 2:
            calls += [
                (node.name, base.rpartition(".")[2], call)
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
                and ast.unparse(call.func) == "super().__init__"
                and keywords(call)  # or they are handed on
            ]
    return calls


@pytest.mark.parametrize(
    ("wrapper", "base", "call"),
    wrappers(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_layers_of_megatron_hand_over_what_those_of_transformer_engine_take(
    wrapper, base, call
):
    assert keywords(call) <= set(MODULES["transformer_engine.pytorch"][base])


def test_the_layers_that_this_engine_builds_are_among_them():
    assert LINEARS | {"TEDotProductAttention"} <= {wrapper for wrapper, _, _ in wrappers()}


@pytest.mark.parametrize("wrapper", sorted(LINEARS))
def test_linears_add_weight_gradients_in_place_and_do_not_get_the_first_micro_batch(wrapper):
    """fuse_weight_gradients and disable_parameter_transpose_cache count on it."""
    base = next(base for name, base, _ in wrappers() if name == wrapper)
    assert "fuse_wgrad_accumulation" in MODULES["transformer_engine.pytorch"][base]
    definition = next(n for n in ast.walk(parse(EXTENSION)) if getattr(n, "name", "") == wrapper)
    chosen = "None if self.disable_parameter_transpose_cache else self.is_first_microbatch"
    assert chosen in {
        ast.unparse(node) for node in ast.walk(definition) if isinstance(node, ast.IfExp)
    }


def test_megatrons_own_flag_still_demands_apex_for_the_output_layer():
    layers = parse(next(file for file in MEGATRON if file.match("tensor_parallel/layers.py")))
    checks = {ast.unparse(node.test) for node in ast.walk(layers) if isinstance(node, ast.If)}
    flag = "config.gradient_accumulation_fusion"
    assert f"{flag} and (not _grad_accum_fusion_available)" in checks


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_are_made_with_what_they_take(name):
    takes = set(MODULES["transformer_engine.pytorch"][name])
    [norm] = [
        n for n in ast.walk(parse(EXTENSION)) if isinstance(n, ast.ClassDef) and n.name == "TENorm"
    ]
    [call] = [
        node
        for node in ast.walk(norm)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "norm_module"
    ]
    assert keywords(call) <= takes
    assert f"norm_module = te.pytorch.{name}" in ast.unparse(norm)


def inference_imports() -> list[tuple[str, str]]:
    folder = Path(__file__).parents[3] / "mcore_rl/inference/vllm"
    nodes = [node for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    return [
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm"
        for alias in node.names
    ]


def test_all_that_inference_imports_of_vllm_is_there_for_cpus_and_gpus():
    """Read and not imported: the pinned builds for CPUs and GPUs have the same Python source."""
    spec = importlib.util.find_spec("vllm")
    source, used_names = recorded.Source(Path(spec.origin).parents[1]), inference_imports()
    assert len(used_names) > 15
    for module, name in used_names:
        source.find(module, name)
    with pytest.raises(KeyError):  # of vLLM 0.26
        source.find("vllm.model_executor.model_loader.reload.meta", "trainer_send_weights")


def test_shared_gpu_memory_is_opened_as_torch_opens_it():
    """Our handle has the fields that torch's own sharing hands to the same function, in order."""
    from mcore_rl.weight_sync.shared_memory import _HANDLE

    source = inspect.getsource(torch.multiprocessing.reductions.rebuild_cuda_tensor)
    [call] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_new_shared_cuda")
    ]
    given = tuple(ast.unparse(argument).removeprefix("storage_") for argument in call.args)
    assert given == _HANDLE
