"""What a driver says of nodes that its run does not take."""

from __future__ import annotations

import re

import pytest

from mcore_rl.controller import pool


@pytest.mark.parametrize(
    ("needed", "address", "told"),
    [
        (
            256,
            "10.0.0.1:20000",
            "32 of the 64 nodes stay idle: .* 512 of 'GPU', .*32 n",
        ),
        (257, "10.0.0.1:20000", "31 of the 64 nodes .*raise actor.layout.dp .*; else ask for 33 n"),
        (505, "10.0.0.1:20000", None),
        (256, None, None),
    ],
)
def test_nodes_that_a_run_leaves_idle_are_told(monkeypatch, capsys, needed, address, told):
    others = [
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"GPU": 8.0}},
    ]
    nodes = [{"Alive": True, "Resources": {"GPU": 8.0}}] * 64
    monkeypatch.setattr(pool.ray, "nodes", lambda: [*others, *nodes])
    monkeypatch.setattr(pool.ray, "cluster_resources", lambda: {"GPU": 512.0})
    pool._check_resources({"GPU": needed}, address)
    out = capsys.readouterr().out
    if told is None:
        assert out == ""
    else:
        assert out.count("\n") == 1
        assert re.match(told, out)
