"""Warnings of a session that joins a cluster; sessions of a process, one after the other."""

from __future__ import annotations

import json
import re

import pytest
from ray._private import worker

from mcore_rl.config.errors import ConfigError
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


def test_a_ray_that_the_process_has_joined_without_devices_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(ray_session.ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ConfigError) as raised:
        ray_session._check_resources({"rank": 2}, "10.0.0.1:20000", is_joined_before=True)
    assert str(raised.value) == (
        "the Ray of this process, at 10.0.0.1:20000, which was started before the run, has too "
        "little of what the run needs: 2 of 'rank' (it has 0); allowed: ray.shutdown() before the "
        "run, which then starts its own, or ray.init(resources={'rank': 2})"
    )


@pytest.mark.job
def test_a_second_session_of_a_process_spills_into_a_folder_of_its_own():
    folders = []
    for _ in range(2):
        with ray_session.ray_session(num_cpus=1, object_store_bytes=100 << 20, log_to_driver=False):
            node = worker._global_node
            spilling = json.loads(node._config["object_spilling_config"])
            folders.append(node.get_session_dir_path())
            assert spilling["params"]["directory_path"] == folders[-1]
    assert len({*folders}) == 2
