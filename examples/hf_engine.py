"""A training engine of one's own: plain transformers and torch, data parallel.

    mcore-rl rl recipe=quickstart actor.backend=examples/hf_engine.py:BACKEND \
        actor.layout.tp=1 actor.layout.ep=1 actor.layout.dp=2 warm_start.moe_aux_loss_coef=0

Every rank has the whole model, in float32; with model.dtype=bfloat16 products are in bfloat16.
Ranks sum their gradients and take the same AdamW step. It is for debugging, and for models that
the Megatron engine does not have; it shards nothing, so a model has to fit one device four times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from mcore_rl.algorithms.inputs import get_needs
from mcore_rl.checkpoint.files import build_manifest, read_checkpoint_info, write_checkpoint_info
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.hf_writer import atomic_dir
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import Backend, BaseEngine, LossFunction, Metrics, Place
from mcore_rl.engine.steps import (
    build_loss_inputs,
    compute_learning_rate,
    count_trained_tokens,
    sum_losses,
)
from mcore_rl.parallel.devices import detect_device
from mcore_rl.parallel.store import join_world
from mcore_rl.reshard.executor import LocalWeights

STATE_FILE = "state.pt"


class HFEngine(BaseEngine):
    """AutoModelForCausalLM on every rank."""

    def initialize(self) -> None:
        device = detect_device()
        self.device = device.select_local()
        torch.set_num_threads(self.spec.engine.threads_per_rank)
        if not dist.is_initialized():
            join_world(device.backend, self.spec.timeout_s)
        self.world_rank, self.num_steps = dist.get_rank(), 0
        reader = CheckpointReader(self.spec.model.path)
        self.hf_config, self.names = reader.read_config(), reader.get_shapes().keys()
        self.model = AutoModelForCausalLM.from_pretrained(
            self.spec.model.path,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
        ).to(self.device)
        self.parameters = list(self.model.parameters())
        config = self.spec.engine.optimizer
        fixed = [p for n, p in self.model.named_parameters() if p.dim() < 2 or n.endswith("bias")]
        fixed_ids = {id(parameter) for parameter in fixed}
        groups: list[dict[str, Any]] = [  # as Megatron: neither biases nor norms decay
            {"params": [p for p in self.parameters if id(p) not in fixed_ids]},
            {"params": fixed, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    @torch.no_grad()
    def infer_batch(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        adapters: bool = True,
        replay: bool = True,
    ) -> Batch:
        self.require("parameters")
        self.model.eval()
        needs = {"entropy", "top_ids", "sum_pi_squared"}
        parts = [self._score(part, temperature, needs) for part in self._split(batch)]
        columns = {}
        for name in parts[0] if parts else ("log_probs", "entropy"):
            values = [part[name].cpu().numpy() for part in parts] or [np.empty(0, np.float32)]
            columns[name] = batch.jagged("response_ids").with_values(np.concatenate(values))
        return batch.with_columns(**columns)

    def train_batch(
        self, batch: Batch, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> Metrics:
        self.require("parameters", "gradients", "optimizer state")
        self.model.train()
        self.optimizer.zero_grad()
        num_trained = self._sum_over_ranks(count_trained_tokens(batch))
        sums = Counter[str]()
        for part in self._split(batch):
            scores = self._score(part, temperature, get_needs(loss_function))
            inputs = build_loss_inputs(scores, part, self.device)
            loss, metrics = sum_losses(loss_function, inputs, num_trained)
            loss.backward()
            sums.update({name: float(value) for name, value in metrics.items()})
        return self._sum_over_ranks(sums) | self._step()

    def _step(self) -> Metrics:
        """Take the optimizer step of the gradients of all ranks."""
        config = self.spec.engine.optimizer
        for parameter in self.parameters:
            if parameter.grad is None:  # a rank without samples
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, config.clip_grad or math.inf))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradients is {norm}: no step was taken")
        self.num_steps += 1
        lr = compute_learning_rate(config, self.num_steps, self.spec.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return {"grad_norm": norm, "lr": lr}

    def _sum_over_ranks(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Sum numbers of the same names; a rank without samples may have none."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, dict(numbers))
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: sum(part.get(name, 0) for part in parts) for name in names}

    def _split(self, batch: Batch) -> Iterator[Batch]:
        """Yield consecutive rows that, padded, are at most max_tokens_per_micro_batch tokens."""
        rows, longest = list[int](), 0
        for row, length in enumerate(batch.num_tokens.tolist()):
            longest = max(longest, length)
            if rows and (len(rows) + 1) * longest > self.spec.engine.max_tokens_per_micro_batch:
                yield batch.take(rows)
                rows, longest = [], length
            rows.append(row)
        if rows:
            yield batch.take(rows)

    def _score(
        self, batch: Batch, temperature: float, needs: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Return scores of the response tokens, [tokens] each, in the order of the batch.

        Padding is on the right, where no token of a causal model looks.
        """
        prompts, responses = batch.jagged("prompt_ids"), batch.jagged("response_ids")
        ids = torch.zeros(len(batch), int(batch.num_tokens.max()), dtype=torch.int64)
        is_before_response = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.from_numpy(np.concatenate([prompt, response]))
            is_before_response[row, len(prompt) - 1 : end - 1] = True
        dtype = getattr(torch, self.spec.model.dtype)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype != torch.float32):
            output = self.model(ids.to(self.device), use_cache=False)
        logits = output.logits[is_before_response.to(self.device)].float() / temperature
        targets = torch.from_numpy(responses.values.astype(np.int64)).to(self.device)
        log_probs = logits.log_softmax(-1)
        scores = {"log_probs": log_probs.gather(-1, targets[:, None])[:, 0]}
        if "entropy" in needs:
            scores["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        if "sum_pi_squared" in needs and self.spec.with_sum_pi_squared:
            scores["sum_pi_squared"] = log_probs.exp().square().sum(-1)
        if "top_ids" in needs and self.spec.num_top_log_probs:
            top = log_probs.topk(self.spec.num_top_log_probs)
            scores |= {"top_log_probs": top.values, "top_ids": top.indices}
        if "teacher_ids" in batch:  # of distillation
            ids = torch.from_numpy(batch.jagged("teacher_ids").values.astype(np.int64)).flatten(1)
            scores["chosen_log_probs"] = log_probs.gather(-1, ids.to(self.device))
        return scores

    def get_local_weights(self) -> LocalWeights:
        self.require("parameters")
        tensors = revert_weight_conversion(self.model, self.model.state_dict())
        return LocalWeights({name: tensors[name].detach() for name in self.names})

    def move(self, place: Place, parts: frozenset[str]) -> None:
        target = self.device if place == "device" else torch.device("cpu")
        if "gradients" in parts:
            self.optimizer.zero_grad()
        if "parameters" in parts:
            self.model.to(target)
        if "optimizer state" in parts:
            for state in self.optimizer.state.values():
                state |= {name: value.to(target) for name, value in state.items()}

    def save_checkpoint(self, path: Path) -> None:
        self.require("parameters", "optimizer state")
        reason: list[Any] = [""]
        if self.is_main_rank:
            try:
                self._write(path)
            except (ConfigError, OSError) as error:
                reason = [error]
        dist.broadcast_object_list(reason)
        if reason[0]:
            raise reason[0]

    def _write(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
        }
        with atomic_dir(path) as folder:
            torch.save(state, folder / STATE_FILE)
            facts = {"engine": "examples/hf_engine.py"}
            write_checkpoint_info(folder, facts, build_manifest([folder / STATE_FILE]))

    def load_checkpoint(self, path: Path) -> None:
        self.require("parameters", "optimizer state")
        if read_checkpoint_info(path).get("engine") != "examples/hf_engine.py":
            raise ConfigError(f"{path} is no checkpoint of examples/hf_engine.py")
        state = torch.load(path / STATE_FILE, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]


BACKEND = Backend(
    engines={"language_model": HFEngine},
    settings=(
        "layout.dp",
        "max_tokens_per_micro_batch",
        *(f"optimizer.{name}" for name in (
            "lr", "min_lr", "schedule", "warmup_steps", "wsd_decay_steps", "beta1", "beta2", "eps",
            "weight_decay", "clip_grad",
        )),
    ),
)  # fmt: skip
