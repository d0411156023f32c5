"""Servers of frozen models, started beside the policy's."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mcore_rl.config.resolve_models import ROLE
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.controller.pending import PendingCall, WorkerError
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.jobs.placement import Pools, models_with_paths
from mcore_rl.rollout.worker import ModelServer, ModelServerSpec

if TYPE_CHECKING:
    from mcore_rl.agents.remote import ModelAddress


@dataclass(slots=True)
class ModelServers:
    """The groups of all models, by name."""

    groups: dict[str, WorkerGroup]
    keys: dict[str, str] = field(repr=False)

    def preparing(self) -> list[PendingCall]:
        return [group.prepare.submit() for group in self.groups.values()]

    def starting(self) -> list[PendingCall]:
        """Each gives the URLs of a model's servers."""
        return [group.start.submit() for group in self.groups.values()]

    def addresses(self, started: list[Any]) -> dict[str, ModelAddress]:
        """From the results of `starting`."""
        from mcore_rl.agents.remote import ModelAddress  # imports clients of HTTP

        urls = zip(self.groups, started, strict=True)
        return {name: ModelAddress(tuple(found), self.keys[name]) for name, found in urls}


@contextlib.contextmanager
def model_servers(config: RLConfig, pools: Pools) -> Iterator[ModelServers]:
    """Being built, and they have yet to be started.

    Each model has a key of its own, which goes to its servers and to the policy's as an argument.
    """
    made = ModelServers({}, {})
    with contextlib.ExitStack() as stack:
        for name, model in models_with_paths(config).items():
            made.keys[name] = secrets.token_urlsafe(32)
            spec = ModelServerSpec(
                model_path=model.path,
                dtype=config.model.dtype,
                max_context=model.max_context,
                servers=model.servers,
                seed=config.seed,
                timeout_s=config.inner_timeout_s,
                key=made.keys[name],
            )
            layout, role = Layout(dp=model.servers.num_servers), f"{ROLE}{name}"
            made.groups[name] = stack.enter_context(
                pools.group(role, ModelServer, (spec,), layout, name=role, wait=False)
            )
        yield made
        for group in made.groups.values():
            try:
                group.shut_down()
            except WorkerError as error:  # a server that died while others did its work
                print(str(error).splitlines()[0])
