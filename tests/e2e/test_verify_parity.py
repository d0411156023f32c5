"""The three engines agree on every family that vLLM's CPU build runs, and faults are named.

Megatron runs on two ranks, which serve all cases; each family has a vLLM server of its own. A fault
is planted in a copy of a checkpoint, or in the rules, and what the copy gives under Megatron is
compared with what the original gives elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))
sys.path.insert(0, str(Path(__file__).parent))

import parity_jobs
import ranks
import tiny_families
import tiny_models

from mcore_rl.cli.main import main
from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig, RolloutConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.jobs.parity import engines
from mcore_rl.jobs.parity.run import (
    THRESHOLDS,
    LogProbGap,
    Scores,
    compare_log_probs,
    compare_traces,
    find_first_different,
)
from mcore_rl.jobs.parity.settings import TOLERANCES, sample_prompts
from tests.e2e.hosting import hosting
from tests.nightly import all_but

pytestmark = [pytest.mark.ranks, pytest.mark.server]  # of that lane: its ranks are there already

TP2, PP2, TP2_EP2 = Layout(tp=2), Layout(pp=2, first_stage_layers=1), Layout(tp=2, ep=2)
FAMILIES = {
    "llama": PP2,
    "qwen2": TP2,
    "qwen3": TP2,
    "mixtral": TP2_EP2,
    "glm4_moe": TP2_EP2,
    "deepseek_v3": TP2_EP2,
    "deepseek_v3_plain": TP2_EP2,
    "kimi_k2": TP2_EP2,
    "glm4_moe_lite": TP2_EP2,
    "llama_linear": TP2,
    "llama_scaled": TP2,
    "qwen3_yarn": PP2,
    "glm4_moe_yarn": TP2_EP2,
    "gpt_oss": TP2_EP2,
}  # and qwen3_moe, by the command
OTHER_ENGINES = ("hf", "vllm_prefill", "vllm_decode")
PROMPTS = sample_prompts(tiny_models.VOCAB, longest=34)

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Verify = Callable[..., tuple[int, str, str]]


def swap_gate_and_up(tensors: Tensors, config: Config) -> None:
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def another_rotary_base(tensors: Tensors, config: Config) -> None:
    config["rope_parameters"]["rope_theta"] *= 10


def permute_experts(tensors: Tensors, config: Config) -> None:
    """Permute the experts of one layer; its router stays as it is."""
    names = [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]
    old = {name: tensors[name] for name in names}
    num_experts = config["n_routed_experts"]
    for name in names:
        *head, index, projection, kind = name.split(".")
        other = str((int(index) + 1) % num_experts)
        tensors[name] = old[".".join([*head, other, projection, kind])]


def forget_the_router_bias(tensors: Tensors, config: Config) -> None:
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"].zero_()


def reorder_query_heads(tensors: Tensors, config: Config) -> None:
    """Turn queries of the first group of heads into those of the second."""
    name = "model.layers.2.self_attn.q_proj.weight"
    tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])


def another_epsilon(tensors: Tensors, config: Config) -> None:
    config["rms_norm_eps"] *= 10


def untie_the_head(tensors: Tensors, config: Config) -> None:
    config["tie_word_embeddings"] = False
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)


@dataclass(frozen=True)
class Fault:
    family: str
    plant: Callable[[Tensors, Config], None]
    module: str  # which it must be brought down to
    layout: Layout


FAULTS = [
    Fault("qwen3", swap_gate_and_up, "model.layers.1.mlp", TP2),
    Fault("llama", another_rotary_base, "model.layers.0.self_attn", PP2),
    Fault("glm4_moe", permute_experts, "model.layers.1.mlp", TP2_EP2),
    Fault("glm4_moe", forget_the_router_bias, "model.layers.1.mlp.gate", TP2_EP2),
    Fault("qwen3", reorder_query_heads, "model.layers.2.self_attn", PP2),
    Fault("qwen3", another_epsilon, "model.layers.0.input_layernorm", TP2),
    Fault("qwen3", untie_the_head, "lm_head", PP2),
]
IN_THE_RULES = "up_before_gate"  # in every layer of qwen3


def saved(name: str, folder: Path, seed: int = 0) -> Path:
    config = tiny_families.served_config(name)
    if config.model_type == "qwen2":  # its heads divide the hidden size
        config.num_attention_heads = config.num_key_value_heads = 2
    if hasattr(config, "kv_lora_rank"):
        config.rms_norm_eps = 1e-6  # what transformers has in norms of latents, whatever the config
    path = folder / f"{name}{seed}"
    tiny_families.save_served(tiny_models.build_from(config, seed), path)
    return tiny_families.name_kimi(path) if name == "kimi_k2" else path


def faulty(fault: Fault, good: Path, folder: Path) -> Path:
    path = folder / f"{fault.family}-{fault.plant.__name__}"
    shutil.copytree(good, path)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    fault.plant(tensors, config)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def spec(path: Path, layout: Layout) -> EngineSpec:
    model, engine = ModelConfig(path=str(path), dtype="float32"), EngineConfig(layout=layout)
    return EngineSpec(model, engine, seed=0, num_top_log_probs=1)


@dataclass(frozen=True)
class Reference:
    """Scores and traces of the original of a family by the other engines."""

    path: Path
    sequences: list[list[int]]
    scores: dict[str, Scores]  # by name of OTHERS
    traces: dict[str, Tensors]  # of the longest sequence


def reference(path: Path) -> Reference:
    served, vllm_trace = asyncio.run(run_vllm(path))
    sequences = served["sequences"]
    scores = {
        "hf": Scores(**engines.score_with_hf(str(path), "float32", sequences)),
        "vllm_prefill": Scores(**served["prefill"]),
        "vllm_decode": Scores(**served["decode"]),
    }
    [hf_trace] = engines.trace_with_hf(str(path), "float32", sequences[-1:])
    traces = {"hf": hf_trace, "vllm_prefill": vllm_trace, "vllm_decode": vllm_trace}
    return Reference(path, sequences, scores, traces)


async def run_vllm(path: Path) -> tuple[dict[str, Any], Tensors]:
    config = RolloutConfig(max_num_seqs=4, kv_cache_bytes=32 << 20)
    server = VLLMServer(str(path), "float32", 256, config, seed=0)
    try:
        await server.start()
        served = await engines.score_on_server(server, PROMPTS, num_tokens=16)
        return served, await server.trace(served["sequences"][-1])
    finally:
        await server.close()


@dataclass(frozen=True)
class Run:
    """One case under Megatron, and what it is compared with."""

    scores: Scores
    trace: Tensors
    reference: Reference

    def gap(self, other: str) -> LogProbGap:
        return compare_log_probs(
            self.reference.sequences, self.scores, self.reference.scores[other]
        )

    def differences(self, other: str) -> dict[str, float]:
        return compare_traces(self.trace, self.reference.traces[other], num_layers=3)


class Runs:
    """Cases, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.reference = functools.cache(self._reference)
        self.run_case = functools.cache(self._run_case)

    def _reference(self, family: str) -> Reference:
        with hosting():
            return reference(saved(family, self._folder))

    def _run_case(self, case: str) -> Run:
        """A family, the name of a fault, or a checkpoint that is loaded over other weights."""
        planted, checkpoint = [], ""
        if case in FAMILIES:
            family, layout = case, FAMILIES[case]
            path = self.reference(family).path
        elif case == IN_THE_RULES:
            family, layout, planted = "qwen3", TP2, [parity_jobs.with_up_before_gate]
            path = self.reference(family).path
        elif case == "checkpoint":
            family, layout, checkpoint = "qwen3", TP2, str(self._folder / "checkpoint")
            good = spec(self.reference(family).path, layout)
            ranks.spawn(
                2, {"save": ranks.make_job(parity_jobs.save_weights, good, Path(checkpoint))}
            )
            path = saved(family, self._folder, seed=1)
        else:
            [fault] = [fault for fault in FAULTS if fault.plant.__name__ == case]
            family, layout = fault.family, fault.layout
            path = faulty(fault, self.reference(family).path, self._folder)
        expected = self.reference(family)
        arguments = (spec(path, layout), checkpoint)
        score = ranks.make_job(
            *planted, engines.score_with_megatron, *arguments, expected.sequences
        )
        trace = ranks.make_job(
            *planted, engines.trace_with_megatron, *arguments, expected.sequences[-1:]
        )
        results = ranks.spawn(2, {"score": score, "trace": trace})
        [traced] = engines.merge_traces(results["trace"])
        return Run(engines.merge_scores(results["score"]), traced, expected)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("models"))
    ranks.dismiss()


@pytest.mark.parametrize("other", OTHER_ENGINES)
@pytest.mark.parametrize("case", all_but(("qwen3", "checkpoint"), [*FAMILIES, "checkpoint"]))
def test_engines_agree_on_every_token_and_in_every_module(runs, case, other):
    run = runs.run_case(case)
    gap = run.gap(other)
    scored = sum(len(ids) - 1 for ids in run.reference.sequences)
    assert gap.num_tokens == (16 * len(PROMPTS) if other == "vllm_decode" else scored)
    assert gap.max_abs < TOLERANCES["float32"] / 10
    assert gap.argmax_agreement == 1.0
    by_module = run.differences(other)
    assert {"model.embed_tokens", "model.layers.2.mlp", "lm_head"} <= set(by_module)
    assert max(by_module.values()) < THRESHOLDS["float32"] / 10, by_module


@pytest.mark.parametrize("other", OTHER_ENGINES)
@pytest.mark.parametrize(
    "fault",
    all_but([fault for fault in FAULTS if fault.family != "llama"], FAULTS),
    ids=lambda fault: fault.plant.__name__,
)
def test_a_fault_is_caught_and_its_module_named(runs, fault, other):
    run = runs.run_case(fault.plant.__name__)
    assert run.gap(other).max_abs > 5 * TOLERANCES["float32"]
    by_module = run.differences(other)
    assert find_first_different(by_module, "float32") == fault.module
    assert by_module[fault.module] > 2 * THRESHOLDS["float32"]


@pytest.mark.parametrize("other", OTHER_ENGINES)
def test_a_fault_in_the_rules_is_caught_and_its_module_named(runs, other):
    run = runs.run_case(IN_THE_RULES)
    assert run.gap(other).max_abs > 0.1
    assert find_first_different(run.differences(other), "float32") == "model.layers.0.mlp"


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Verify:
    """The command in this process, which has imported torch: exit status, output, errors."""

    def run(*options: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mcore-rl", "verify", "parity", *map(str, options)])
        capfd.readouterr()
        try:
            status = main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *capfd.readouterr()

    return run


def test_the_command_passes_a_good_model(verify, tmp_path):
    path, prompts = saved("qwen3_moe", tmp_path), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [5, 6, 7]}\n{"prompt_ids": [130]}\n')
    options = ("--model", path, "--layout", "tp=2,ep=2", "--against", "hf,vllm")
    status, printed, errors = verify(*options, "--prompts", prompts, "--json")
    assert status == 0, errors
    report = json.loads(printed)
    assert report["passed"] is True
    assert (report["tolerance"], report["dtype"]) == (1e-4, "float32")
    assert (report["layout"]["tp"], report["layout"]["ep"], report["layout"]["pp"]) == (2, 2, 1)
    assert {"torch", "transformers", "megatron-core"} <= set(report["versions"])
    counts = {"megatron~hf": 34, "megatron~vllm_prefill": 34, "megatron~vllm_decode": 32}
    assert {name: pair["num_tokens"] for name, pair in report["pairs"].items()} == counts
    for pair in report["pairs"].values():
        assert 0 <= pair["mean_abs"] <= pair["p99_abs"] <= pair["max_abs"] < 1e-5
        assert pair["argmax_agreement"] == 1.0
        assert "first_differing_module" not in pair


@pytest.mark.nightly  # CI has its faults in one process, above
def test_the_command_names_the_module_of_a_fault(verify, tmp_path):
    fault = next(fault for fault in FAULTS if fault.plant is another_rotary_base)
    good = saved(fault.family, tmp_path)
    bad = faulty(fault, good, tmp_path)
    options = ("--reference", good, "--layout", "tp=1", "--against", "hf")
    status, printed, errors = verify("--model", bad, *options)
    assert status == 1, errors
    assert "FAILED" in printed
    assert f"the first module that differs is {fault.module} (" in printed
