"""The Megatron engine: a GPTModel over ranks, behind the engine interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import BaseEngine, EngineSpec, LossFunction, Metrics, register_engine
from mcore_rl.engine.megatron import device
from mcore_rl.models.base import family_of, padded_vocab_size, read_config
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.stages import split_into_chunks

Result = dict[str, torch.Tensor]


@register_engine("language_model", "megatron", "cpu", "cuda")
class MegatronEngine(BaseEngine):
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.layout = spec.engine.layout
        self.mesh = Mesh(self.layout)

    @property
    def is_main_rank(self) -> bool:
        return self.world_rank == 0

    # Megatron is imported inside methods: device.install() must have run before its first import.

    def initialize(self) -> None:
        device.install(self.spec.engine.threads_per_rank)
        from mcore_rl.engine.megatron import model, optimizer, weights
        from mcore_rl.parallel.groups import initialize_groups

        settings = self.spec.engine
        initialize_groups(self.layout, device.collective_backend(), self.spec.seed)
        self.device = torch.device(torch.cuda.current_device())
        self.world_rank = dist.get_rank()
        at = self.mesh.coordinate(self.world_rank)
        self.hf_config = read_config(self.spec.model.path)
        family, dtype = family_of(self.hf_config), model.DTYPES[self.spec.model.dtype]
        stages = split_into_chunks(self.layout, self.hf_config["num_hidden_layers"])
        self.chunks = model.build_chunks(
            family, self.hf_config, settings, dtype, stages, at.pp_rank
        )
        self.weights = family.weights(
            self.hf_config, padded_vocab_size(self.hf_config, self.layout.tp)
        )
        num_experts = self.chunks[0].config.num_moe_experts or 1
        self.placement = weights.WeightPlacement(self.mesh, stages, num_experts)
        with CheckpointReader(self.spec.model.path) as reader:
            weights.load_weights(self.chunks, self.weights, self.placement, at, reader)
        self.wrapped: list[Any] = list(self.chunks)
        self.optimizer: Any = None
        if self.spec.total_steps:
            self.wrapped = optimizer.wrap_for_training(self.chunks, settings.optimizer)
            self.optimizer, self.schedule = optimizer.build_optimizer(
                self.wrapped, settings.optimizer, dtype, self.spec.total_steps
            )

    @torch.no_grad()
    def infer_batch(self, batch: Batch) -> Batch | None:
        micros = self._micro_batches(batch.select("prompt_ids", "response_ids"))
        results = self._run(micros, None, forward_only=True)
        if not self._has_head:
            return None
        columns = {name: self._in_batch_order(batch, micros, results, name) for name in results[0]}
        return batch.with_columns(**columns)

    def train_batch(self, batch: Batch, loss_function: LossFunction) -> Metrics:
        self.optimizer_zero_grad()
        results = self.forward_backward_batch(batch, loss_function, forward_only=False)
        lr = self.lr_scheduler_step()
        grad_norm = self.optimizer_step()
        return {**self._summed(results), "grad_norm": grad_norm, "lr": lr}

    def forward_backward_batch(
        self, batch: Batch, loss_function: LossFunction | None, *, forward_only: bool
    ) -> list[Result]:
        return self._run(self._micro_batches(batch), loss_function, forward_only=forward_only)

    def optimizer_zero_grad(self) -> None:
        self._require_optimizer("optimizer_zero_grad")
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        self._require_optimizer("optimizer_step")
        succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded:
            raise FloatingPointError("the optimizer step was refused: gradients are not finite")
        return float(grad_norm)

    def lr_scheduler_step(self) -> float:
        self._require_optimizer("lr_scheduler_step")
        # Advanced before the step, so that warm-up starts above zero.
        self.schedule.step(increment=1)
        return float(self.optimizer.param_groups[0]["lr"])

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        from mcore_rl.engine.megatron.weights import export_weights

        return export_weights(self.chunks, self.weights, self.placement, self.world_rank)

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        from mcore_rl.engine.megatron.offload import move

        move(
            self.wrapped,
            self.optimizer,
            device,
            parameters=model,
            optimizer_state=optimizer,
            grad=grad,
        )

    def save_checkpoint(self, path: Path) -> None:
        from mcore_rl.checkpoint import dist as dist_checkpoint

        dist_checkpoint.save(self._sharded_state(is_loading=False), path)

    def load_checkpoint(self, path: Path) -> None:
        from mcore_rl.checkpoint import dist as dist_checkpoint

        state = dist_checkpoint.load(self._sharded_state(is_loading=True), path)
        for index, chunk in enumerate(self.chunks):
            chunk.load_state_dict(state[f"model{index}"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {"chained_optim_avoid_prefix": True}
        state = {
            f"model{index}": chunk.sharded_state_dict(metadata=metadata)
            for index, chunk in enumerate(self.chunks)
        }
        if self.optimizer is not None:
            if self.spec.engine.optimizer.distributed:
                raise ConfigError(
                    "optimizer.distributed=true: checkpoints of a sharded optimizer are not "
                    "supported; allowed: false"
                )
            state["optimizer"] = self.optimizer.sharded_state_dict(
                dict(state), is_loading=is_loading, metadata=metadata
            )
            state["schedule"] = self.schedule.state_dict()
        return state

    def _require_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(f"{what} on an engine that was built for inference (total_steps=0)")

    @property
    def _has_head(self) -> bool:
        return bool(self.chunks[-1].post_process)

    def _micro_batches(self, batch: Batch) -> list[Any]:
        from mcore_rl.engine.megatron.step import micro_batches

        # The interleaved schedule needs as many micro-batches as there are pipeline ranks.
        at_least = self.layout.pp if self.layout.vpp > 1 else 1
        budget = self.spec.engine.max_tokens_per_micro_batch
        return micro_batches(batch, budget, at_least, self.device)

    def _run(
        self, micros: list[Any], loss_function: LossFunction | None, *, forward_only: bool
    ) -> list[Result]:
        from mcore_rl.engine.megatron import step

        for chunk in self.wrapped:
            chunk.train(not forward_only)
        if loss_function is None:
            make_loss = step.inference(self._head(with_entropy=True))
        else:
            total = step.tokens_of_all_ranks(micros, self.device)
            head = self._head(with_entropy=self.spec.entropy_in_loss)
            make_loss = step.training(head, loss_function, total)
        return step.run_micro_batches(self.wrapped, micros, make_loss, forward_only=forward_only)

    def _head(self, *, with_entropy: bool) -> Any:
        from mcore_rl.engine.megatron.heads import LanguageModelHead

        return LanguageModelHead(
            self.hf_config["vocab_size"],
            self.spec.temperature,
            self.spec.engine.logprob_chunk_tokens,
            with_entropy=with_entropy,
        )

    def _in_batch_order(
        self, batch: Batch, micros: list[Any], results: list[Result], name: str
    ) -> Jagged:
        """A result column, from the order of the packs back to the batch's."""
        from mcore_rl.engine.megatron.step import whole_column

        responses = batch.jagged("response_ids")
        values = np.empty(len(responses.values), dtype=np.float32)
        for micro, result in zip(micros, results, strict=True):
            flat, start = whole_column(micro, result[name]).cpu().numpy(), 0
            for row in micro.rows:
                end = start + int(responses.lengths[row])
                values[responses.offsets[row] : responses.offsets[row + 1]] = flat[start:end]
                start = end
        return responses.with_values(values)

    def _summed(self, results: list[Result]) -> Metrics:
        """Metrics of all micro-batches and data ranks, on the last stage; elsewhere none."""
        from megatron.core import parallel_state

        if not self._has_head:
            return {}
        names = list(results[0])
        totals = torch.stack([torch.stack([r[name] for r in results]).sum() for name in names])
        dist.all_reduce(
            totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        return dict(zip(names, totals.tolist(), strict=True))
