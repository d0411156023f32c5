"""The golden matrix: three models, every axis alone, in pairs and together, against one rank.

Remakes golden.json, the values of one rank in float32:

    python tests/dist_cpu/golden_matrix.py
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ranks
import tiny_models
import torch
import transformers

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch

GOLDEN = Path(__file__).with_name("golden.json")

MODELS = ("dense", "moe", "deepseek")
DEPTHS = (2, 4)  # layers of the model; four where more than two stages share them, or two unevenly

_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 96, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip


def config_of(model: str, num_layers: int) -> transformers.PretrainedConfig:
    shape = {**_SHAPE, "num_hidden_layers": num_layers}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
    latent = {
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "rope_interleave": True, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    if model == "deepseek":
        return transformers.DeepseekV3Config(
            **shape, **experts, **latent, tie_word_embeddings=False
        )
    grouped = {**shape, "head_dim": 16}
    if model == "dense":
        return transformers.Qwen3Config(**grouped, tie_word_embeddings=True)
    return transformers.Qwen3MoeConfig(
        **grouped, **experts, num_experts=8, norm_topk_prob=True, tie_word_embeddings=False
    )


@dataclass(frozen=True)
class Case:
    """A layout and what differs from the default settings of the engine."""

    layout: Layout
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def needs_experts(self) -> bool:
        return self.layout.ep > 1 or self.layout.etp > 1 or "moe.dispatcher" in self.settings

    @property
    def num_layers(self) -> int:
        uneven = 1 in (self.layout.first_stage_layers, self.layout.last_stage_layers)
        return 4 if self.layout.pp * self.layout.vpp > 2 or uneven else 2


_SHARDED = {"optimizer.distributed": True}
_OVERLAP = {"optimizer.overlap": True}
_FULL = {"recompute.granularity": "full"}
_SELECTIVE = {"recompute.granularity": "selective"}
_ALLGATHER = {"moe.dispatcher": "allgather"}

CASES: dict[str, Case] = {
    "full recompute": Case(Layout(), _FULL),
    "selective recompute": Case(Layout(), _SELECTIVE),
    # Each axis alone.
    "tp2": Case(Layout(tp=2)),
    "pp2": Case(Layout(pp=2)),
    "cp2": Case(Layout(cp=2)),
    "dp2": Case(Layout(dp=2)),
    "pp2 vpp2": Case(Layout(pp=2, vpp=2)),
    "dp2 ep2": Case(Layout(dp=2, ep=2)),
    "dp2 etp2": Case(Layout(dp=2, etp=2)),
    # Uneven pipelines; the embedding alone, the head alone.
    "pp2 first1": Case(Layout(pp=2, first_stage_layers=1)),
    "pp2 last1": Case(Layout(pp=2, last_stage_layers=1)),
    "pp2 embedding": Case(Layout(pp=2, first_stage_layers=0)),
    "pp2 head": Case(Layout(pp=2, last_stage_layers=0)),
    "pp2 vpp2 embedding head": Case(Layout(pp=2, vpp=2, first_stage_layers=0, last_stage_layers=0)),
    # Experts over the ranks of another axis.
    "tp2 ep2": Case(Layout(tp=2, ep=2)),
    "tp2 etp2": Case(Layout(tp=2, etp=2)),
    "cp2 ep2": Case(Layout(cp=2, ep=2)),
    "cp2 etp2": Case(Layout(cp=2, etp=2)),
    # Ways of running.
    "dp2 sharded": Case(Layout(dp=2), _SHARDED),
    "dp2 overlap": Case(Layout(dp=2), _OVERLAP),
    "dp2 sharded overlap": Case(Layout(dp=2), _SHARDED | _OVERLAP),
    "cp2 sharded": Case(Layout(cp=2), _SHARDED),
    "dp2 ep2 sharded": Case(Layout(dp=2, ep=2), _SHARDED),
    "tp2 full": Case(Layout(tp=2), _FULL),
    "pp2 full": Case(Layout(pp=2), _FULL),
    "pp2 vpp2 full": Case(Layout(pp=2, vpp=2), _FULL),
    "cp2 selective": Case(Layout(cp=2), _SELECTIVE),
    "dp2 ep2 allgather": Case(Layout(dp=2, ep=2), _ALLGATHER),
    "tp2 ep2 allgather": Case(Layout(tp=2, ep=2), _ALLGATHER),
    # Each pair on four ranks.
    "tp4": Case(Layout(tp=4)),
    "pp4": Case(Layout(pp=4)),
    "cp4": Case(Layout(cp=4)),
    "dp4": Case(Layout(dp=4)),
    "pp4 embedding head": Case(Layout(pp=4, first_stage_layers=0, last_stage_layers=0)),
    "tp2 pp2": Case(Layout(tp=2, pp=2)),
    "tp2 cp2": Case(Layout(tp=2, cp=2)),
    "tp2 dp2": Case(Layout(tp=2, dp=2)),
    "pp2 cp2": Case(Layout(pp=2, cp=2)),
    "pp2 dp2": Case(Layout(pp=2, dp=2)),
    "cp2 dp2": Case(Layout(cp=2, dp=2)),
    "tp2 pp2 vpp2": Case(Layout(tp=2, pp=2, vpp=2)),
    "cp2 pp2 vpp2": Case(Layout(cp=2, pp=2, vpp=2)),
    "dp2 pp2 vpp2": Case(Layout(dp=2, pp=2, vpp=2)),
    # Three axes and more.
    "dp4 ep4": Case(Layout(dp=4, ep=4)),
    "dp4 ep2": Case(Layout(dp=4, ep=2)),
    "dp4 ep2 etp2": Case(Layout(dp=4, ep=2, etp=2)),
    "tp2 dp2 ep2": Case(Layout(tp=2, dp=2, ep=2)),
    "tp2 dp2 ep4": Case(Layout(tp=2, dp=2, ep=4)),
    "tp2 dp2 etp2": Case(Layout(tp=2, dp=2, etp=2)),
    "tp2 dp2 ep2 etp2": Case(Layout(tp=2, dp=2, ep=2, etp=2)),
    "tp2 pp2 ep2": Case(Layout(tp=2, pp=2, ep=2)),
    "tp2 pp2 etp2": Case(Layout(tp=2, pp=2, etp=2)),
    "tp2 cp2 ep2": Case(Layout(tp=2, cp=2, ep=2)),
    "tp2 cp2 ep4": Case(Layout(tp=2, cp=2, ep=4)),
    "tp2 cp2 ep2 etp2": Case(Layout(tp=2, cp=2, ep=2, etp=2)),
    "pp2 dp2 ep2": Case(Layout(pp=2, dp=2, ep=2)),
    "pp2 cp2 ep2": Case(Layout(pp=2, cp=2, ep=2)),
    "cp2 dp2 ep2": Case(Layout(cp=2, dp=2, ep=2)),
    "cp2 dp2 ep4": Case(Layout(cp=2, dp=2, ep=4)),
    "tp2 pp2 vpp2 ep2": Case(Layout(tp=2, pp=2, vpp=2, ep=2)),
    "dp2 pp2 vpp2 ep2": Case(Layout(dp=2, pp=2, vpp=2, ep=2)),
    "cp2 pp2 vpp2 ep2": Case(Layout(cp=2, pp=2, vpp=2, ep=2)),
    "pp2 dp2 sharded": Case(Layout(pp=2, dp=2), _SHARDED),
    "cp2 dp2 sharded": Case(Layout(cp=2, dp=2), _SHARDED),
    "tp2 dp2 ep2 sharded": Case(Layout(tp=2, dp=2, ep=2), _SHARDED),
    "tp2 dp2 sharded overlap full": Case(Layout(tp=2, dp=2), _SHARDED | _OVERLAP | _FULL),
    "pp2 vpp2 dp2 sharded": Case(Layout(pp=2, vpp=2, dp=2), _SHARDED),
    "tp2 dp2 ep4 allgather": Case(Layout(tp=2, dp=2, ep=4), _ALLGATHER),
}


def save(name: str, folder: Path, num_layers: int = 4) -> Path:
    """A checkpoint whose weights numpy draws, so that every machine makes the same."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, num_layers)).float()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            low, high = (0.7, 1.3) if "norm" in key else (-0.14, 0.14)
            drawn = rng.uniform(low, high, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn).to(parameter.dtype))
    path = folder / f"{name}-{num_layers}"
    model.save_pretrained(path)
    return path


def run_case(path: Path, case: Case, batch: Batch) -> ranks.Result:
    """Log-probs of this rank's rows, where the last stage is, and two optimizer steps."""
    # Adam divides by the size of a gradient: without a floor it blows the rounding of one that is
    # nearly zero up to a whole step, and the loss of the second step shows it.
    settings = {**case.settings, "optimizer.eps": 1e-5}
    engine = ranks.started_with(path, case.layout, settings)
    rows = ranks.share_of(engine, batch)
    mine = batch.take(rows)
    scored = engine.infer_batch(mine)
    found = {} if scored is None else {"log_probs": _by_row(rows, scored)}
    return {**found, "steps": [engine.train_batch(mine, ranks.LOSS) for _ in range(2)]}


def _by_row(rows: list[int], scored: Batch) -> dict[int, list[float]]:
    columns = scored.jagged("log_probs")
    return {row: columns[place].tolist() for place, row in enumerate(rows)}


def cases_of(model: str) -> dict[str, Case]:
    """All, without those of experts for the dense model, and on four ranks for `moe`."""
    most = {"dense": 0, "moe": 2, "deepseek": 4}[model]
    return {n: c for n, c in CASES.items() if not c.needs_experts or c.layout.world_size <= most}


def run(folder: Path, world_sizes: tuple[int, ...] = (1, 2, 4)) -> dict[str, list[ranks.Result]]:
    """Results by rank under "model/case", and of one rank under "model/depth"; a spawn a world."""
    batch = tiny_models.make_batch()
    jobs: dict[int, dict[str, ranks.Job]] = {world: {} for world in world_sizes}
    paths = {(m, depth): save(m, folder, depth) for m in MODELS for depth in DEPTHS}
    for (model, depth), path in paths.items():
        jobs[1][f"{model}/{depth}"] = ranks.job(run_case, path, Case(Layout()), batch)
    for name, case in CASES.items():  # models inside: process groups are kept for the next
        for model in MODELS:
            if case.layout.world_size in jobs and name in cases_of(model):
                job = ranks.job(run_case, paths[model, case.num_layers], case, batch)
                jobs[case.layout.world_size][f"{model}/{name}"] = job
    return ranks.Results(jobs)


def remake() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run(Path(folder), world_sizes=(1,))
    golden = {}
    for name in (f"{model}/{depth}" for model in MODELS for depth in DEPTHS):
        [one] = results[name]
        golden[name] = {
            "log_probs": [[round(v, 7) for v in one["log_probs"][row]] for row in one["log_probs"]],
            "loss": [step["loss"] for step in one["steps"]],
            "grad_norm": [step["grad_norm"] for step in one["steps"]],
        }
    text = json.dumps(golden, indent=1).replace("\n   ", " ").replace("\n  ]", " ]")
    GOLDEN.write_text(text + "\n")


if __name__ == "__main__":
    remake()
