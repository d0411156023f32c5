"""Jobs besides scoring, where engines are compared: faulty rules, a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.models import parts
from mcore_rl.reshard.rules import GateUp


def with_up_before_gate(job: Callable[..., Any], *arguments: Any) -> Any:
    """`job` with rules that put the halves of every gated MLP into the other's place."""
    original = parts.build_gated_mlp_rules

    def swapped(*args: Any, **options: Any) -> Any:
        fc1, fc2 = original(*args, **options)
        return GateUp(fc1.up, fc1.gate), fc2

    with mock.patch.object(parts, "build_gated_mlp_rules", swapped):
        return job(*arguments)


def save_weights(spec: EngineSpec, path: Path) -> dict[str, Any]:
    """A Megatron checkpoint of the model that `spec` names."""
    engine = MegatronEngine(spec)
    engine.initialize()
    engine.save_checkpoint(path)
    engine.close()
    return {}
