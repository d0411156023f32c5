"""Roles that share devices, and which of them has its weights there.

A model that is called brings itself to its devices (engine/worker.py). Before that `use` takes
those off that it shares them with: a step goes

    generate -> servers sleep -> reward model, teachers, reference -> actor
             (-> critic -> actor) -> gradients and optimizer off
             -> weights of the servers awake -> push -> actor off -> KV cache awake

Roles with their own devices stay on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mcore_rl.config.rules import are_colocated
from mcore_rl.config.schema import PlacementConfig
from mcore_rl.controller.dispatch import RankGroup
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.rollout.server_pool import NoServersError, ServerPool
from mcore_rl.rollout.weight_updater import WeightSync

ROLLOUT = "rollout"


class DeviceSharing:
    """The models and servers of a run, of which those that share devices take turns."""

    def __init__(
        self,
        placement: PlacementConfig,
        models: Mapping[str, RankGroup],
        servers: ServerPool,
        weight_sync: WeightSync,
        keeps_requests: bool = False,
    ) -> None:
        """Begin with awake servers (they may wait for weights), and models off shared devices.

        Args:
            models: Workers by role: the actor and, if the run has them, reference, critic,
                reward_model, teacher.NAME. A LoRA actor is its own reference.
            keeps_requests: Whether servers that are put to sleep have unfinished requests, which
                go on when they are awake.
        """
        self.placement, self.models, self.servers = placement, models, servers
        self.weight_sync, self._keeps_requests = weight_sync, keeps_requests
        self._has_sleeping_servers = servers_sleep(placement, models)
        self._resident = [ROLLOUT]  # roles with weights on their devices

    @property
    def actor(self) -> RankGroup:
        """Workers of the policy that is trained."""
        return self.models["actor"]

    @property
    def critic(self) -> RankGroup | None:
        """Workers of the value model, if the run has one."""
        return self.models.get("critic")

    def use(self, role: str) -> None:
        """Offload every role that shares devices with `role`, which is called next."""
        self._offload_others(role)
        if role not in self._resident:
            self._resident.append(role)

    def offload_rollout(self) -> None:
        """Put servers on shared devices to sleep, when the samples of a step are generated."""
        if self._has_sleeping_servers and ROLLOUT in self._resident:
            self._offload(ROLLOUT)

    def update_weights(self, version: int) -> None:
        """Send the actor's weights: every server generates with `version` when this returns.

        The actor leaves devices that it shares with servers.
        """
        self.servers.follow_desired()
        is_shared = are_colocated(self.placement, "actor", ROLLOUT)
        self.offload_rollout()  # when weights are sent again, servers have the devices still
        self.use("actor")
        if self._has_sleeping_servers:
            self._offload_others(ROLLOUT, except_role="actor")
            if self.servers.has_joining:
                self._start_servers(is_shared)
        if is_shared:
            self.actor.call(ModelWorker.to, "host", model=False)
        if self._has_sleeping_servers:
            self.servers.wake("weights")
        while not self._push(version):  # all servers on shared devices have died
            self._start_servers(is_shared)
            self.servers.wake("weights")
        if is_shared:
            self._offload("actor")
        if self._has_sleeping_servers:
            self.servers.wake("kv_cache")
            self._resident.append(ROLLOUT)
        self.servers.resend = self.resend_weights

    def disable_resend(self) -> None:
        """Block re-sending weights to restarted servers until the next update.

        The actor is about to change while they generate.
        """
        self.servers.resend = None

    def resend_weights(self) -> None:
        """Send the version that is served once more, of an actor that has not changed since."""
        self.update_weights(self.servers.version)

    def _push(self, version: int) -> bool:
        """Push the weights; return False if no server is up that has its turn to start."""
        if not self._has_sleeping_servers:
            self.weight_sync.push(version)
            return True
        with contextlib.suppress(NoServersError):
            if self.servers.num_up:
                self.weight_sync.push(version)
                return True
        return False

    def _start_servers(self, is_shared: bool) -> None:
        """Start servers that join, on devices that nobody has: each takes a server's memory."""
        if is_shared:
            self.actor.call(ModelWorker.to, "host")
        self.servers.start_asleep()

    def _offload_others(self, role: str, except_role: str = "") -> None:
        """Offload the roles that share devices with `role`, except one."""
        for other in [*self._resident]:
            if other not in (role, except_role) and are_colocated(self.placement, role, other):
                self._offload(other)

    def _offload(self, role: str) -> None:
        """Move a model to the host, or put the servers to sleep."""
        self._resident.remove(role)
        if role == ROLLOUT:
            self.servers.sleep(keep=self._keeps_requests)
        else:
            self.models[role].call(ModelWorker.to, "host")


@dataclass(frozen=True, slots=True)
class ExclusiveDevices:
    """The same for a model that has its devices to itself, without servers."""

    actor: RankGroup
    critic: None = None

    def use(self, role: str) -> None:
        """Do nothing: the model is on its devices."""

    def offload_rollout(self) -> None:
        """Do nothing: there are no servers."""

    def update_weights(self, version: int) -> None:
        """Do nothing: there are no servers."""


def servers_sleep(placement: PlacementConfig, models: Collection[str]) -> bool:
    """Return whether servers share devices with one of the roles `models`, and so have to sleep."""
    return any(are_colocated(placement, ROLLOUT, role) for role in models)


def shares_devices(placement: PlacementConfig, role: str, models: Collection[str]) -> bool:
    """Return whether the engine of a role is offloaded for servers or others of `models`."""
    other_roles = {*models, ROLLOUT} - {role}
    return any(are_colocated(placement, role, other) for other in other_roles)
