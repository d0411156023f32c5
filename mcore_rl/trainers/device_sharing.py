"""Turns of roles that share devices. The order of a step:

    generate -> servers sleep -> (reward model, teachers, reference: on device -> scores -> off)
             -> actor on device -> log-probs
             -> (actor off -> critic on device -> values, its update -> off -> actor on device)
             -> update -> gradients and optimizer off
             -> weights awake -> push -> actor off -> KV cache awake

Roles with their own devices stay on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mcore_rl.config.resolve import are_colocated
from mcore_rl.config.schema import PlacementConfig
from mcore_rl.controller.batch_ops import B
from mcore_rl.controller.dispatch import Group
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.rollout.weight_updater import WeightSync
from mcore_rl.trainers.steps import with_reference_log_probs


@dataclass(frozen=True, slots=True)
class Turns:
    """`models` are the actor and, if there are any, reference, critic, reward model, teachers.

    A LoRA actor is its own reference. With `keeps_requests` servers that sleep have unfinished
    requests, and go on with them.
    """

    placement: PlacementConfig
    models: dict[str, WorkerGroup]
    servers: ServerPool
    weight_sync: WeightSync
    keeps_requests: bool = False

    @property
    def actor(self) -> WorkerGroup:
        return self.models["actor"]

    @property
    def critic(self) -> WorkerGroup | None:
        return self.models.get("critic")

    def stop_serving(self) -> None:
        """Call when the servers have generated all samples of the step, or keep what they do."""
        if servers_sleep(self.placement, self.models):
            self.servers.sleep(keep=self.keeps_requests)

    def with_reference_log_probs(self, batch: B, temperature: float) -> B:
        """Adds reference log-probs, of the reference model or of the actor without adapters."""
        if "reference" not in self.models:
            self.begin_training()
            score = self.actor.compute_reference_log_probs
            return with_reference_log_probs(batch, score, temperature)
        with self.on_device("reference") as reference:
            return with_reference_log_probs(batch, reference.compute_log_probs, temperature)

    def begin_training(self) -> None:
        if model_moves(self.placement, "actor", self.models):
            self.actor.with_next("to", "device")

    @contextlib.contextmanager
    def critic_on_device(self) -> Iterator[WorkerGroup]:
        """Inside, the critic has the devices, of an actor that had them and gets them again."""
        is_shared = are_colocated(self.placement, "actor", "critic")
        if is_shared:
            self.actor.to("host")
        with self.on_device("critic") as critic:
            yield critic
        if is_shared:
            self.begin_training()

    @contextlib.contextmanager
    def on_device(self, role: str) -> Iterator[WorkerGroup]:
        """Inside, a model has its devices, which the actor has left or not yet got."""
        moves = model_moves(self.placement, role, self.models)
        if moves:
            self.models[role].with_next("to", "device")
        yield self.models[role]
        if moves:
            self.models[role].to("host")

    def serve(self, version: int) -> None:
        """Push the updated actor: every server generates with `version` when this returns."""
        actor_moves = model_moves(self.placement, "actor", self.models)
        servers_slept = servers_sleep(self.placement, self.models)
        self.servers.follow_wanted()
        if servers_slept and self.servers.has_joining:
            self._start_servers(actor_moves)
        if actor_moves:
            self.actor.to("host", model=False)
        if servers_slept:
            self.servers.wake("weights")
            while not self.servers.num_up:  # all have died asleep
                self._start_servers(actor_moves)
                self.servers.wake("weights")
        self.weight_sync.push(version)
        if actor_moves:
            self.actor.to("host")
        if servers_slept:
            self.servers.wake("kv_cache")
        self.servers.resend = self.serve_again

    def _start_servers(self, actor_moves: bool) -> None:
        """Those that join, while the actor is off its devices: each takes its weights and cache."""
        if actor_moves:
            self.actor.to("host")
        self.servers.start_asleep()
        if actor_moves:
            self.actor.to("device", optimizer=False, grad=False)

    def keep_actor(self) -> None:
        """Before servers generate beside the actor: until `serve`, they cannot have its weights.

        A trainer that waits for samples has no need of this: the actor has what is served.
        """
        self.servers.resend = None

    def serve_again(self) -> None:
        """As `serve`, of the version that was served; for an actor that has not changed since."""
        self.begin_training()
        self.serve(self.servers.version)


@dataclass(frozen=True, slots=True)
class OneModel:
    """The same for a model that has its devices to itself, without servers."""

    actor: Group
    critic: None = None

    def stop_serving(self) -> None: ...

    def begin_training(self) -> None: ...

    def serve(self, version: int) -> None: ...


def servers_sleep(placement: PlacementConfig, models: Collection[str]) -> bool:
    """`models` are the roles of the run that have a training engine, here and below."""
    return any(are_colocated(placement, "rollout", mate) for mate in models)


def model_moves(placement: PlacementConfig, role: str, models: Collection[str]) -> bool:
    """Whether the training engine of a role is offloaded for other roles."""
    mates = {*models, "rollout"} - {role}
    return any(are_colocated(placement, role, mate) for mate in mates)
