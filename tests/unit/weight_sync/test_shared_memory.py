"""Buckets through shared memory and a socket, between two threads; strangers and broken peers."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel import network
from mcore_rl.reshard.buckets import Message, Part, ReceiveSlot
from mcore_rl.reshard.executor import Bucket
from mcore_rl.reshard.ops import compute_checksums
from mcore_rl.weight_sync.shared_memory import (
    Connection,
    ShardEndpoint,
    ShardSender,
    SharedBuckets,
    admit_receiver,
    check_allocator,
    create_shared_buckets,
    get_memory_domain,
    greet_sender,
    receive_shards,
)
from mcore_rl.weight_sync.transport import StreamError, WeightUpdate
from tests import attacks
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


def list_shared_memory_maps() -> set[str]:
    """Return the files in /dev/shm that this process maps."""
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
        self.memory = memory or create_shared_buckets(CPU)
        self.taken, self.mapped = 0, set[str]()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(source, count, update))
        self._thread.start()

    def _run(self, source: Callable[..., Any], count: int, update: WeightUpdate) -> None:
        def counted() -> Iterator[Bucket]:
            for bucket in source(self.memory, count):
                self.taken += 1
                self.mapped |= list_shared_memory_maps()
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


def receive_all(
    endpoint: ShardEndpoint, update: WeightUpdate = VERSION_7
) -> list[list[tuple[Any, ...]]]:
    with contextlib.closing(receive_shards(endpoint, update, CPU)) as arriving:
        return [
            [(p.target, p.offset, p.data.clone(), p.source_rank, p.checksum) for p in slices]
            for slices in arriving
        ]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_box_arrives_in_its_dtype_with_its_checksum(count):
    before = list_shared_memory_maps()
    sending = Sending(count)
    updates = receive_all(sending.sender.endpoint)
    assert sending.outcome() is None
    assert len(updates) == count
    for index, slices in enumerate(updates):
        for rank, (target, offset, data, source_rank, checksum) in enumerate(slices):
            expected = matrix(index).to((torch.float32, torch.bfloat16)[rank])
            assert (target, offset, source_rank) == (f"w{rank}", (index, 0), rank)
            assert data.dtype == expected.dtype
            assert torch.equal(data, expected)
            assert [checksum] == compute_checksums([(expected, expected.dtype)]).tolist()
    assert sending.mapped | list_shared_memory_maps() <= before


def test_descriptors_are_closed():
    gc.collect()  # what earlier tests have left
    for _ in range(2):  # the second time, nothing is opened for the first time
        before = len(os.listdir("/proc/self/fd"))
        sending = Sending(3)
        receive_all(sending.sender.endpoint)
        assert sending.outcome() is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_shows_no_token_or_wants_another_version_gets_nothing():
    sending = Sending(1)
    endpoint = sending.sender.endpoint
    with pytest.raises(StreamError, match="refused: wrong token"):
        receive_all(replace(endpoint, token="guess"))
    with pytest.raises(StreamError, match="this sends version 7, not 8"):
        receive_all(endpoint, WeightUpdate(8))
    assert len(receive_all(endpoint)) == 1
    assert sending.outcome() is None
    assert endpoint.token not in repr(endpoint)


def test_a_receiver_that_does_not_know_the_format_is_refused_with_its_name():
    update = WeightUpdate(7)
    object.__setattr__(update, "format", "delta")  # as a newer sender makes it
    sending = Sending(1, update=update)
    endpoint = sending.sender.endpoint
    with pytest.raises(StreamError, match="refused: this sends format delta, not dense"):
        receive_all(endpoint)
    assert len(receive_all(endpoint, update)) == 1
    assert sending.outcome() is None


def test_a_receiver_that_stops_is_an_error_after_all_buckets_were_taken():
    """Consume all buckets: the exchanges of other ranks wait for them."""
    sending = Sending(5)
    arriving = receive_shards(sending.sender.endpoint, VERSION_7, CPU)
    next(arriving)
    arriving.close()
    error = sending.outcome()
    assert isinstance(error, StreamError)
    assert "generation rank 3 refused: the receiver stopped" in str(error)
    assert sending.taken == 5


def test_the_failure_of_an_exchange_reaches_the_receiver():
    def failing(memory: SharedBuckets, count: int) -> Iterator[Bucket]:
        yield from buckets(memory, count)
        raise RuntimeError("rank 1 is gone")

    sending = Sending(2, source=failing)
    with pytest.raises(StreamError, match=r"broke off after 2 buckets: .*rank 1 is gone"):
        receive_all(sending.sender.endpoint)
    assert str(sending.outcome()) == "rank 1 is gone"


def test_a_receiver_that_does_not_come_and_a_sender_that_is_not_there():
    sender = ShardSender(generation_rank=3, timeout_s=0.1)
    with pytest.raises(StreamError, match="generation rank 3 did not come within"):
        sender.send(iter(()), create_shared_buckets(CPU), WeightUpdate(1))
    sender.close()
    with pytest.raises(StreamError, match="cannot reach the trainer on this device"):
        receive_all(sender.endpoint)


def test_a_receiver_that_is_known_to_be_dead_is_not_waited_for_and_all_buckets_are_taken():
    """Consume all buckets: otherwise the peers of this rank would wait for it."""
    sender, memory = ShardSender(3, 60, is_lost=lambda: True), create_shared_buckets(CPU)
    exchange, begun = buckets(memory, 3), time.monotonic()
    with pytest.raises(StreamError, match="generation rank 3 did not come: a server has died"):
        sender.send(exchange, memory, WeightUpdate(1))
    assert time.monotonic() - begun < 10
    assert next(exchange, None) is None
    sender.close()


def test_a_connection_that_says_nothing_does_not_block_the_receiver(monkeypatch):
    monkeypatch.setattr("mcore_rl.parallel.network.HANDSHAKE_TIMEOUT_S", 1.0)
    sending = Sending(1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(f"\0{sending.sender.endpoint.name}")
        assert len(receive_all(sending.sender.endpoint)) == 1
    assert sending.outcome() is None


def test_processes_of_a_host_share_a_site():
    assert get_memory_domain(CPU) == get_memory_domain(CPU)
    assert "network" in get_memory_domain(CPU)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpu_memory_that_no_other_process_can_map_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:False,max_split_size_mb:64")
    check_allocator()
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ConfigError, match=f"^{name}='max_split.*expandable segments cannot be sh"):
        create_shared_buckets(torch.device("cuda", 0))


class BucketsOfGpu:
    """Memory of a GPU's buckets, but that any process maps it: it waits as the real one does."""

    def __init__(self, gpu: FakeGpu) -> None:
        files = create_shared_buckets(CPU)
        self.allocate, self.describe, self.close = files.allocate, files.describe, files.close
        self.descriptors = files.descriptors
        self.finish_writes = create_shared_buckets(gpu.device).finish_writes


def write_gpu_buckets(gpu: FakeGpu) -> Callable[[SharedBuckets, int], Iterator[Bucket]]:
    """Write buckets in the GPU's current stream, while the transfers of the next one run."""

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
    sending = Sending(count, write_gpu_buckets(gpu), memory=BucketsOfGpu(gpu))
    with contextlib.closing(receive_shards(sending.sender.endpoint, VERSION_7, CPU)) as arriving:
        for number, slices in enumerate(arriving):  # the sender waits for each to be placed
            assert gpu.num_event_waits == number + 1
            assert not gpu.current.pending
            assert torch.equal(slices[0].data, matrix(number))
            assert len(gpu.side.pending) == number + 1
    assert sending.outcome() is None
    assert gpu.num_event_waits == count
    assert [other.num_device_waits for other in gpus] == [0, 0]
    assert gpus[1 - index].num_event_waits == 0


def test_no_event_is_waited_for_without_a_bucket(monkeypatch):
    gpu = FakeGpu(0)
    replace_torch_cuda(monkeypatch, [gpu])
    sending = Sending(0, write_gpu_buckets(gpu), memory=BucketsOfGpu(gpu))
    assert receive_all(sending.sender.endpoint) == []
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


TOKEN = "of this update"
UPDATE = {"version": 7, "format": "dense"}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


@pytest.fixture
def admitting(listener, pool) -> Callable[[], Future[bool]]:
    """The sender's side for the next connection."""

    def admit_next() -> bool:
        connection = Connection(listener.accept()[0], "receiver")
        is_admitted = admit_receiver(connection, TOKEN, UPDATE, 20.0)
        connection.close()
        return is_admitted

    return lambda: pool.submit(admit_next)


def receiver(listener: socket.socket) -> Connection:
    return Connection(socket.create_connection(listener.getsockname(), 20), "sender")


@pytest.mark.parametrize("what", attacks.SENDERS)
def test_a_stranger_is_not_admitted_and_learns_nothing(listener, admitting, what):
    outcome = admitting()
    assert len(attacks.send(listener.getsockname(), what)) <= attacks.MAX_ANSWER_BYTES
    assert outcome.result() is False


def test_a_wrong_token_is_refused_as_such(listener, admitting):
    outcome = admitting()
    with pytest.raises(StreamError, match=r"^sender refused: wrong token$"):
        greet_sender(receiver(listener), "a guess", UPDATE)
    assert outcome.result() is False


def test_one_deadline_is_for_the_whole_handshake(listener, admitting, monkeypatch):
    monkeypatch.setattr(network, "HANDSHAKE_TIMEOUT_S", 0.5)
    outcome = admitting()
    # Its last byte would come after 25 seconds.
    assert 0.3 < attacks.drip(listener.getsockname(), pause_s=0.4, patience_s=30.0) < 15
    assert outcome.result() is False


def test_who_has_the_token_has_no_more_time(listener, admitting, monkeypatch):
    monkeypatch.setattr(network, "HANDSHAKE_TIMEOUT_S", 0.5)
    outcome = admitting()
    slow = receiver(listener)
    network.prove_token(slow.sock, TOKEN, time.monotonic() + 20)
    with pytest.raises(StreamError, match="refused: receiver was not done in time"):
        for byte in attacks.frame(b'{"kind": "hello", "version": 7}')[:-1]:
            slow.sock.sendall(bytes([byte]))
            time.sleep(0.1)
            if outcome.done():
                slow.read_expected("welcome", "waiting")
    assert outcome.result() is False


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (attacks.frame(b'{"kind": "\xff"}'), "a header of peer is not valid JSON: 'utf-8' codec"),
        (attacks.frame(b"[" * 60_000 + b"]" * 60_000), "a header of peer .* nested too deep"),
        (b"\xff\xff\xff\xff", "peer: a header of 4294967295 bytes is not part of this protocol"),
        (attacks.frame(b'{"kind": ' + b"9" * 5000 + b"}"), "a header of peer is not valid JSON"),
        (attacks.frame(b"[1]"), "a header of peer is a JSON list, not an object"),
        (attacks.frame(b'{"version": 1}'), "peer: not a header of this protocol"),
    ],
)
def test_a_header_that_cannot_be_read_is_a_stream_error(sent, message):
    """Refuse it also from a peer that has the token."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.sendall(sent)
        with pytest.raises(StreamError, match=f"^{message}"):
            Connection(reader, "peer").read_header("reading")


def test_a_receiver_of_this_version_is_admitted(listener, admitting):
    outcome = admitting()
    greet_sender(receiver(listener), TOKEN, UPDATE)
    assert outcome.result() is True


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (UPDATE | {"version": 6}, "this sends version 7, not 6"),
        (UPDATE | {"format": "sparse"}, "this sends format dense, not sparse"),
        ({"format": "dense"}, "this sends version 7, not None"),
        ({}, "this sends version 7, not None"),
    ],
)
def test_a_receiver_that_wants_another_update_or_says_none_is_refused(
    listener, admitting, expected, message
):
    outcome = admitting()
    with pytest.raises(StreamError, match=f"^sender refused: {message}$"):
        greet_sender(receiver(listener), TOKEN, expected)
    assert outcome.result() is False
