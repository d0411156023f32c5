"""Turns of roles that share devices. The order of a step:

    generate -> servers sleep -> (reference on device -> its log-probs -> off)
             -> actor on device -> log-probs, update -> gradients and optimizer off
             -> weights awake -> push -> actor off -> KV cache awake

Roles with their own devices stay on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.resolve import takes_turns
from mcore_rl.config.schema import PlacementConfig
from mcore_rl.controller.dispatch import Group
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch
from mcore_rl.workers.steps import with_reference_log_probs
from mcore_rl.workers.weight_sync import WeightSync


@dataclass(frozen=True, slots=True)
class Turns:
    """`reference` is None if there is none, or if the actor is also the reference."""

    placement: PlacementConfig
    actor: WorkerGroup
    reference: WorkerGroup | None
    servers: WorkerGroup
    weight_sync: WeightSync

    def stop_serving(self) -> None:
        """Call when the servers have generated all samples of the step."""
        if servers_sleep(self.placement, self.reference is not None):
            self.servers.sleep()

    def with_reference_log_probs(self, batch: Batch, temperature: float) -> Batch:
        """Adds reference log-probs, of the reference model or of the actor without adapters."""
        if self.reference is None:
            self.begin_training()
            score = self.actor.compute_reference_log_probs
            return with_reference_log_probs(batch, score, temperature)
        moves = model_moves(self.placement, "reference", has_reference=True)
        if moves:
            self.reference.to("device")
        batch = with_reference_log_probs(batch, self.reference.compute_log_probs, temperature)
        if moves:
            self.reference.to("host")
        return batch

    def begin_training(self) -> None:
        if model_moves(self.placement, "actor", self.reference is not None):
            self.actor.to("device")

    def serve(self, version: int) -> None:
        """Push the updated actor: every server generates with `version` when this returns."""
        actor_moves = model_moves(self.placement, "actor", self.reference is not None)
        servers_slept = servers_sleep(self.placement, self.reference is not None)
        if actor_moves:
            self.actor.to("host", model=False)
        if servers_slept:
            self.servers.wake("weights")
        self.weight_sync.push(version)
        if actor_moves:
            self.actor.to("host")
        if servers_slept:
            self.servers.wake("kv_cache")


@dataclass(frozen=True, slots=True)
class OneModel:
    """The same for a model that has its devices to itself, without servers."""

    actor: Group

    def stop_serving(self) -> None: ...

    def begin_training(self) -> None: ...

    def serve(self, version: int) -> None: ...


def servers_sleep(placement: PlacementConfig, has_reference: bool) -> bool:
    mates = ["actor", "reference"] if has_reference else ["actor"]
    return any(takes_turns(placement, "rollout", mate) for mate in mates)


def model_moves(placement: PlacementConfig, role: str, has_reference: bool) -> bool:
    """Whether a training engine is offloaded for other roles: `role` is actor or reference."""
    mates = {"actor", "reference", "rollout"} if has_reference else {"actor", "rollout"}
    return any(takes_turns(placement, role, mate) for mate in mates - {role})
