"""The interface of a training engine, and how a backend is chosen."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from mcore_rl.algorithms.inputs import Losses, LossInputs
from mcore_rl.checkpoint.peft import Factors
from mcore_rl.config.checks import check_choice
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_engine import BACKENDS
from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig
from mcore_rl.data.batch import Batch
from mcore_rl.models.base import HFConfig
from mcore_rl.reshard.executor import LocalWeights

# From a micro-batch to the loss of each of its response tokens, and metrics. Its `needs` (see
# algorithms/inputs.py) say whether it reads the entropy, which is computed for no other.
LossFunction = Callable[[LossInputs], Losses]
Metrics = dict[str, float]
Place = Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The inputs of an engine. A `total_steps` of 0 builds no optimizer: inference only."""

    model: ModelConfig
    engine: EngineConfig
    seed: int
    total_steps: int = 0
    num_top_log_probs: int = 0  # likeliest ids of each token that infer_batch returns
    with_sum_pi_squared: bool = False  # of each token that infer_batch returns
    timeout_s: float = 1800.0  # of each collective of the ranks


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of a rank's model and optimizer between two calls; no activations."""

    parameters_bytes: int  # weights and buffers of the model, on the device or on the host
    gradients_bytes: int  # 0 after engine.to("host", grad=True)
    optimizer_state_bytes: int  # Adam's moments, and the float32 weights of a bfloat16 model
    on_device_bytes: int  # what of these three is on the engine's device, and not away


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """An optimizer step, and what the weights before it gave the response tokens."""

    scores: Batch | None  # "log_probs" and "entropy"; None where infer_batch returns None
    gaps: Metrics  # max_logprob_gap and mean_logprob_gap; the same on every rank
    metrics: Metrics  # as train_batch; empty where no step was taken


class PendingSave(Protocol):
    """A checkpoint that is being written beside what the engine does."""

    @property
    def is_written(self) -> bool:
        """Whether `finish` has nothing to wait for on this rank."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Return when the folder stands there. All ranks take part.

        Raises:
            OSError: it cannot be written; the same on every rank, and nothing is left.
            RuntimeError: it takes longer than `timeout_s`.
        """


class BaseEngine(ABC):
    """One model sharded over ranks. All ranks of a layout make the same calls in the same order.

    Batches contain the rows of this rank's data-parallel share. Results are those of the last
    pipeline stage, where all ranks of a data-parallel share return the same rows in the same order.
    """

    # Known once it is initialized.
    device: torch.device
    world_rank: int
    layout: Layout
    hf_config: HFConfig  # config.json of the model, as it is trained
    num_mtp_layers: int  # prediction layers that it has

    @property
    @abstractmethod
    def is_main_rank(self) -> bool:
        """Whether this is the rank that get_per_tensor_param yields tensors on."""

    @property
    def config_changes(self) -> Mapping[str, Any]:
        """Fields of config.json in which an export differs from the checkpoint it began with."""
        return {}

    def gathered_factors(self) -> list[Factors]:
        """All adapters, on the host of the main rank; collective over all ranks."""
        return []

    @abstractmethod
    def initialize(self) -> None:
        """Join the process groups, build the model and load its weights."""

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Decoder layers with experts on this rank, numbered over the whole model, ascending."""
        return ()

    @abstractmethod
    def infer_batch(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        adapters: bool = True,
        replay: bool = True,
    ) -> Batch | None:
        """Adds "log_probs" and "entropy": one float32 per response token, in nats.

        They are those of softmax(logits / temperature), with the temperature of the sampling that
        they refer to, above 0. Value models have no logits and do not read it, here and below.

        With spec.num_top_log_probs = k also "top_log_probs" and "top_ids", k per response token,
        the likeliest first. With spec.with_sum_pi_squared also "sum_pi_squared": the sum of the
        squared probabilities of all ids. A value model adds "values" instead: one float32 per
        response token, the value of the state before it.

        With engine.moe.router_replay = "record" also "routed_experts", which train_batch then
        needs. "rollout" needs the experts here, too: "stage_routed_experts", those of this rank's
        expert_layers (engine/megatron/router_replay.py).

        Without `adapters`, of the base model of a LoRA engine; other engines have none. Then, and
        without `replay`, routers choose, whatever the settings say, and nothing is recorded.

        None on pipeline stages other than the last.
        """

    @abstractmethod
    def trace(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What the modules of this rank's pipeline stage put out, by Hugging Face name.

        float32 [tokens of the batch, dim], complete after all reductions. `batch` as for
        infer_batch. Ranks of the stage with the same rows get the same.
        """

    @abstractmethod
    def train_batch(
        self, batch: Batch, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> Metrics:
        """One optimizer step on a mini-batch; its loss is the sum of loss_weights * loss.

        The sum is over the tokens of all ranks. The loss function reads scores at `temperature`, as
        infer_batch gives them. Its metrics are returned as means over the trained tokens of all
        ranks: those whose loss weight is not 0. A loss function that returns several losses, by the
        columns of their weights, adds a sum each: "loss" is the total, "kl_loss" that of
        kl_weights, "policy_loss" that of loss_weights.

        They, and those of the load of experts ("moe/..."), come from the last pipeline stage; the
        others return "grad_norm", "lr" and "num_skipped_steps" only.
        """

    @abstractmethod
    def train_batch_with_scores(
        self,
        batch: Batch,
        loss_function: LossFunction,
        *,
        temperature: float = 1.0,
        bounds: Mapping[str, float],
    ) -> ScoredStep:
        """Take the step of train_batch, and return the scores that infer_batch would have given.

        They are those of the forward pass of the step: the loss function gets the log-probs,
        without a gradient, as the column "log_probs", which the batch does not have.

        Gaps are of these log-probs and the column rollout_log_probs, at tokens of all ranks where
        the column gap_mask is not 0: the largest and the mean absolute difference, in nats; none
        without such a token. They are looked at between the backward pass and the optimizer: where
        one is not within `bounds`, no rank takes the step, and weights, optimizer state and
        schedule stay as they were, bit for bit.
        """

    @abstractmethod
    def forward_backward_batch(
        self,
        batch: Batch,
        loss_function: LossFunction | None,
        *,
        forward_only: bool,
        temperature: float = 1.0,
    ) -> list[dict[str, torch.Tensor]]:
        """Run all micro-batches; gradients accumulate unless forward_only.

        One result each on the last pipeline stage, none on the others: its parts of the sums that
        train_batch returns or, without a loss function, its scores.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None: ...

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip, step, and return the gradient norm before clipping."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule and return the learning rate that the next step uses."""

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream the weights as full Hugging Face tensors, on the main rank; others send theirs."""

    @abstractmethod
    def local_weights(self) -> LocalWeights:
        """This rank's shards of the weights, in the layout of the family's rules."""

    @abstractmethod
    def to(
        self, place: Place, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move parameters, optimizer state and gradients to the "host" or to the "device".

        Gradients are dropped when moved out and are zero after they return. A call that needs what
        is offloaded raises StateError. On the CPU lane device and host are the same: gradients are
        freed, the others stay in place but count as offloaded.
        """

    @abstractmethod
    def memory_report(self) -> MemoryReport: ...

    @abstractmethod
    def close(self) -> None:
        """Free the model and its memory. The engine cannot be used afterwards."""

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Weights, optimizer state and counts of steps, in a new folder.

        Raises:
            ConfigError: `path` exists.
            OSError: it cannot be written; the same on every rank, and nothing is left.
        """

    @abstractmethod
    def begin_save(self, path: Path) -> PendingSave:
        """The same, which waits for a copy on the host only. One at a time."""

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """What save_checkpoint has written, in any layout."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine implementation: BACKEND in `mcore_rl/engine/NAME/backend.py`."""

    engines: Mapping[str, Callable[[EngineSpec], BaseEngine]]  # by model type
    # Variables that the process of a rank must be started with.
    rank_environment: Callable[[Layout, str], dict[str, str]]  # for a layout on "cuda" or "cpu"
    # Raises ConfigError for modules that ranks on "cuda" or "cpu" cannot have.
    check_modules: Callable[[str, str], object]


def backend_of(engine: EngineConfig) -> Backend:
    """Raises ConfigError when there is none of that name."""
    check_choice("backend", engine.backend, BACKENDS)
    module = importlib.import_module(f"mcore_rl.engine.{engine.backend}.backend")
    backend: Backend = module.BACKEND
    return backend


def create_engine(model_type: str, spec: EngineSpec) -> BaseEngine:
    """The engine of spec.engine.backend; "language_model", "value_model" or "reward_model"."""
    engines = backend_of(spec.engine).engines
    if model_type not in engines:
        raise ConfigError(
            f"backend={spec.engine.backend!r} has no engine of {model_type!r}; allowed: "
            f"{', '.join(engines)}"
        )
    return engines[model_type](spec)
