"""The methods of a training rank, as its group calls them."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.errors import PeerError
from mcore_rl.config.schema import EngineConfig, FSDPConfig, Layout, WeightSyncConfig
from mcore_rl.controller.dispatch import Dispatch, get_registered_methods
from mcore_rl.data.batch import Batch
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec


def test_ranks_that_share_a_model_get_the_same_samples():
    """Their collectives would wait for ever, or mix samples, if each got others."""
    methods = get_registered_methods(ModelWorker)
    takes_batches = {"compute_log_probs", "compute_reference_log_probs", "compute_values", "update"}
    for name, registration in methods.items():
        assert registration.dispatch_mode not in (
            Dispatch.DP_COMPUTE,
            Dispatch.DP_COMPUTE_WITH_FUNC,
            Dispatch.MEGATRON_PP_AS_DP,
        ), name
        expected = Dispatch.MINI_BATCHES if name == "update" else Dispatch.MEGATRON_COMPUTE
        assert name not in takes_batches or registration.dispatch_mode is expected


class Engine:
    """Records its calls; batches stay as they are."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.updates: list[tuple[Any, ...]] = []
        self.fails = False

    def to(self, place: str, **parts: bool) -> None:
        if self.fails and place == "device":
            raise MemoryError("no device memory")
        names = [name for name in ("model", "optimizer", "grad") if parts.get(name, True)]
        self.calls.append(f"{place} {' '.join(names)}")

    def infer_batch(self, batch: Batch, **settings: Any) -> Batch:
        self.calls.append("infer")
        return batch

    def train_batch(self, batch: Batch, loss: Any, *, temperature: float) -> dict[str, float]:
        self.calls.append("train")
        self.updates.append((batch.array("row").tolist(), loss, temperature))
        return {"loss": float(len(self.updates))}

    def load_checkpoint(self, path: Path) -> None:
        self.calls.append("load")

    def get_local_weights(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr("mcore_rl.engine.worker.create_engine", lambda *_: engine)
    return engine


def build_worker() -> ModelWorker:
    spec: Any = SimpleNamespace(engine=EngineConfig())
    return ModelWorker(spec, len)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "trained"),
    [
        (None, [[0, 1, 2, 3, 4]]),
        ([5], [[0, 1, 2, 3, 4]]),
        ([2, 3], [[0, 1], [2, 3, 4]]),
        ([0, 4, 1], [[], [0, 1, 2, 3], [4]]),  # a rank may have no row of one
    ],
)
def test_an_update_is_a_step_on_the_rows_of_each_mini_batch_in_their_order(engine, sizes, trained):
    metrics = build_worker().update(Batch({"row": np.arange(5)}), sizes=sizes, temperature=0.5)
    assert engine.updates == [(rows, len, 0.5) for rows in trained]
    assert metrics == [{"loss": 1.0 + number} for number in range(len(trained))]


ALL = "model optimizer grad"
BATCH = Batch({"row": np.arange(2)})


def test_a_model_that_was_offloaded_is_back_before_the_next_call_that_needs_it_and_once(engine):
    worker = build_worker()
    worker.compute_values(BATCH)
    worker.to("host")
    assert worker.apply(len, BATCH) == 2  # has no part of the model in it
    assert engine.calls == ["infer", f"host {ALL}"]
    worker.compute_values(BATCH)
    worker.update(BATCH)
    assert engine.calls[2:] == [f"device {ALL}", "infer", "train"]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda worker: worker.compute_log_probs(BATCH, temperature=1.0), "infer"),
        (lambda worker: worker.compute_reference_log_probs(BATCH, temperature=1.0), "infer"),
        (lambda worker: worker.load_checkpoint("path"), "load"),
    ],
)
def test_a_part_that_was_offloaded_is_back_before_a_call(engine, call, name):
    worker = build_worker()
    worker.to("host", model=False)
    call(worker)
    assert engine.calls == ["host optimizer grad", f"device {ALL}", name]


def test_a_model_of_which_a_part_is_brought_back_is_offloaded_still(engine):
    worker = build_worker()
    worker.to("host")
    worker.to("device", optimizer=False, grad=False)
    worker.update(BATCH)
    assert engine.calls == [f"host {ALL}", "device model", f"device {ALL}", "train"]


def test_weights_alone_are_back_to_be_sent(engine):
    worker, sent = build_worker(), []
    worker._transport = SimpleNamespace(send=lambda *args: sent.append(list(engine.calls)))
    worker.to("host")
    worker.send_weights(1)
    assert sent == [[f"host {ALL}", "device model"]]


def test_a_model_that_cannot_come_back_fails_the_call_that_needs_it(engine):
    worker = build_worker()
    worker.to("host")
    engine.fails = True
    with pytest.raises(MemoryError, match="no device memory"):
        worker.compute_values(BATCH)
    assert engine.calls == [f"host {ALL}"]


def test_a_transfer_is_of_the_replicas_and_prediction_layers_that_the_engine_has(
    engine, monkeypatch
):
    engine.layout, engine.num_mtp_layers, engine.shard_format = Layout(dp=4), 1, "rows"
    spec: Any = SimpleNamespace(
        engine=EngineConfig(fsdp=FSDPConfig(num_replicas=2)),
        model=SimpleNamespace(dtype="bfloat16", family="transformers"),
    )
    worker, servers = ModelWorker(spec, len), GenerationLayout(tp=2)
    monkeypatch.setenv("RENDEZVOUS_HOST", "127.0.0.1")
    monkeypatch.setenv("RENDEZVOUS_PORT", "9")
    monkeypatch.setenv("RENDEZVOUS_TOKEN", "secret")
    lists, settings = [[["a", "float32", [1], []]]], WeightSyncConfig(verify="full")
    endpoints = []
    for arguments in ((), ("huggingface", lists)):
        endpoint, transfer = worker.open_weights(servers, settings, *arguments)
        endpoints.append(endpoint)
        weight_format, worker_lists = arguments or ("vllm", [])
        assert transfer == TransferSpec(
            Layout(dp=4), 1, servers, "bfloat16", settings, shard_format="rows", num_replicas=2,
            weight_format=weight_format, family="transformers", worker_lists=worker_lists,
        )  # fmt: skip
    assert {endpoint.host for endpoint in endpoints} == {"127.0.0.1"}
    with pytest.raises(ConnectionRefusedError):  # the first is closed
        socket.create_connection((endpoints[0].host, endpoints[0].port), timeout=5)
    worker._rendezvous.close()


def test_a_rank_connects_by_its_number_and_leaves_when_a_peer_is_lost(engine, monkeypatch):
    made, endpoint = [], RendezvousEndpoint("127.0.0.1", 9, "secret")
    engine.hf_config, engine.world_rank, engine.device = {"a": 1}, 3, "cpu"

    def fail(*args: Any) -> None:
        raise PeerError("gone")

    def connect(*args: Any) -> Any:
        made.append((args, closed := []))
        return SimpleNamespace(send=fail, close=lambda: closed.append(True))

    monkeypatch.setattr("mcore_rl.engine.worker.connect", connect)
    worker: Any = build_worker()
    for name in ("first", "second"):
        worker.connect_weights(endpoint, name)
    assert made[1][0] == ("second", endpoint, {"a": 1}, 3, "cpu")
    assert [closed for _, closed in made] == [[True], []]
    with pytest.raises(PeerError, match="gone"):
        worker.send_weights(1)
    assert made[1][1] == [True]
