"""What a conversion may use, and what it says that it takes."""

from __future__ import annotations

import os
import re

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.convert import options
from mcore_rl.jobs.convert.options import Resources, format_bytes, parse_bytes

GIB = 1 << 30


def test_the_bound_grows_with_the_largest_unit_and_the_workers(monkeypatch):
    monkeypatch.setattr(options, "peak_bytes", lambda: 400 << 20)
    one, two = options.bound_bytes(1, GIB), options.bound_bytes(2, GIB)
    assert one == GIB + (432 << 20)
    assert two - options.bound_bytes(2, 0) == 2 * GIB


@pytest.mark.parametrize(
    ("workers", "allowed", "expected"),
    [(1, None, 1), (2, None, 2), (9, None, 3), (None, 10 * GIB, 3), (None, 2 * GIB, 1)],
)
def test_workers_are_those_asked_for_or_those_that_fit(monkeypatch, workers, allowed, expected):
    monkeypatch.setattr(options, "peak_bytes", lambda: 400 << 20)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found, line = options.choose_workers([GIB, GIB, 7], Resources(workers, allowed))
    assert found == expected
    assert line.startswith(
        f"at most {format_bytes(options.bound_bytes(expected, GIB))} of memory: "
    )


def test_too_little_memory_is_refused_with_what_is_enough(monkeypatch):
    monkeypatch.setattr(options, "peak_bytes", lambda: 400 << 20)
    message = r"--max-memory=1 GB is too small for 1 process; allowed: at least (\d+)MB"
    with pytest.raises(ConfigError, match=message) as raised:
        options.choose_workers([GIB], Resources(None, 10**9))
    enough = int(re.search(r"least (\d+)MB", str(raised.value))[1]) * 10**6
    assert options.choose_workers([GIB], Resources(None, enough))[0] == 1
    with pytest.raises(ConfigError, match="for 2 worker processes"):
        options.choose_workers([GIB, GIB], Resources(2, enough))


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "5 parsecs", "0", "1.5.5GB", "9" * 30])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"--max-memory="):
        parse_bytes("--max-memory", text)


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("2kb", 2000), ("1.5GiB", 3 << 29)])
def test_a_size_has_a_unit_or_none(text, size):
    assert parse_bytes("--max-memory", text) == size


def test_workers_below_one_are_refused():
    with pytest.raises(ConfigError, match=r"--workers=0; allowed: at least 1"):
        Resources(workers=0)
