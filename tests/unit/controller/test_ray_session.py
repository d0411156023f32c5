"""Warnings of a session that joins a cluster."""

from __future__ import annotations

import re

import pytest

from mcore_rl.controller import ray_session


@pytest.mark.parametrize(
    ("needed", "address", "message"),
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
def test_session_warns_of_nodes_that_a_run_leaves_idle(
    monkeypatch, capsys, needed, address, message
):
    other_nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"GPU": 8.0}},
    ]
    nodes = [{"Alive": True, "Resources": {"GPU": 8.0}}] * 64
    monkeypatch.setattr(ray_session.ray, "nodes", lambda: [*other_nodes, *nodes])
    monkeypatch.setattr(ray_session.ray, "cluster_resources", lambda: {"GPU": 512.0})
    ray_session._check_resources({"GPU": needed}, address)
    out = capsys.readouterr().out
    if message is None:
        assert out == ""
    else:
        assert out.count("\n") == 1
        assert re.match(message, out)
