"""The suite of weight transports: ours and the example pass it, and each check finds a fault."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.schema import RLConfig
from mcore_rl.testing import check_transport
from mcore_rl.testing.transport import CHECKS, NUM_RANKS, TransportChecks
from tests.nightly import nightly

EXAMPLE = f"{Path(__file__).parents[3]}/examples/file_transport.py:FileTransport"
FAULTY = f"{Path(__file__).parent}/faulty_transports.py"


@pytest.mark.job
@pytest.mark.parametrize(
    "transport", [EXAMPLE, *map(nightly, ("process_group", "nixl", "shared_memory"))],
    ids=["example", "process_group", "nixl", "shared_memory"],
)  # fmt: skip
def test_transports_keep_the_contract(transport):
    assert check_transport(transport, timeout_s=2.0) == [*CHECKS]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(NUM_RANKS, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("name", "transport", "message"),
    [
        ("layouts", "LosesSlice", r"elements of \S+ did not arrive, or more than once"),
        ("layouts", "SendsTwice", r"elements of \S+ did not arrive, or more than once"),
        ("layouts", "ChangesValues", "other values arrive than were sent"),
        ("layouts", "NoChecksums", "the parameter is verified, and the slice has no checksum"),
        ("verification", "OwnChecksums", "a bit that flips in a message is not found"),
        ("versions", "AnyVersion", "rank 2 goes on though its trainer sends another version"),
        ("absent_rank", "NamelessTimeout", "does not name rank 2 as rank 2 does not connect"),
        ("absent_rank", "OtherError", "raises TimeoutError: .* the contract says StreamError"),
        ("silent_rank", "OtherError", "raises OSError: .* the contract says StreamError"),
    ],
)
def test_a_fault_is_reported_with_a_sentence_on_it(processes, name, transport, message):
    with pytest.raises(AssertionError, match=message):
        CHECKS[name](TransportChecks(f"{FAULTY}:{transport}", 1.0, processes))


@pytest.mark.job
def test_a_rank_that_waits_for_ever_ends_the_suite(monkeypatch, tmp_path):
    monkeypatch.setenv("FILE_TRANSPORT_DIR", str(tmp_path))  # a killed rank leaves its folder
    # Time to connect on a busy machine: a rank that cannot does not come to its wait.
    with pytest.raises(AssertionError, match=r"rank 2 still waits .*; weight_sync.timeout_s is 5"):
        check_transport(f"{FAULTY}:WaitsForever", timeout_s=5.0, start_s=15, only=["silent_rank"])


@pytest.mark.job
@pytest.mark.parametrize(
    ("transport", "message"),
    [
        (f"{FAULTY}:build", "is no subclass of mcore_rl.weight_sync.transport.WeightTransport; al"),
        (f"{FAULTY}:Unfinished", "does not define receive, send; allowed: a subclass of mcore_rl."),
        (f"{FAULTY}:Missing", "has no function 'Missing'; it has: LosesSlice, "),
        ("os:system", "is Python's own posix.system"),
    ],
)
def test_another_class_is_refused_before_a_process_is_started(transport, message):
    with pytest.raises(ConfigError, match=f"weight_sync.transport=.*{message}"):
        check_transport(transport)


@pytest.mark.job
def test_another_name_is_refused_by_the_setting_and_by_the_suite():
    config = RLConfig()
    config.task.name = "last_digit"
    config.weight_sync.method, config.weight_sync.transport = "disaggregated", "smoke"
    with pytest.raises(ConfigError, match=r"weight_sync.transport='smoke'; allowed: 'process_gr"):
        validate_rl(config)
    config.weight_sync.transport = EXAMPLE
    validate_rl(config)
    config.weight_sync.method = "colocated"
    with pytest.raises(ConfigError, match=r"has no part in weight_sync.method='colocated'"):
        validate_rl(config)
    with pytest.raises(ConfigError, match=r"only=\['speed'\]; allowed: layouts, verification"):
        check_transport(EXAMPLE, only=["speed"])
