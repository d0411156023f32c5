"""Routers of packed batches, load balancing, and the load of the experts.

Every MoE layer of every chunk has a `PackedRouter`. Padding is routed like any token, because its
rows exist, but it counts neither in a load-balancing loss, nor in the update of a selection bias,
nor in the reported load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

if TYPE_CHECKING:
    from mcore_rl.engine.megatron.model import PolicyModel


class StrictRouterReplay(RouterReplay):
    """Target and recorded experts of a router: Megatron's RouterReplay, with checks.

    Targets are used exactly once: a router that runs a second time, or on other tokens than those
    of its targets, raises RuntimeError. It is not in Megatron's class-wide list of all routers that
    were ever built, and it has the number of its layer.
    """

    target_topk_idx: torch.Tensor | None  # [tokens, topk] for the next forward pass
    recorded_topk_idx: torch.Tensor | None  # [tokens, topk] of the last forward pass

    def __init__(self, original: RouterReplay) -> None:
        super().__init__()
        for entry in (original, self):
            RouterReplay.global_router_replay_instances.remove(entry)
        self.layer = -1  # decoder layer of the full model, from 0; set when a pass begins

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and ids [tokens, topk] of the experts to use, from `scores` [tokens, E]."""
        action, shape = self.router_replay_action, (len(scores), topk)
        if action is RouterReplayAction.RECORD and self.recorded_topk_idx is not None:
            raise RuntimeError(f"router replay: layer {self.layer} routed twice in one recording")
        if action is RouterReplayAction.REPLAY_FORWARD:
            self._check_target(self.target_topk_idx, shape)
        if action is RouterReplayAction.REPLAY_BACKWARD:
            self._check_target(next(iter(self.replay_backward_list), None), shape)
        chosen: tuple[torch.Tensor, torch.Tensor] = super().get_replay_topk(
            scores, topk, num_groups, group_topk, default_compute_topk
        )
        if action is RouterReplayAction.REPLAY_FORWARD:
            self.target_topk_idx = None
        return chosen

    def _check_target(self, target: torch.Tensor | None, shape: tuple[int, int]) -> None:
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
    """Megatron's top-k router, for packs of different sizes that are split over ranks.

    The load-balancing loss of a layer (arXiv:2101.03961, equations 4 to 6) is here a sum over
    tokens: token x adds coef * E * sum_i f_i * p_i(x), where p_i(x) is the router's score of expert
    i, normalised over the E experts, and f_i the share of expert i among all choices. With
    `aux_loss` the shares are over the micro-batch of the token (on all TP and CP ranks), with
    `global_aux_loss` over all ranks and the micro-batches so far of this mini-batch. Megatron then
    divides by all tokens (step.py), so the optimized loss is coef times the mean over tokens,
    summed over layers; it is coef for a layer of even load. Choices are the highest scores of the
    router itself, without selection bias or groups, also when routed experts are replayed.

    Corrections of megatron/core 0.19.2, transformer/moe:
    - router.py:633 multiplies the loss by the tokens of all TP and CP ranks; with a padding mask
      by tp * cp times as many, because moe_utils.py:272 then sums in place what should be a local
      count.
    - moe_utils.py:141 divides by the number of tokens, which is 0 in a pack of padding: gradients
      become NaN.
    - router.py:529 divides, for the global loss, the mean of counts over micro-batches by the
      tokens of the last, which is no share when micro-batches differ in tokens.
    - router.py:738 applies the padding mask along the experts instead of the tokens, and counts
      tokens for the selection bias outside of training, too.
    - router.py:257 adds every router that was ever built to a class-wide list.
    - moe_utils.py:1327 gives Transformer Engine a bias in bfloat16 with a result in float32, for
      which cuBLASLt reads the bias as float32.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: Any = None, **options: Any
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **options)
        device = torch.cuda.current_device()
        # Sums over this rank's training tokens since clear_expert_load.
        load = torch.zeros(config.num_moe_experts, dtype=torch.float64, device=device)
        self.register_buffer("load", load, persistent=False)
        balance = torch.zeros((), dtype=torch.float64, device=device)
        self.register_buffer("balance", balance, persistent=False)
        if config.moe_enable_routing_replay:
            original: RouterReplay = self.router_replay
            self.router_replay: StrictRouterReplay = StrictRouterReplay(original)
        self.pack_padding: torch.Tensor | None = None  # mask of passes that are given none

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and map [tokens, E] of the experts.

        Megatron's schedule of overlapped exchanges passes no mask
        (models/gpt/fine_grained_callables.py:130).
        """
        mask = self.pack_padding if padding_mask is None else padding_mask
        routing: tuple[torch.Tensor, torch.Tensor] = super().forward(input, mask)
        return routing

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., E] in the dtype of the router (config.moe_router_dtype)."""
        # Added here in the dtype of the logits: see the last of the corrections above.
        bias: torch.Tensor | None = self.bias  # type: ignore[has-type]
        self.bias = None
        try:
            logits: torch.Tensor = super().gating(input)
        finally:
            self.bias = bias
        return logits if bias is None else logits + bias.to(logits.dtype)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attach the loss of the micro-batch to `probs` [tokens, E]; scores are 0 at padding."""
        coef = self.get_aux_loss_coeff("aux_loss")
        if coef == 0:
            return probs
        chosen = routing_map.sum(dim=0)
        dist.all_reduce(chosen, group=self.tp_cp_group)
        return self._attach_balance_loss(probs, scores_for_aux_loss, chosen, coef)

    def _apply_global_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attach the loss with shares over all ranks; Megatron resets them after a mini-batch."""
        coef = self.get_aux_loss_coeff("global_aux_loss")
        if coef == 0:
            return probs
        chosen = routing_map.sum(dim=0)
        dist.all_reduce(chosen, group=self.tp_dp_cp_group)
        self.global_tokens_per_expert += chosen
        return self._attach_balance_loss(
            probs, scores_for_aux_loss, self.global_tokens_per_expert, coef
        )

    def _attach_balance_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, coef: float
    ) -> torch.Tensor:
        """Add the loss to the backward pass of `probs`; `chosen` [E] counts choices of experts."""
        shares = chosen / chosen.sum().clamp(min=1)  # [E]; zeros when there are no tokens at all
        loss = len(shares) * (scores * shares).sum()
        self.balance += loss.detach()
        scaled: torch.Tensor = MoEAuxLossAutoScaler.apply(probs, coef * loss)
        return scaled

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        """Count the used experts of [tokens, E], once per token: in the pass with gradients.

        With full recompute that is the second forward pass; the first runs without gradients.
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
    """Set PackedRouter in the MoE layers of a chunk's layer spec (TransformerBlockSubmodules)."""
    for layer in layer_spec.layer_specs:
        # A partial of MoELayer (models/gpt/moe_module_specs.py:85).
        submodules = getattr(layer.submodules.mlp, "keywords", {}).get("submodules")
        if isinstance(submodules, MoESubmodules):
            submodules.router = PackedRouter
    return layer_spec


def list_moe_layers(config: TransformerConfig) -> list[int]:
    """Return the decoder layers of the full model that have experts, from 0."""
    if not config.num_moe_experts:
        return []
    layers, frequency = range(config.num_layers), config.moe_layer_freq
    if isinstance(frequency, list):  # 1 for each layer with experts, else 0
        return [layer for layer in layers if frequency[layer]]
    return [layer for layer in layers if layer % frequency == 0]


def needs_equal_packs(config: TransformerConfig) -> bool:
    """Return whether the token dispatcher works with packs of equal size only.

    The allgather dispatcher gathers the same number of tokens from each rank of an expert group
    (transformer/moe/token_dispatcher.py:287), which has ranks of other data-parallel shares. If the
    numbers differ, gloo ends the process, and NCCL has no check.
    """
    ranks = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    return (
        bool(config.num_moe_experts)
        and config.moe_token_dispatcher_type == "allgather"
        and ranks > 1
    )


def iter_routers(chunk: PolicyModel) -> Iterator[tuple[int, PackedRouter]]:
    """Yield (decoder layer of the full model, router) of a chunk, without prediction layers."""
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number - 1, router


def collect_expert_biases(chunks: Sequence[PolicyModel]) -> list[torch.Tensor]:
    """Return the selection biases of all routers, which the end of a backward pass changes."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    biases = [getattr(module, "expert_bias", None) for module in modules]
    return [bias for bias in biases if bias is not None]


def clear_expert_load(chunks: Sequence[PolicyModel]) -> None:
    """Reset the loads and balance losses of all routers."""
    for chunk in chunks:
        for _, router in iter_routers(chunk):
            router.load.zero_()
            router.balance.zero_()


def measure_balance(
    chunks: Sequence[PolicyModel],
) -> tuple[dict[str, float], dict[int, torch.Tensor]]:
    """Return metrics of the experts' load since clear_expert_load, and the load itself.

    Collective over all ranks, which get the same results. Both are empty for a model without
    experts. The load has the training tokens of each expert, without padding: float64 [experts] on
    the CPU, by MoE layer.

    moe/max_expert_load and moe/min_expert_load: the largest and smallest load of an expert over the
    mean of its layer; moe/max_expert_load/layer_N: the largest of layer N. moe/dead_experts:
    experts of all layers without a token. moe/aux_loss, if the loss is enabled: its mean over
    tokens and MoE layers, without the coefficient; 1 is even.
    """
    config = chunks[0].config
    if not config.num_moe_experts:
        return {}, {}
    loads, balances = _reduce_loads(chunks)
    relative = loads / loads.mean(dim=1, keepdim=True).clamp(min=1 / loads.shape[1])
    metrics = {
        "moe/max_expert_load": float(relative.max()),
        "moe/min_expert_load": float(relative.min()),
        "moe/dead_experts": float((loads == 0).sum()),
    }
    layers = list_moe_layers(config)
    highest = zip(layers, relative.amax(dim=1).tolist(), strict=True)
    metrics |= {f"moe/max_expert_load/layer_{layer}": load for layer, load in highest}
    if config.moe_router_load_balancing_type != "none":
        tokens = (loads.sum(dim=1) / config.moe_router_topk).clamp(min=1)
        metrics["moe/aux_loss"] = float((balances / tokens).mean())
    return metrics, dict(zip(layers, loads, strict=True))


def _reduce_loads(chunks: Sequence[PolicyModel]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loads [MoE layers, experts] and balance losses [MoE layers] (sums over tokens).

    On the CPU. Each token is counted on one rank, where its router ran, so the sum over the world
    is correct in every layout.
    """
    config = chunks[0].config
    rows = {layer: row for row, layer in enumerate(list_moe_layers(config))}
    table = torch.zeros(
        len(rows),
        config.num_moe_experts + 1,
        dtype=torch.float64,
        device=torch.cuda.current_device(),
    )
    for chunk in chunks:
        for layer, router in iter_routers(chunk):
            table[rows[layer], :-1] = router.load
            table[rows[layer], -1] = router.balance
    dist.all_reduce(table)
    table = table.cpu()
    return table[:, :-1], table[:, -1]


def slice_sequence_parallel(
    config: TransformerConfig, values: torch.Tensor, dim: int
) -> torch.Tensor:
    """Return this TP rank's share of values along the tokens of a pack: those of its routers."""
    if not config.sequence_parallel:
        return values
    num_ranks: int = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank: int = parallel_state.get_tensor_model_parallel_rank()
    return values.chunk(num_ranks, dim)[tp_rank]
