"""Buckets through shared memory and a socket, between a sender and a receiver in two threads."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.buckets import Message, Part, ReceiveSlot
from mcore_rl.reshard.executor import Bucket
from mcore_rl.reshard.ops import compute_checksums
from mcore_rl.weight_sync.colocated import ShardEndpoint, ShardSender, receive_shards
from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.shared_memory import (
    SharedBuckets,
    check_allocator,
    shared_buckets,
    site_of,
)
from mcore_rl.weight_sync.transport import WeightUpdate
from tests.fakes import FakeEvent, FakeGpu, FakeStream, replace_torch_cuda

CPU = torch.device("cpu")
VERSION_7 = WeightUpdate(7)


def matrix(number: int) -> torch.Tensor:
    return torch.arange(number, number + 12, dtype=torch.float32).view(3, 4)


def buckets(memory: SharedBuckets, count: int) -> Iterator[Bucket]:
    """Bucket n holds matrix(n), twice: as float32 and, from another rank, as bfloat16."""
    memories = [memory.allocate(128) for _ in range(2)]
    for index in range(count):
        used, source = memories[index % 2], matrix(index)
        used[:48].view(torch.float32).view(3, 4).copy_(source)
        used[48:72].view(torch.bfloat16).view(3, 4).copy_(source)
        slots, checksums = [], {}
        for rank, (start, dtype) in enumerate([(0, torch.float32), (48, torch.bfloat16)]):
            part = Part("s", (0, 0), f"w{rank}", (index, 0), (3, 4), dtype.itemsize, 0)
            message = Message(index, rank, 0, (part,), part.num_bytes)
            slots.append(ReceiveSlot(message, start))
            checksums[rank] = compute_checksums([(source, dtype)])
        bucket = used, tuple(slots), torch.bfloat16, lambda name: True, checksums
        yield Bucket(index, *bucket)


def in_shared_memory() -> set[str]:
    """The files there that this process maps: others make some all the time."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(None, 5)[5] for line in lines if " /dev/shm/" in line}


class Sending:
    """A sender at work in a thread; `outcome` waits for its end."""

    def __init__(
        self,
        count: int,
        source: Callable[..., Any] = buckets,
        update: WeightUpdate = VERSION_7,
        memory: SharedBuckets | None = None,
    ) -> None:
        self.sender = ShardSender(generation_rank=3, timeout_s=5)
        self.memory = memory or shared_buckets(CPU)
        self.taken, self.mapped = 0, set[str]()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(source, count, update))
        self._thread.start()

    def _run(self, source: Callable[..., Any], count: int, update: WeightUpdate) -> None:
        def counted() -> Iterator[Bucket]:
            for bucket in source(self.memory, count):
                self.taken += 1
                self.mapped |= in_shared_memory()
                yield bucket

        try:
            self.sender.send(counted(), self.memory, update)
        except BaseException as error:  # noqa: BLE001 (looked at by the test)
            self._error = error

    def outcome(self) -> BaseException | None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.sender.close()
        return self._error


def received(
    endpoint: ShardEndpoint, update: WeightUpdate = VERSION_7
) -> list[list[tuple[Any, ...]]]:
    with contextlib.closing(receive_shards(endpoint, update, CPU)) as arriving:
        return [
            [(p.target, p.offset, p.data.clone(), p.source_rank, p.checksum) for p in pieces]
            for pieces in arriving
        ]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_box_arrives_in_its_dtype_with_its_checksum(count):
    before = in_shared_memory()
    sending = Sending(count)
    found = received(sending.sender.endpoint)
    assert sending.outcome() is None
    assert len(found) == count
    for index, pieces in enumerate(found):
        for rank, (target, offset, data, source_rank, checksum) in enumerate(pieces):
            wanted = matrix(index).to((torch.float32, torch.bfloat16)[rank])
            assert (target, offset, source_rank) == (f"w{rank}", (index, 0), rank)
            assert data.dtype == wanted.dtype
            assert torch.equal(data, wanted)
            assert [checksum] == compute_checksums([(wanted, wanted.dtype)]).tolist()
    assert sending.mapped | in_shared_memory() <= before


def test_descriptors_are_closed():
    gc.collect()  # what earlier tests have left
    for _ in range(2):  # the second time, nothing is opened for the first time
        before = len(os.listdir("/proc/self/fd"))
        sending = Sending(3)
        received(sending.sender.endpoint)
        assert sending.outcome() is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_shows_no_token_or_wants_another_version_gets_nothing():
    sending = Sending(1)
    endpoint = sending.sender.endpoint
    with pytest.raises(StreamError, match="refused: wrong token"):
        received(replace(endpoint, token="guess"))
    with pytest.raises(StreamError, match="this sends version 7, not 8"):
        received(endpoint, WeightUpdate(8))
    assert len(received(endpoint)) == 1
    assert sending.outcome() is None
    assert endpoint.token not in repr(endpoint)


def test_who_does_not_know_the_format_gets_nothing_and_is_told_its_name():
    update = WeightUpdate(7)
    object.__setattr__(update, "format", "delta")  # as a newer sender makes it
    sending = Sending(1, update=update)
    endpoint = sending.sender.endpoint
    with pytest.raises(StreamError, match="refused: this sends format delta, not dense"):
        received(endpoint)
    assert len(received(endpoint, update)) == 1
    assert sending.outcome() is None


def test_a_receiver_that_stops_is_an_error_after_all_buckets_were_taken():
    """The other ranks' exchanges wait for this one's."""
    sending = Sending(5)
    arriving = receive_shards(sending.sender.endpoint, VERSION_7, CPU)
    next(arriving)
    arriving.close()
    error = sending.outcome()
    assert isinstance(error, StreamError)
    assert "generation rank 3 refused: the receiver stopped" in str(error)
    assert sending.taken == 5


def test_an_exchange_that_fails_is_told_to_the_receiver():
    def failing(memory: SharedBuckets, count: int) -> Iterator[Bucket]:
        yield from buckets(memory, count)
        raise RuntimeError("rank 1 is gone")

    sending = Sending(2, source=failing)
    with pytest.raises(StreamError, match=r"broke off after 2 buckets: .*rank 1 is gone"):
        received(sending.sender.endpoint)
    assert str(sending.outcome()) == "rank 1 is gone"


def test_a_receiver_that_does_not_come_and_a_sender_that_is_not_there():
    sender = ShardSender(generation_rank=3, timeout_s=0.1)
    with pytest.raises(StreamError, match="generation rank 3 did not come within"):
        sender.send(iter(()), shared_buckets(CPU), WeightUpdate(1))
    sender.close()
    with pytest.raises(StreamError, match="cannot reach the trainer on this device"):
        received(sender.endpoint)


def test_a_receiver_that_is_known_to_be_dead_is_not_waited_for_and_all_buckets_are_taken():
    """Else the ranks that this one exchanges with would wait for it."""
    sender, memory = ShardSender(3, 60, is_lost=lambda: True), shared_buckets(CPU)
    exchange, begun = buckets(memory, 3), time.monotonic()
    with pytest.raises(StreamError, match="generation rank 3 did not come: a server has died"):
        sender.send(exchange, memory, WeightUpdate(1))
    assert time.monotonic() - begun < 10
    assert next(exchange, None) is None
    sender.close()


def test_a_connection_that_says_nothing_does_not_block_the_receiver(monkeypatch):
    monkeypatch.setattr("mcore_rl.parallel.handshake.TIMEOUT_S", 1.0)
    sending = Sending(1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(f"\0{sending.sender.endpoint.name}")
        assert len(received(sending.sender.endpoint)) == 1
    assert sending.outcome() is None


def test_processes_of_a_host_share_a_site():
    assert site_of(CPU) == site_of(CPU)
    assert "network" in site_of(CPU)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpu_memory_that_no_other_process_can_map_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:False,max_split_size_mb:64")
    check_allocator()
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ConfigError, match=f"^{name}='max_split.*expandable segments cannot be sh"):
        shared_buckets(torch.device("cuda", 0))


class BucketsOfGpu:
    """Memory of a GPU's buckets, but that any process maps it: it waits as the real one does."""

    def __init__(self, gpu: FakeGpu) -> None:
        files = shared_buckets(CPU)
        self.allocate, self.describe, self.close = files.allocate, files.describe, files.close
        self.descriptors = files.descriptors
        self.finish_writes = shared_buckets(gpu.device).finish_writes


def buckets_of_gpu(gpu: FakeGpu) -> Callable[[SharedBuckets, int], Iterator[Bucket]]:
    """Buckets whose writes are in the GPU's current stream, while the next one's transfers run."""

    def write(memory: SharedBuckets, count: int) -> Iterator[Bucket]:
        for bucket in buckets(memory, count):
            content = bucket.memory.clone()
            bucket.memory.fill_(0xFF)
            gpu.current.enqueue(lambda to=bucket.memory, content=content: to.copy_(content))
            gpu.side.enqueue(lambda to=bucket.memory: to.fill_(0xEE))
            yield bucket

    return write


@pytest.mark.parametrize("index", [0, 1])  # of the trainer's GPU: the current one, or another
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_bucket_is_announced_after_one_event_behind_its_writes(monkeypatch, count, index):
    gpus = [FakeGpu(0), FakeGpu(1)]
    replace_torch_cuda(monkeypatch, gpus)
    gpu = gpus[index]
    sending = Sending(count, buckets_of_gpu(gpu), memory=BucketsOfGpu(gpu))
    with contextlib.closing(receive_shards(sending.sender.endpoint, VERSION_7, CPU)) as arriving:
        for number, pieces in enumerate(arriving):  # the sender waits for each to be placed
            assert gpu.num_event_waits == number + 1
            assert not gpu.current.pending
            assert torch.equal(pieces[0].data, matrix(number))
            assert len(gpu.side.pending) == number + 1
    assert sending.outcome() is None
    assert gpu.num_event_waits == count
    assert [other.num_device_waits for other in gpus] == [0, 0]
    assert gpus[1 - index].num_event_waits == 0


def test_no_event_is_waited_for_without_a_bucket(monkeypatch):
    gpu = FakeGpu(0)
    replace_torch_cuda(monkeypatch, [gpu])
    sending = Sending(0, buckets_of_gpu(gpu), memory=BucketsOfGpu(gpu))
    assert received(sending.sender.endpoint) == []
    assert sending.outcome() is None
    assert gpu.num_event_waits == gpu.num_device_waits == 0


@pytest.mark.parametrize(
    ("real", "fake"),
    [
        (torch.cuda.Event.__new__, FakeEvent.__init__),
        (torch.cuda.Event.record, FakeEvent.record),
        (torch.cuda.Event.synchronize, FakeEvent.synchronize),
        (torch.cuda.Stream.record_event, FakeStream.record_event),
    ],
)
def test_a_fake_gpu_is_called_as_a_real_one(real, fake):
    assert [*inspect.signature(real).parameters][1:] == [*inspect.signature(fake).parameters][1:]
