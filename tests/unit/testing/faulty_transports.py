"""Transports with a fault each, for the suite that has to find it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.import_path import load_function
from mcore_rl.reshard import ops
from mcore_rl.reshard.executor import MessageTransport, ReceivedSlice, ReshardError
from mcore_rl.weight_sync.transport import StreamError, WeightTransport, WeightUpdate

_EXAMPLE = Path(__file__).parents[3] / "examples/file_transport.py"
FileTransport: Any = load_function("", f"{_EXAMPLE}:FileTransport")
Buckets = Generator[list[ReceivedSlice], None, None]


class LosesSlice(FileTransport):
    def receive(self, update: WeightUpdate) -> Buckets:
        for index, slices in enumerate(super().receive(update)):
            yield slices[1:] if index == 3 else slices


class SendsTwice(FileTransport):
    def receive(self, update: WeightUpdate) -> Buckets:
        for index, slices in enumerate(super().receive(update)):
            yield slices
            if index == 3:
                yield slices[:1]


class ChangesValues(FileTransport):
    def receive(self, update: WeightUpdate) -> Buckets:
        for slices in super().receive(update):
            slices[-1].data.view(torch.uint8).flatten()[-1] ^= 1
            yield slices


class NoChecksums(FileTransport):
    def receive(self, update: WeightUpdate) -> Buckets:
        for slices in super().receive(update):
            yield [replace(piece, checksum=None) for piece in slices]


class OwnChecksums(FileTransport):
    """A transport whose receiver computes the checksums: of what arrives, whatever that is."""

    def receive(self, update: WeightUpdate) -> Buckets:
        for slices in super().receive(update):
            values = ops.compute_checksums((p.data, p.data.dtype) for p in slices).tolist()
            yield [replace(p, checksum=v) for p, v in zip(slices, values, strict=True)]


class AnyVersion(FileTransport):
    @contextmanager
    def _open_messages(self, update: WeightUpdate) -> Iterator[MessageTransport]:
        with super()._open_messages(WeightUpdate(1)) as messages:
            yield messages


class NamelessTimeout(FileTransport):
    def __init__(self, *arguments: Any) -> None:
        try:
            super().__init__(*arguments)
        except StreamError:
            raise StreamError("not all ranks are connected") from None


class OtherError(FileTransport):
    def __init__(self, *arguments: Any) -> None:
        try:
            super().__init__(*arguments)
        except StreamError as error:
            raise TimeoutError(str(error)) from error

    def receive(self, update: WeightUpdate) -> Buckets:
        try:
            yield from super().receive(update)
        except (StreamError, ReshardError) as error:
            raise OSError(str(error)) from error


class WaitsForever(FileTransport):
    def receive(self, update: WeightUpdate) -> Buckets:
        try:
            yield from super().receive(update)
        except StreamError:
            time.sleep(600)


class Unfinished(WeightTransport):
    def close(self) -> None: ...


def build(*arguments: Any) -> None: ...
