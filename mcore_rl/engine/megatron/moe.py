"""Routers of packed batches, load balancing, and the load of the experts.

Every MoE layer of every chunk has a `PackedRouter`. Padding is routed like any token, since its
rows exist, but it never counts: not in a load-balancing loss, not in the update of a selection
bias, not in the reported load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction


class ReplaySlot(RouterReplay):
    """Where a router finds the experts that it has to take, and leaves those that it took.

    Megatron's own, with three differences. What is set is used exactly once: a router that runs a
    second time, or whose tokens are not those of the targets, raises RuntimeError. It is not in
    Megatron's class-wide list of all routers that were ever built. It knows its layer.
    """

    target_topk_idx: torch.Tensor | None  # [tokens, topk] of the forward pass to come
    recorded_topk_idx: torch.Tensor | None  # [tokens, topk] of the forward pass that was

    def __init__(self, replaced: RouterReplay) -> None:
        super().__init__()
        for entry in (replaced, self):
            RouterReplay.global_router_replay_instances.remove(entry)
        self.layer = -1  # decoder layer of the whole model, from 0; known when a pass begins

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, ids) [tokens, topk] of the experts to take, from `scores` [tokens, E]."""
        action, shape = self.router_replay_action, (len(scores), topk)
        if action is RouterReplayAction.RECORD and self.recorded_topk_idx is not None:
            raise RuntimeError(f"router replay: layer {self.layer} routed twice in one recording")
        if action is RouterReplayAction.REPLAY_FORWARD:
            self._check(self.target_topk_idx, shape)
        if action is RouterReplayAction.REPLAY_BACKWARD:
            self._check(next(iter(self.replay_backward_list), None), shape)
        found = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        if action is RouterReplayAction.REPLAY_FORWARD:
            self.target_topk_idx = None
        return found

    def _check(self, target: torch.Tensor | None, shape: tuple[int, int]) -> None:
        if target is None:
            raise RuntimeError(
                f"router replay: layer {self.layer} routes more often than it has targets"
            )
        if tuple(target.shape) != shape:
            raise RuntimeError(
                f"router replay: layer {self.layer} routes [tokens, experts a token] {shape}, "
                f"its targets are {tuple(target.shape)}"
            )

    def clear(self) -> None:
        self.clear_indices()
        self.clear_router_replay_action()


class PackedRouter(TopKRouter):
    """Megatron's top-k router, for packs that differ in tokens and ranks that have parts of them.

    The load-balancing loss of a layer (arXiv:2101.03961, equations 4 to 6) is here a sum over
    tokens: token x adds coef * E * sum_i f_i * p_i(x), where p_i(x) is the router's score of expert
    i, normalised over the E experts, and f_i the share of expert i among all choices. `aux_loss`
    takes the shares over the micro-batch of the token (on all TP and CP ranks), `global_aux_loss`
    over all ranks and the micro-batches so far of this mini-batch. Megatron then divides by all
    tokens (step.py), so what is minimised is coef times the mean over tokens, summed over layers.
    It is 1 * coef for a layer of even load. The choices are the best scores of the router itself,
    without selection bias or groups, also where routed experts are replayed.

    What it corrects in megatron/core 0.16.1, transformer/moe:
    - router.py:466 multiplies the loss by the tokens of one TP and CP rank, while gradients are
      divided by those of all: the loss counts 1 / (tp * cp) of its coefficient. With a padding mask
      it does not, because moe_utils.py:224 then sums in place what should be a local count.
    - moe_utils.py:131 divides by the number of tokens, which is 0 in a pack of padding: gradients
      become NaN.
    - router.py:395 takes, for the global loss, a mean of counts over micro-batches and divides it
      by the tokens of the last, which is no share when micro-batches differ in tokens.
    - router.py:542 applies the padding mask along the experts instead of the tokens, and counts
      tokens for the selection bias outside of training, too.
    - router.py:207 enters every router that was ever built in a class-wide list.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: Any = None, **options: Any
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **options)
        device = torch.cuda.current_device()
        # Sums over training tokens since clear_load, of this rank.
        load = torch.zeros(config.num_moe_experts, dtype=torch.float64, device=device)
        self.register_buffer("load", load, persistent=False)
        balance = torch.zeros((), dtype=torch.float64, device=device)
        self.register_buffer("balance", balance, persistent=False)
        if config.moe_enable_routing_replay:
            replaced: RouterReplay = self.router_replay
            self.router_replay: ReplaySlot = ReplaySlot(replaced)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """`probs` [tokens, E] with the loss of the micro-batch hung on; scores are 0 at padding."""
        coef = self.get_aux_loss_coeff("aux_loss")
        if coef == 0:
            return probs
        chosen = routing_map.sum(dim=0)
        dist.all_reduce(chosen, group=self.tp_cp_group)
        return self._with_balance_loss(probs, scores_for_aux_loss, chosen, coef)

    def _apply_global_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """As above, with shares over all ranks; Megatron clears the counts after a mini-batch."""
        coef = self.get_aux_loss_coeff("global_aux_loss")
        if coef == 0:
            return probs
        chosen = routing_map.sum(dim=0)
        dist.all_reduce(chosen, group=self.tp_dp_cp_group)
        self.global_tokens_per_expert += chosen
        return self._with_balance_loss(
            probs, scores_for_aux_loss, self.global_tokens_per_expert, coef
        )

    def _with_balance_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, coef: float
    ) -> torch.Tensor:
        shares = chosen / chosen.sum().clamp(min=1)  # [E]; zeros when there are no tokens at all
        loss = len(shares) * (scores * shares).sum()
        self.balance += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, coef * loss)

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        """Count the experts of [tokens, E] that were used, once a token: where gradients are made.

        Under full recompute that is the second forward pass, for the first runs without gradients.
        """
        if not (self.training and torch.is_grad_enabled()):
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        used = routing_map.sum(dim=0)
        self.load += used
        if self.enable_expert_bias:
            self.local_tokens_per_expert += used


def use_packed_routers(layer_spec: Any) -> Any:
    """The layer spec of a chunk (TransformerBlockSubmodules) with our router in its MoE layers."""
    for layer in layer_spec.layer_specs:
        submodules = getattr(layer.submodules.mlp, "submodules", None)
        if isinstance(submodules, MoESubmodules):
            submodules.router = PackedRouter
    return layer_spec


def moe_layers(config: TransformerConfig) -> list[int]:
    """Which decoder layers of the whole model have experts, from 0."""
    if not config.num_moe_experts:
        return []
    layers, every = range(config.num_layers), config.moe_layer_freq
    return [i for i in layers if (every[i] if isinstance(every, list) else i % every == 0)]


def gathers_packs(config: TransformerConfig) -> bool:
    """Whether tokens reach their experts in a way that takes packs of equal size only.

    The allgather dispatcher gathers the same number of tokens from each rank of an expert group
    (transformer/moe/token_dispatcher.py:265), among them ranks of other data-parallel shares. Where
    the numbers differ gloo ends the process, and NCCL has no check.
    """
    ranks = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    return (
        bool(config.num_moe_experts)
        and config.moe_token_dispatcher_type == "allgather"
        and ranks > 1
    )


def routers(chunk: Any) -> Iterator[tuple[int, PackedRouter]]:
    """(decoder layer of the whole model, router) of a chunk, without layers of token prediction."""
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number - 1, router


def collect_expert_biases(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """Return the selection biases of all routers, which the end of a backward pass changes."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    biases = [getattr(module, "expert_bias", None) for module in modules]
    return [bias for bias in biases if bias is not None]


def clear_load(chunks: Sequence[Any]) -> None:
    """Forget the loads that were counted so far."""
    for chunk in chunks:
        for _, router in routers(chunk):
            router.load.zero_()
            router.balance.zero_()


def expert_load(chunks: Sequence[Any]) -> dict[int, torch.Tensor]:
    """By MoE layer, [experts]: training tokens routed to each since clear_load, of all ranks.

    Float64 on the CPU. All ranks take part, and all get the whole table. Empty without experts.
    """
    if not chunks[0].config.num_moe_experts:
        return {}
    loads, _ = _totals(chunks)
    return dict(zip(moe_layers(chunks[0].config), loads, strict=True))


def balance_metrics(chunks: Sequence[Any]) -> dict[str, float]:
    """How evenly the tokens since clear_load were spread; all ranks take part.

    moe/max_expert_load and moe/min_expert_load: the largest and smallest load of an expert over the
    mean of its layer. moe/dead_experts: experts of all layers without a token. moe/aux_loss, where
    the loss is computed: its mean over tokens and MoE layers, without the coefficient; 1 is even.
    Empty for a model without experts.
    """
    config = chunks[0].config
    if not config.num_moe_experts:
        return {}
    loads, balances = _totals(chunks)
    relative = loads / loads.mean(dim=1, keepdim=True).clamp(min=1 / loads.shape[1])
    metrics = {
        "moe/max_expert_load": float(relative.max()),
        "moe/min_expert_load": float(relative.min()),
        "moe/dead_experts": float((loads == 0).sum()),
    }
    if config.moe_router_load_balancing_type != "none":
        tokens = (loads.sum(dim=1) / config.moe_router_topk).clamp(min=1)
        metrics["moe/aux_loss"] = float((balances / tokens).mean())
    return metrics


def _totals(chunks: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """([MoE layers, experts] loads, [MoE layers] balance losses summed over tokens), on the CPU.

    Each token is counted on one rank, where its router ran, so a sum over the world is right at
    every layout.
    """
    config = chunks[0].config
    place = {layer: row for row, layer in enumerate(moe_layers(config))}
    table = torch.zeros(
        len(place),
        config.num_moe_experts + 1,
        dtype=torch.float64,
        device=torch.cuda.current_device(),
    )
    for chunk in chunks:
        for layer, router in routers(chunk):
            table[place[layer], :-1] = router.load
            table[place[layer], -1] = router.balance
    dist.all_reduce(table)
    table = table.cpu()
    return table[:, :-1], table[:, -1]


def sequence_share(config: TransformerConfig, values: torch.Tensor, dim: int) -> torch.Tensor:
    """What this TP rank's routers see of values that run along the tokens of a pack."""
    if not config.sequence_parallel:
        return values
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return values.chunk(ranks, dim)[parallel_state.get_tensor_model_parallel_rank()]
