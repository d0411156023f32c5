"""Servers of frozen models at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.jobs.model_servers import model_servers


class Group:
    """One that has died or lives."""

    def __init__(self, name: str, is_dead: bool) -> None:
        self.name, self.is_dead, self.asked = name, is_dead, list[str]()

    def shut_down(self) -> None:
        self.asked.append("shut_down")
        if self.is_dead:
            raise WorkerError(f"{self.name}.shut_down: rank 0 died")


class Pools:
    def __init__(self) -> None:
        self.groups = list[Group]()

    @contextmanager
    def group(self, role: str, *_: Any, **__: Any) -> Iterator[Group]:
        self.groups.append(Group(role, is_dead=role == "models.user"))
        yield self.groups[-1]
        self.groups[-1].asked.append("closed")


def test_a_server_that_died_in_a_run_that_went_on_is_no_error_at_its_end(capsys):
    config, pools = RLConfig(), Pools()
    config.model.path = "/models/one"
    config.models = {"user": {"num_servers": 2}, "judge": {}}
    with model_servers(config, pools) as made:  # type: ignore[arg-type]
        assert [*made.groups] == ["user", "judge"]
    assert [group.asked[0] for group in pools.groups] == ["shut_down"] * 2
    assert capsys.readouterr().out == "models.user.shut_down: rank 0 died\n"
