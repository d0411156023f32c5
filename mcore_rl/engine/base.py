"""The contract of a training engine, and the choice of one by `actor.backend`.

A user's own engine is a subclass of `BaseEngine` in a file with a `Backend`:

    BACKEND = Backend({"language_model": MyEngine}, settings=("layout.dp", "optimizer"))

and the setting actor.backend=path/to/file.py:BACKEND. `mcore_rl.testing.check_engine` runs it
through all that this file says; examples/hf_engine.py is an example.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.algorithms.correction import find_gaps_beyond
from mcore_rl.algorithms.inputs import Losses, LossInputs
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.peft import Factors
from mcore_rl.config.allowed import BACKENDS
from mcore_rl.config.checks import check_choice
from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.import_path import is_import_path, load_object
from mcore_rl.config.packages import check_installed
from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.steps import reduce_logprob_gaps
from mcore_rl.models.base import HFConfig, get_family, pad_vocab_size, use_family
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.rules import parse_slice
from mcore_rl.weight_sync.spec import ShardFormat

# From a micro-batch to the loss of each of its response tokens, and metrics. Its `needs` (see
# algorithms/inputs.py) say whether it reads the entropy, which is computed for no other.
LossFunction = Callable[[LossInputs], Losses]
Metrics = dict[str, float]
Place = Literal["host", "device"]
# Of glibc, mallopt(3): all allocations are in the heap, which only `to("host")` trims. One arena:
# each weight update has a new thread, and every arena that threads take turns in keeps the memory
# of a whole update.
MALLOC_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


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
    images_folder: str = ""  # ImageStore of the images that batches name; "": none


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """An optimizer step, and the scores of the response tokens by the weights before it."""

    scores: Batch | None  # "log_probs" and "entropy"; None where infer_batch returns None
    gaps: Metrics  # max_logprob_gap and mean_logprob_gap; the same on every rank
    metrics: Metrics  # as train_batch; empty where no step was taken


class PendingSave(Protocol):
    """A checkpoint that is written while the engine goes on."""

    @property
    def is_written(self) -> bool:
        """Return whether `finish` has nothing to wait for on this rank."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Return when the folder is complete. All ranks take part.

        Raises:
            OSError: It cannot be written; the same on every rank, and nothing is left.
            RuntimeError: It takes longer than `timeout_s`.
        """


class FinishedSave:
    """A checkpoint that was complete when its save returned."""

    is_written = True

    def finish(self, timeout_s: float | None = None) -> None:
        """Return at once."""


class BaseEngine(ABC):
    """One model on the ranks of a layout. All ranks make the same calls in the same order.

    Batches contain the rows of this rank's data-parallel share, which may be none. Results are
    those of the last pipeline stage, where all ranks of a data-parallel share return the same rows
    in the same order; other stages return None.

    Attributes:
        spec: The inputs of the engine.
        layout: spec.engine.layout.
        device: Device of the weights that `get_local_weights` returns. Set by `initialize`, as are:
        world_rank: This rank, among those of the layout.
        hf_config: config.json of the model, as it is trained (CheckpointReader.read_config).
        num_mtp_layers: Multi-token prediction layers that it trains.
        expert_load: Tokens of each expert in the last optimizer step, over all ranks and without
            padding: float64 [experts] on the CPU, by decoder layer. Empty for a model without
            experts, before the first step, and for an engine that does not count them.
        shard_format: What get_local_weights returns: "full", every tensor of the checkpoint whole,
            by its name there; "megatron", parameters by the family's rules; or "rows", rows of the
            parameters of a model of transformers (reshard/rules.StackedRows).
    """

    device: torch.device
    world_rank: int
    hf_config: HFConfig
    num_mtp_layers: int = 0
    shard_format: ClassVar[ShardFormat] = "full"

    def __init__(self, spec: EngineSpec) -> None:
        """Keep the inputs; `initialize` builds the model."""
        self.spec, self.layout = spec, spec.engine.layout
        self.expert_load: dict[int, torch.Tensor] = {}
        self._offloaded: frozenset[str] = frozenset()  # names of parts, as `move` gets them

    # Every engine implements these.

    @abstractmethod
    def initialize(self) -> None:
        """Join the process group, build the model and load its weights.

        torch's default group exists where an earlier engine of this process, or torchrun, has
        joined it; else parallel.store.join_world joins it.
        """

    @abstractmethod
    def infer_batch(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        adapters: bool = True,
        replay: bool = True,
    ) -> Batch | None:
        """Add "log_probs" and "entropy": one float32 per response token, in nats.

        They are those of softmax(logits / temperature), with the temperature of the sampling that
        they refer to, above 0. Value models have no logits and do not read it.

        With spec.num_top_log_probs = k also "top_log_probs" and "top_ids", k per response token,
        the likeliest first. With spec.with_sum_pi_squared also "sum_pi_squared": the sum of the
        squared probabilities of all ids. A value model adds "values" instead: one float32 per
        response token, the value of the state before it.

        With engine.moe.router_replay = "record" also "routed_experts", which train_batch then
        needs. "rollout" needs the experts here, too: "stage_routed_experts", those of this rank's
        expert_layers (engine/megatron/router_replay.py). With engine.indexer_replay = "record" also
        "picked_keys", which train_batch then needs (engine/megatron/indexer_replay.py).

        Args:
            adapters: False for the base model of a LoRA engine; routers then choose, whatever the
                settings say, and nothing is recorded.
            replay: False for the same without replay of routers.

        Returns:
            None on pipeline stages other than the last.
        """

    @abstractmethod
    def train_batch(
        self, batch: Batch, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> Metrics:
        """Take one optimizer step on a mini-batch; its loss is the sum of loss_weights * loss.

        The sum is over the tokens of all ranks: weights contain every mean, so gradients of
        data-parallel ranks are summed, not averaged. The loss function reads scores at
        `temperature`, as infer_batch gives them, and the columns along the responses. Its metrics
        are returned as means over the trained tokens of all ranks: those whose loss weight is not
        0. A loss function that returns several losses, by the columns of their weights, adds a sum
        each: "loss" is the total, "kl_loss" that of kl_weights, "policy_loss" that of loss_weights
        (engine/steps.py computes all of this).

        Returns:
            "grad_norm", before clipping, and "lr", of this step; on the last pipeline stage also
            "loss" and the metrics, equal on all its ranks.

        Raises:
            FloatingPointError: The norm of the gradients is not finite; no step was taken.
        """

    @abstractmethod
    def get_local_weights(self) -> LocalWeights:
        """Return this rank's weights, as the servers get them, by names of `shard_format`.

        Their dtype may be wider than model.dtype.
        """

    @abstractmethod
    def move(self, place: Place, parts: frozenset[str]) -> None:
        """Move parts of the model: "parameters", "optimizer state", "gradients".

        Gradients are dropped when moved out and are zero after they return. Where the device is the
        host, gradients are freed and the others may stay in place.
        """

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Write weights, optimizer state and the number of steps into a new folder.

        The folder has a manifest (checkpoint.files.write_checkpoint_info), written last.

        Raises:
            ConfigError: `path` exists.
            OSError: It cannot be written; the same on every rank, and nothing is left.
        """

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Load what save_checkpoint has written, in any layout.

        Raises:
            ConfigError: It is incomplete or of another model.
        """

    # These have a default.

    def close(self) -> None:
        """Free the model and its memory. The engine cannot be used afterwards."""
        self.__dict__.clear()

    @property
    def is_main_rank(self) -> bool:
        """Return whether get_per_tensor_param yields its tensors on this rank."""
        return self.world_rank == 0

    @property
    def config_changes(self) -> Mapping[str, Any]:
        """Fields of config.json in which an export differs from the checkpoint it began with."""
        return {}

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Decoder layers with experts on this rank, numbered over the whole model, ascending."""
        return ()

    def train_batch_with_scores(
        self,
        batch: Batch,
        loss_function: LossFunction,
        *,
        temperature: float = 1.0,
        bounds: Mapping[str, float],
    ) -> ScoredStep:
        """Take the step of train_batch, and return the scores that infer_batch would have given.

        The loss function gets the log-probs, without a gradient, as the column "log_probs", which
        the batch does not have.

        Gaps are of these log-probs and the column rollout_log_probs, at tokens of all ranks where
        the column gap_mask is not 0: the largest and the mean absolute difference, in nats; none
        without such a token. Where one is not within `bounds`, no rank takes the step, and weights,
        optimizer state and schedule stay as they were, bit for bit.

        By default a forward pass of its own computes the scores; an engine may take those of the
        step's.
        """
        scored = self.infer_batch(batch.select_inputs(), temperature=temperature)
        scores, parts = None, []
        if scored is not None:
            scores = scored.select("log_probs", "entropy")
            columns = (scores, "log_probs"), (batch, "rollout_log_probs"), (batch, "gap_mask")
            values = (torch.from_numpy(b.jagged(name).values.copy()) for b, name in columns)
            parts = [tuple(value.to(self.device) for value in values)]
            batch = batch.union(scores.select("log_probs"))
        gaps = reduce_logprob_gaps(parts, self.device)
        if find_gaps_beyond(gaps, bounds):
            return ScoredStep(scores, gaps, {})
        return ScoredStep(
            scores, gaps, self.train_batch(batch, loss_function, temperature=temperature)
        )

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream the weights as full Hugging Face tensors, on the main rank; others send theirs.

        By default those of `get_local_weights` of an engine with full tensors, on the host in
        model.dtype. Prediction layers that it has not are those of the checkpoint.
        """
        self.require("parameters")
        if not self.is_main_rank:
            return
        local, reader = self.get_local_weights(), CheckpointReader(self.spec.model.path)
        rules = get_family(self.hf_config).weights(
            self.hf_config, pad_vocab_size(self.hf_config, 1)
        )
        for weight in rules:
            dtype = torch.float32 if weight.float32 else getattr(torch, self.spec.model.dtype)
            for tensor in () if weight.replica else weight.rule.tensors:
                part = parse_slice(tensor.name)
                if part is not None and part.index:
                    continue  # of a stack, which its first slice stands for
                stored = tensor.name if part is None else part.stack
                if weight.stage == "mtp" and stored not in local.stored:
                    value = reader.read_tensor(stored)
                elif stored in local.computed:
                    value = local.computed[stored]()
                else:
                    value = local.stored[stored]
                for name in (stored, *tensor.aliases):  # in memory of their own in a file
                    yield name, value.detach().to("cpu", dtype, copy=True)

    def collect_factors(self) -> list[Factors]:
        """Return all adapters, on the host of the main rank; collective over all ranks."""
        return []

    def trace(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the outputs of the modules of this rank's pipeline stage, by Hugging Face name.

        float32 [tokens of the batch, dim], complete after all reductions. `batch` as for
        infer_batch. Ranks of the stage with the same rows get the same.

        Raises:
            ConfigError: The engine cannot be traced.
        """
        raise ConfigError(f"{self.spec.engine.backend}: this engine has no trace")

    def to(
        self, place: Place, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move parameters, optimizer state and gradients to the "host" or to the "device".

        A call that needs what is offloaded raises StateError (`require`).
        """
        if place not in ("host", "device"):
            raise ConfigError(f"engine.to({place!r}); allowed: 'host', 'device'")
        flags = {"parameters": model, "optimizer state": optimizer, "gradients": grad}
        parts = frozenset(name for name, is_moved in flags.items() if is_moved)
        self.move(place, parts)
        self._offloaded = self._offloaded | parts if place == "host" else self._offloaded - parts

    def require(self, *parts: str) -> None:
        """Raise StateError if one of these parts is offloaded."""
        for part in parts:
            if part in self._offloaded:
                raise StateError(
                    f"the engine's {part} are away, on the host; allowed: engine.to('device') first"
                )

    def begin_save(self, path: Path) -> PendingSave:
        """Save as save_checkpoint does, but wait for a copy on the host only. One at a time."""
        self.save_checkpoint(path)
        return FinishedSave()


def _check_nothing(*_: object) -> None:
    """Accept all settings."""


def _need_no_variables(layout: Layout, device: str) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine implementation, as `actor.backend` names one.

    Attributes:
        engines: Classes by type of model: "language_model", "value_model", "reward_model".
        settings: Settings of EngineConfig that the engine reads, such as "layout.dp", or "layout"
            for all of the group. Others are refused unless they have their default. None: it reads
            all of them, or checks them itself.
        check_settings: Called with the key of the settings ("actor"), the settings, and the
            device type of the ranks ("cuda" or "cpu"), before any process starts. Raises
            ConfigError.
        check_model: The same with the model's config.json instead of the device type.
        rank_environment: Variables that the process of a rank must be started with, for a layout
            and a device type, besides those that `build_rank_environment` adds.
        takes_images: Its language model reads the column `images` of batches
            (EngineSpec.images_folder). Without, data.images_column is refused.
        family: model.family where the settings name none: "transformers" for an engine that builds
            any architecture of that package; "" for the families of this one alone.
        package: A package that only some extras install, and that the ranks import; "" for none.
    """

    engines: Mapping[str, type[BaseEngine]]
    settings: tuple[str, ...] | None = None
    check_settings: Callable[[str, EngineConfig, str], None] = _check_nothing
    check_model: Callable[[str, EngineConfig, HFConfig], None] = _check_nothing
    rank_environment: Callable[[Layout, str], dict[str, str]] = _need_no_variables
    takes_images: bool = False
    family: str = ""
    package: str = ""

    @property
    def shard_format(self) -> ShardFormat:
        """Return the format of the shards, the same in all of its engines."""
        return next(iter(self.engines.values())).shard_format

    def build_rank_environment(self, layout: Layout, device: str) -> dict[str, str]:
        """Return the variables to start the process of a rank on "cuda" or "cpu" with.

        On a CPU, glibc takes all memory for a pass from what earlier passes have freed. A variable
        that is already set keeps its value.
        """
        variables = MALLOC_VARIABLES if device == "cpu" else {}
        unset = {name: value for name, value in variables.items() if name not in os.environ}
        return unset | self.rank_environment(layout, device)


def load_backend(engine: EngineConfig, key: str = "engine") -> Backend:
    """Return the backend that the settings of an engine name; `key` names these, such as actor.

    Raises:
        ConfigError: There is none of that name, or the import path leads to no Backend.
    """
    name, setting = engine.backend, f"{key}.backend"
    if not is_import_path(name):
        check_choice(setting, name, BACKENDS)
        backend: Backend = importlib.import_module(f"mcore_rl.engine.{name}.engine").BACKEND
        return backend
    loaded = load_object(setting, name)
    if not isinstance(loaded, Backend):
        raise ConfigError(
            f"{setting}={name!r} is no mcore_rl.engine.base.Backend; allowed: one, or "
            f"{', '.join(map(repr, BACKENDS))}"
        )
    return loaded


def use_engine_family(key: str, model: ModelConfig, engine: EngineConfig) -> None:
    """Use model.family in this process, filled with that of the engine where it is empty.

    Args:
        key: Name of the settings of the engine, such as actor.
    """
    model.family = model.family or load_backend(engine, key).family
    use_family(model.family)


def check_engine_settings(
    key: str, engine: EngineConfig, model_type: str, device: str, *, images_column: str = ""
) -> None:
    """Check the settings of an engine without its model.

    Args:
        key: Name of the settings, such as actor.
        model_type: A key of Backend.engines.
        device: Device type of the ranks, "cuda" or "cpu".
        images_column: Column of images in the data that it trains on; "" for none.

    Raises:
        ConfigError: There is no such backend, it has no engine of that type, or it cannot do what
            the settings say.
    """
    backend = load_backend(engine, key)
    _require_model_type(f"{key}.backend", engine, backend, model_type)
    for name, value, default in list_unread_settings(engine, backend):
        raise ConfigError(
            f"{key}.{name}={value!r}: {engine.backend} does not read it; allowed: {default!r}"
        )
    if images_column and not backend.takes_images:
        raise ConfigError(
            f"data.images_column={images_column!r}: {key}.backend={engine.backend!r} takes no "
            f"images; allowed: {key}.backend='fsdp', or data.images_column=''"
        )
    backend.check_settings(key, engine, device)


def check_engine_package(key: str, engine: EngineConfig) -> None:
    """Raise ConfigError if the package of an engine is not installed. A plan needs none."""
    package = load_backend(engine, key).package
    check_installed(f"{key}.backend={engine.backend!r}", package, "'fsdp'")


def list_unread_settings(
    engine: EngineConfig, backend: Backend
) -> Iterator[tuple[str, object, object]]:
    """Yield name, value and default of each setting that is set and that the engine ignores."""
    if backend.settings is None:
        return
    # No settings of the engine itself: its name, and threads of its processes.
    read = ("backend", "threads_per_rank", *backend.settings)
    for name, value, default in _list_fields("", engine, EngineConfig()):
        is_read = any(name == known or name.startswith(f"{known}.") for known in read)
        if not is_read and value != default:
            yield name, value, default


def _list_fields(key: str, config: Any, default: Any) -> Iterator[tuple[str, object, object]]:
    """Yield name, value and default of all fields of `default`, those of inner groups included."""
    for field in fields(default):
        name = f"{key}.{field.name}".lstrip(".")
        pair = getattr(config, field.name), getattr(default, field.name)
        if is_dataclass(pair[1]):
            yield from _list_fields(name, *pair)
        else:
            yield name, *pair


def _require_model_type(
    setting: str, engine: EngineConfig, backend: Backend, model_type: str
) -> None:
    if model_type not in backend.engines:
        raise ConfigError(
            f"{setting}={engine.backend!r} has no engine of {model_type!r}; allowed: "
            f"{', '.join(backend.engines)}"
        )


def create_engine(model_type: str, spec: EngineSpec) -> BaseEngine:
    """Return an engine of spec.engine.backend.

    Args:
        model_type: "language_model", "value_model" or "reward_model".
    """
    use_family(spec.model.family)
    backend = load_backend(spec.engine)
    _require_model_type("backend", spec.engine, backend, model_type)
    return backend.engines[model_type](spec)
