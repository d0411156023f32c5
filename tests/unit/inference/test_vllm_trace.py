"""A trace of a model that runs in several steps and works in place, as vLLM's models do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mcore_rl.inference.vllm.trace import TraceTaker

_HIDDEN, _NUM_EXPERTS, _SCALE, _VOCAB = 4, 5, 2.5, 7


class _Norm(nn.Module):
    """Returns (normed, sum), like vLLM's norms once there is a residual."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / x.norm(dim=-1, keepdim=True), x


class _Router:
    global_num_experts = _NUM_EXPERTS

    def select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = router_logits.softmax(-1).topk(2)
        return weights, ids.to(torch.int32)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = _Router()
        self.routed_scaling_factor = _SCALE

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, _ = self.router.select_experts(hidden_states=x, router_logits=logits)
        return x * weights.sum(-1, keepdim=True)


class _ExpertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(_HIDDEN, _NUM_EXPERTS)
        self.experts = _Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


class _Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.input_layernorm = _Norm()
        self.add_module(name, _ExpertLayer())
        self._name = name

    @property
    def expert_layer(self) -> nn.Module:
        return self.get_submodule(self._name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, _ = self.input_layernorm(x)
        return self.expert_layer(normed).add_(x)  # in the output's own memory


class _Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(_VOCAB, _HIDDEN)
        self.model.layers = nn.ModuleList([_Layer(name)])
        self.model.norm = _Norm()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.norm(self.model.layers[0](self.model.embed_tokens(ids)))[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.model.embed_tokens.weight.T


def _worker(model: nn.Module, rank: int) -> TraceTaker:
    taker: Any = TraceTaker()
    taker.rank = rank
    dtype = next(model.parameters()).dtype
    runner = {"get_model": lambda: model, "device": "cpu", "dtype": dtype}
    taker.model_runner = SimpleNamespace(**runner)
    return taker


def _read(worker: TraceTaker, shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.frombuffer(bytearray(worker.pop_traced_tensor(name)), dtype=torch.float32).view(
            shape
        )
        for name, shape in shapes.items()
    }


@pytest.fixture(params=[("mlp", torch.float32), ("block_sparse_moe", torch.bfloat16)])
def model(request) -> nn.Module:
    name, dtype = request.param
    torch.manual_seed(0)
    return _Model(name).to(dtype)


@torch.no_grad()
def test_steps_make_one_tensor_a_module_under_hugging_faces_names(model):
    ids, worker = torch.arange(_VOCAB), _worker(model, rank=0)
    worker.start_trace()
    hidden = torch.cat([model(ids[:3]), model(ids[3:])])
    traced = _read(worker, worker.end_trace())
    layer = model.model.layers[0]
    embedded = model.model.embed_tokens(ids)
    normed, _ = layer.input_layernorm(embedded)
    # Step by step: the sums of a matrix product may depend on its number of rows.
    logits = torch.cat([layer.expert_layer.gate(part) for part in normed.split([3, _VOCAB - 3])])
    weights, chosen = logits.softmax(-1).topk(2)
    routing = torch.zeros(_VOCAB, _NUM_EXPERTS).scatter_(1, chosen, (weights * _SCALE).float())
    expected = {
        "model.embed_tokens": embedded,
        "model.layers.0.input_layernorm": normed,
        "model.layers.0.mlp": normed * weights.sum(-1, keepdim=True),
        "model.layers.0.mlp.gate": routing,
        "model.norm": hidden,
        "lm_head": model.compute_logits(hidden),
    }
    assert set(traced) == set(expected)
    for name, tensor in traced.items():
        assert torch.equal(tensor, expected[name].float()), name


@torch.no_grad()
def test_other_ranks_keep_nothing_that_they_do_not_compute_with_and_answer_nothing(model):
    worker = _worker(model, rank=1)
    worker.start_trace()
    model(torch.arange(_VOCAB))
    assert worker.end_trace() == {}
    assert worker.pop_traced_tensor("model.norm") == b""
    assert set(worker._traced) == {"model.norm", "lm_head"}


@torch.no_grad()
def test_modules_and_routers_are_left_as_they_were(model):
    worker = _worker(model, rank=0)
    worker.start_trace()
    worker.end_trace()
    assert not any(module._forward_hooks for module in model.modules())
    experts = next(m for m in model.modules() if isinstance(m, _Experts))
    assert vars(experts.router) == {}
