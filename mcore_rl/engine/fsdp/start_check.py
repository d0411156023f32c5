"""The check at start: a model in packs has the numbers of transformers' own eager model.

Two comparisons, each of the largest difference over all tokens of two sequences, so that those
count which a leak changes: the first of the second sequence, and those after a cut over cp ranks.

The layers: a float32 copy with random weights, whatever the dtype of a run, because the rounding of
bfloat16 hides most leaks. Its weights are so large that every token matters to later ones. A model
above 1 GiB in float32 is copied up to the first layer of its last kind (of 48 equal layers two),
and the experts of a layer share the weights of one: of Qwen3-30B-A3B that is 3 GB on each rank,
free again before the optimizer has its state. Windows and chunks of config.json that are longer
than the sequences are cut, since no weight has their size.

The weights: the sharded model itself against the checkpoint read by transformers, where it is below
1 GiB. A larger one in packs is compared with itself, one sequence at a time on one rank each.

The adapters: in the copy of the layers, each adapter takes part in all products of its weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mcore_rl.checkpoint.sharded_rows import exchange_reason
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.fsdp import lora
from mcore_rl.engine.fsdp.attention import ATTENTION, Pack
from mcore_rl.engine.fsdp.model import (
    ShardedPolicy,
    choose_experts_function,
    list_experts,
    list_layers,
    project_states,
)
from mcore_rl.engine.packing import MicroBatch, PackSplit, pack_samples
from mcore_rl.engine.steps import ScoreSettings, restore_batch_order
from mcore_rl.models.base import HFConfig
from mcore_rl.models.transformers_model import (
    build_empty_model,
    expand_config,
    load_transformers_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WHOLE_BYTES = 1 << 30  # a larger model is compared by some of its layers
_LENGTH = 97  # longer than the chunks of 64 tokens of linear attention
# Largest difference in nats that float32 rounding makes between two ways to a token.
_FLOAT32_BOUND = 1e-3
_BFLOAT16_BOUND = 0.1  # on average
_SPANS = re.compile(r"window|chunk")  # fields whose value no weight has as its size
_POSITIONS = re.compile(r"max_position_embeddings$|^n_positions$|^n_ctx$|^max_seq_len$")
_ERRORS = (
    AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartCheck:
    """Comparison of a model with transformers' own eager model.

    Args:
        settings: Scores of a language model. None: the states of a value model, whose head may be
            zero, are compared by a random one.
        split: How the ranks of `group` share a pack.
        adapters: The adapters of the run; rank 0 for none.
    """

    path: str
    hf_config: HFConfig
    root_class: type[ShardedPolicy]
    settings: ScoreSettings | None
    packing: bool
    adapters: LoRAConfig
    split: PackSplit
    group: dist.ProcessGroup | None
    device: torch.device

    def compare_layers(self) -> None:
        """Compare a float32 copy of the layers with transformers' own.

        Raises:
            ConfigError: The layers differ, mix the sequences of a pack, need whole sequences, or
                read a weight that has an adapter without calling its layer.
        """
        name, rows = self.hf_config.get("model_type"), self._draw_rows()
        with self._refuse_errors("do not run with random weights in its own eager model"):
            copy, original = self._build_copies(len(rows[0]))
            with self._refuse_writes(original):
                expected = self._score_original(original, rows)
            changed = [np.append(row[:-1], 0) for row in rows]  # 0: padding of most
            ahead = self._score_original(original, changed) - expected
        with self._refuse_errors("do not take packs"):
            copy.has_plain_head = self._has_plain_head(copy, rows)
            alone = self._score(copy, rows, [[0], [1]], PackSplit()) - expected
            packed = self._score(copy, rows, [[0, 1]], PackSplit()) - expected
            split = self._score(copy, rows, [[0], [1]], self.split) - expected
        ahead[np.cumsum([len(row) - 1 for row in rows]) - 1] = 0  # the changed tokens
        if not (gap := _find_largest(np.abs(ahead).max())) <= _FLOAT32_BOUND:
            raise ConfigError(
                f"{name}: scores depend on later tokens, by up to {gap:.2g}, in transformers' own "
                "model; allowed: another family"
            )
        if not (gap := _find_largest(np.abs(alone).max())) <= _FLOAT32_BOUND:
            raise ConfigError(
                f"{name}: scores of a sequence differ from those of transformers' eager model by "
                f"up to {gap:.2g}: its layers do not attend through transformers' registry alone; "
                "allowed: another family, or backend='megatron' where it has it"
            )
        if not (gap := _find_largest(np.abs(split).max())) <= _FLOAT32_BOUND:
            raise ConfigError(
                f"{name}: scores of a sequence that ranks share differ from those on one rank by "
                f"up to {gap:.2g}: its layers need whole sequences; allowed: layout.cp=1"
            )
        gap = _find_largest(np.abs(packed).max())
        if self.packing and not gap <= _FLOAT32_BOUND:
            raise ConfigError(
                f"{name}: scores of two sequences in one pack differ from those of each alone by "
                f"up to {gap:.2g}: its layers mix the sequences of a pack; allowed: "
                "fsdp.packing=false"
            )
        if self.adapters.rank:
            self._check_adapters(original, rows[0])

    def _check_adapters(self, original: Any, row: np.ndarray) -> None:
        """Check that adapters have part in all products, by a backward pass of one sequence."""
        ids = torch.from_numpy(row)[None].to(self.device)

        def compute_loss() -> torch.Tensor:
            states = original.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            return project_states(states).sum()

        def check() -> None:
            with self._refuse_errors("have no gradients with adapters"):
                lora.check_adapters(original, self.adapters, compute_loss)

        if reason := exchange_reason(check):
            raise ConfigError(reason)

    def compare_weights(self, root: ShardedPolicy, dtype: torch.dtype) -> None:
        """Compare a model with the checkpoint read by transformers, or else with itself.

        Raises:
            ConfigError: The numbers differ by more than rounding, or a pass writes to the weights.
        """
        rows = self._draw_rows()
        parts = [[0, 1]] if self.packing else [[0], [1]]
        with (
            self._refuse_errors("do not run when FSDP2 shards them"),
            self._refuse_writes(root),
        ):
            root.has_plain_head = self._has_plain_head(root, rows)
            scores = self._score(root, rows, parts, self.split)
            expected, rounding = self._score_checkpoint(rows, dtype)
            if expected is None:
                expected = self._score(root, rows, [[0], [1]], PackSplit())
        gaps = np.abs(scores - expected)
        if dtype == torch.float32:
            gap, bound = _find_largest(gaps.max()), _FLOAT32_BOUND
        else:
            gap, bound = _find_largest(gaps.mean()), _BFLOAT16_BOUND + 2 * rounding
        if not gap <= bound:
            raise ConfigError(
                f"{self.hf_config.get('model_type')}: scores differ by {gap:.2g} from those of "
                f"transformers' eager model with the weights of {self.path}; allowed: at most "
                f"{bound:.2g}, which rounding makes"
            )

    def _has_plain_head(self, root: ShardedPolicy, rows: list[np.ndarray]) -> bool:
        """Return whether logits are the product of states and head, bit for bit, on all ranks."""
        if self.settings is None:
            return True
        [micro] = self._pack_rows(rows, [[0, 1]], self.split)
        is_plain = root(micro, Pack(micro.lengths, self.group), None)
        return not _find_largest(not is_plain)

    def _score(
        self,
        root: ShardedPolicy,
        rows: list[np.ndarray],
        parts: list[list[int]],
        split: PackSplit,
    ) -> np.ndarray:
        """Return the scores of all tokens but the first; each pack on each rank if cp is 1."""
        group = self.group if split.cp > 1 else None
        micros = self._pack_rows(rows, parts, split)
        results = [root(micro, Pack(micro.lengths, group), self.settings) for micro in micros]
        batch = Batch({"response_ids": Jagged.pack([row[1:] for row in rows], np.int64)})
        name = next(iter(results[0]))
        return restore_batch_order(batch, micros, results, name, group).values

    def _pack_rows(
        self, rows: list[np.ndarray], parts: list[list[int]], split: PackSplit
    ) -> list[MicroBatch]:
        prompts = Jagged.pack([row[:1] for row in rows], np.int64)
        responses = Jagged.pack([row[1:] for row in rows], np.int64)
        batch = Batch({"prompt_ids": prompts, "response_ids": responses})
        return pack_samples(batch, parts, split, self.device)

    def _draw_rows(self) -> list[np.ndarray]:
        """Return two sequences of random ids, without ids that a model treats apart."""
        fields = dict(_list_fields(expand_config(self.hf_config)))
        limits = [value for name, value in fields.items() if _POSITIONS.search(name)]
        length = min([_LENGTH, *(limit for limit in limits if limit > 0)])
        special = {value for name, value in fields.items() if re.search("_(id|index)$", name)}
        vocab_size = min(fields.get("vocab_size", 4096), 4096)
        ids = [i for i in range(1, vocab_size) if i not in special]
        rng = np.random.default_rng(0)
        return [rng.choice(np.array(ids), n) for n in (length, max(2, length * 3 // 4))]

    def _build_copies(self, length: int) -> tuple[ShardedPolicy, Any]:
        """Return a copy as the engine runs it, and transformers' own with the same weights."""
        config = _cut_spans(self.hf_config, expand_config(self.hf_config), length * 2 // 3)
        copy = build_empty_model(config, attn_implementation=ATTENTION)
        original = build_empty_model(config, experts_implementation="eager")
        choose_experts_function(copy, torch.float32)
        is_whole = _count_bytes(copy) <= _WHOLE_BYTES
        if not is_whole:
            num_layers = _count_layers_to_last_kind(copy)
            for model in (copy, original):
                del _get_layer_list(model)[num_layers:]
        _draw_weights(copy, self.device, shares_experts=not is_whole)
        modules = dict(copy.named_modules())
        for name, module in original.named_modules():
            module._parameters, module._buffers = modules[name]._parameters, modules[name]._buffers
        return self.root_class(copy).eval(), original.eval()

    def _score_original(self, model: PreTrainedModel, rows: list[np.ndarray]) -> np.ndarray:
        """Return the scores of one sequence at a time by transformers' model."""
        scores = []
        for row in rows:
            ids = torch.from_numpy(row)[None].to(self.device)
            if self.settings is None:
                states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
                scores.append(project_states(states[:-1]))
            else:
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
                scores.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
        values: np.ndarray = torch.cat(scores).float().cpu().numpy()
        return values

    def _score_checkpoint(
        self, rows: list[np.ndarray], dtype: torch.dtype
    ) -> tuple[np.ndarray | None, float]:
        """Return float32 scores of the checkpoint by transformers, and the rounding of `dtype`.

        None, if it is large, or in a form that transformers does not read as it is.
        """
        bytes_on_disk = sum(file.stat().st_size for file in Path(self.path).glob("*.safetensors"))
        if bytes_on_disk > _WHOLE_BYTES:
            return None, 0.0
        model = load_transformers_model(self.path, self.hf_config, torch.float32)
        if model is None:
            return None, 0.0
        scores = self._score_original(model.to(self.device), rows)
        if dtype == torch.float32:
            return scores, 0.0
        model = load_transformers_model(self.path, self.hf_config, dtype).to(self.device)
        with suppress(*_ERRORS):  # some families run in float32 alone
            return scores, float(np.abs(self._score_original(model, rows) - scores).mean())
        return scores, 0.0

    @contextmanager
    def _refuse_writes(self, model: PreTrainedModel) -> Iterator[None]:
        """Refuse a model whose passes write to its weights, which would be exported so."""
        weights = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in model.named_parameters()
        }
        versions = {name: weight._version for name, weight in weights.items()}
        yield
        changed = [name for name, weight in weights.items() if weight._version != versions[name]]
        if changed:
            raise ConfigError(
                f"{self.hf_config.get('model_type')}: a pass in transformers writes to the weight "
                f"{changed[0]}; allowed: a model whose passes read its weights alone, such as an "
                "RWKV model with rescale_every=0 in config.json"
            )

    @contextmanager
    def _refuse_errors(self, reason: str) -> Iterator[None]:
        try:
            yield
        except (ConfigError, torch.OutOfMemoryError, dist.DistError):
            raise
        except _ERRORS as error:
            message = " ".join(str(error).split())
            raise ConfigError(
                f"{self.hf_config.get('model_type')}: its layers in transformers {reason} "
                f"({message or type(error).__name__}); allowed: another family, or "
                "backend='megatron' where it has it"
            ) from error


def _find_largest(value: float) -> float:
    """Return the largest of a number over all ranks; not a number if one is not."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, float(value))
    return float(np.max(values))


def _list_fields(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a config, of those nested in it too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _list_fields(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield str(name), value


def _cut_spans(hf_config: HFConfig, expanded: HFConfig, limit: int) -> HFConfig:
    """Return a config whose windows and chunks are at most `limit` tokens.

    Args:
        expanded: The config with transformers' defaults. They are written only if one is cut.
    """
    is_cut = False

    def cut(config: Mapping[str, Any]) -> HFConfig:
        nonlocal is_cut
        fields = dict(config)
        for name, value in config.items():
            if isinstance(value, Mapping):
                fields[name] = cut(value)
            elif (
                _SPANS.search(str(name))
                and "layers" not in str(name)
                and isinstance(value, int)
                and value > limit
            ):
                fields[name], is_cut = limit, True
        return fields

    cut_config = cut(expanded)
    return {**hf_config, **cut_config} if is_cut else hf_config


def _count_bytes(model: PreTrainedModel) -> int:
    return sum(4 * parameter.numel() for parameter in model.parameters())


def _get_layer_list(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the longest list of layers of a model."""
    layers = {id(layer) for layer in list_layers(model)}
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=lambda modules: sum(id(m) in layers for m in modules))


def _count_layers_to_last_kind(model: PreTrainedModel) -> int:
    """Return after how many layers each kind has appeared, at least two.

    Layers are of one kind if they have modules and weights alike, the same flags, and equal values
    in each list of the config with a value a layer (layer_types).
    """
    layers = _get_layer_list(model)
    config = model.config.get_text_config().to_dict()
    by_layer = [v for v in config.values() if isinstance(v, list) and len(v) == len(layers)]
    kinds = dict[str, int]()
    for index, layer in enumerate(layers):
        kind = [
            (name, type(module).__name__, _list_flags(module))
            for name, module in layer.named_modules()
        ]
        shapes = [tuple(parameter.shape) for parameter in layer.parameters()]
        values = [of_layers[index] for of_layers in by_layer]
        kinds.setdefault(json.dumps([kind, shapes, values], default=str), index)
    return max(2, 1 + max(kinds.values()))


def _list_flags(module: torch.nn.Module) -> list[tuple[str, object]]:
    """Return what a module says of its kind: flags, names and spans, but not its index."""
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | str) or (_SPANS.search(name) and isinstance(value, int | None))
    )


def _draw_weights(model: PreTrainedModel, device: torch.device, *, shares_experts: bool) -> None:
    """Give a model memory and random weights, by its own initialisation and then larger.

    Matrices keep the size of what they multiply; the rest, such as decays and gates, is near its
    initial values, none of it zero.
    """
    stacks = {id(module) for module in list_experts(model).values()} if shares_experts else set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            shape, is_stack = parameter.shape, id(module) in stacks and parameter.dim() > 2
            memory = torch.zeros((1, *shape[1:]) if is_stack else shape, device=device)
            module._parameters[name] = torch.nn.Parameter(memory, requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device=device)
        module._is_hf_initialized = False
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model.initialize_weights()
        model.tie_weights()
        kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d)
        experts = {id(module) for module in list_experts(model).values()}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                is_matrix = isinstance(module, kinds) or id(module) in experts
                if is_matrix and parameter.dim() > 1:
                    num_inputs = (
                        parameter.shape[-1] if id(module) in experts else parameter[0].numel()
                    )
                    is_table = isinstance(module, torch.nn.Embedding)
                    parameter.normal_(0, 1 if is_table else num_inputs**-0.5)
                elif parameter.is_floating_point():
                    parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(module) in stacks and parameter is not None and parameter.dim() > 2:
                stack = parameter.expand(module.num_experts, *parameter.shape[1:])
                module._parameters[name] = torch.nn.Parameter(stack, requires_grad=False)
