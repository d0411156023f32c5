"""Ray as this project starts it: its settings, and patches of its Python code (Ray 2.60).

A node of launch/*.sh reads the settings without importing Ray.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

RAY_CONFIG: dict[str, bool | int] = {
    # Workers kept ready would never be used: each rank has an environment of its own.
    "prestart_worker_first_driver": False,
    # Ray would kill Python's resource trackers too, before they unlink shared memory that the
    # reaper may not have seen yet. Other processes of workers are killed by the reaper.
    "kill_child_processes_on_worker_exit": False,
    # A record of each call, for `ray list tasks` and the dashboard, which are not used: without it
    # a call takes the driver a fifth less CPU time.
    "task_events_report_interval_ms": 0,
    # Added to the niceness of the node; Ray's own default is 15 (ray_config_def.h, applied by
    # core_worker_process.cc), at which ranks starve beside any other program of the machine.
    "worker_niceness": 0,
}
# A dead node is noticed after 5 checks, a second apart; by default it takes Ray 15 s.
HEALTH_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
}


@contextlib.contextmanager
def listen_on_loopback() -> Iterator[None]:
    """Keep every Ray port of a node that is started inside on 127.0.0.1.

    Ray 2.60 replaces 127.0.0.1 by an outward address (_private/services.py:811) and then listens
    on all interfaces, unless clusters are switched off, as they are on macOS and Windows.
    """
    from ray._private import ray_constants

    with _replace_attribute(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


@contextlib.contextmanager
def skip_session_services(*, has_log_monitor: bool) -> Iterator[None]:
    """Start a session inside without Ray's processes that are not used: 4 s of CPU and 0.3 GB.

    They are the autoscaler's monitor, the server of the dashboard (`include_dashboard=False` leaves
    it without pages only) and, unless the driver is to print the output of workers, the log monitor
    (_private/node.py:1654, :1666 and :1765), and those of `skip_node_services`.
    """
    from ray._private.node import Node

    names = ["start_monitor", "start_api_server"]
    if not has_log_monitor:
        names.append("start_log_monitor")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_replace_attribute(Node, name, lambda *_, **__: None))
        stack.enter_context(skip_node_services())
        yield


@contextlib.contextmanager
def skip_node_services() -> Iterator[None]:
    """Start a node inside without Ray's client server, and its agent without modules.

    A node must have the dashboard's agent, and gives it 15 s to start (_private/services.py:1910).
    `ray start` of a head always starts the client server (_private/node.py:1657).
    """
    from ray._private import utils
    from ray._private.node import Node

    no_client_server = _replace_attribute(Node, "start_ray_client_server", lambda *_, **__: None)
    no_modules = _replace_attribute(utils, "get_dashboard_dependency_error", lambda: "unwanted")
    with no_client_server, no_modules:
        yield


@contextlib.contextmanager
def _replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
