"""transformers' scores and outputs of modules in float32, and servers' against them."""

from __future__ import annotations

import re
from typing import Any

import torch

from mcore_rl.inference.protocol import TokenScores

NATS, _RELATIVE = 1e-5, 1e-5  # measured: 1.5e-6 and 1.1e-6
_TRACED = re.compile(
    r"model\.embed_tokens|model\.norm|lm_head|model\.layers\.\d+\."
    r"(input_layernorm|self_attn|post_attention_layernorm|mlp|mlp\.gate|mlp\.router)"
)


def _reference(model: Any, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """Outputs of transformers' modules; of a router the weights, spread over all experts."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, module: Any, output: Any) -> None:
        if name.endswith((".gate", ".router")):
            name = name.replace(".router", ".gate")
            _, weights, ids = output
            output = torch.zeros(len(weights), len(module.weight)).scatter_(1, ids, weights)
        output = output[0] if isinstance(output, tuple) else output
        seen[name] = output.reshape(len(token_ids), -1)

    hooks = [
        module.register_forward_hook(lambda m, _, output, name=name: keep(name, m, output))
        for name, module in model.named_modules()
        if _TRACED.fullmatch(name)
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return seen


def expected(model: Any, token_ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Return log-probs of all tokens but the first, and the most likely token there."""
    log_probs = _reference(model, token_ids)["lm_head"][:-1].log_softmax(-1)
    chosen = log_probs[torch.arange(len(token_ids) - 1), token_ids[1:]]
    return chosen, log_probs.argmax(-1).tolist()


def check(scores: TokenScores, model: Any, before: list[int]) -> None:
    """Check the scores of the tokens that follow `before`."""
    log_probs, top_ids = expected(model, before + scores.token_ids)
    scored = torch.tensor(scores.log_probs)
    torch.testing.assert_close(scored, log_probs[len(before) - 1 :], atol=NATS, rtol=0)
    assert scores.top_ids == top_ids[len(before) - 1 :]


def check_trace(traced: dict[str, torch.Tensor], model: Any, token_ids: list[int]) -> None:
    outputs = _reference(model, token_ids)
    assert set(traced) == set(outputs)
    for name, tensor in traced.items():
        assert tensor.shape == outputs[name].shape, name
        gap = (tensor - outputs[name]).abs().max() / outputs[name].abs().max()
        assert gap < _RELATIVE, name
