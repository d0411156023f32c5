"""A server of vLLM that prints to its log how many bytes of weights each call hands to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_rl.inference.vllm.server import VLLMServer


class CountingServer(VLLMServer):
    """Prints a line a call, `received CALL BYTES`; of weights over a transport no bytes."""

    async def load_adapters(self, content: bytes, alpha: float, version: int) -> None:
        _print_call("load_adapters", len(content))
        await super().load_adapters(content, alpha, version)

    async def load_checkpoint(self, path: str, version: int, **options: Any) -> None:
        _print_call("load_checkpoint", sum(f.stat().st_size for f in Path(path).iterdir()))
        await super().load_checkpoint(path, version, **options)

    async def connect_weights(self, *args: Any) -> None:
        _print_call("connect_weights", 0)
        await super().connect_weights(*args)

    async def update(self, version: int, **options: Any) -> None:
        _print_call("update", 0)
        await super().update(version, **options)


def _print_call(name: str, num_bytes: int) -> None:
    print(f"received {name} {num_bytes}", flush=True)
