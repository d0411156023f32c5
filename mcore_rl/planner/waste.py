"""Devices that a run takes and gives no work, as far as settings alone say so. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.config.schema import EngineConfig, RLConfig
from mcore_rl.jobs.run_plan import ACTOR, CRITIC, WARM_START, RunPlan, count_groups
from mcore_rl.planner.cluster import list_node_roles


def list_waste(config: RLConfig, plan: RunPlan, gpus_per_node: int | None = None) -> Iterator[str]:
    """Yield a line for each waste of GPUs, with the settings that decide it.

    Args:
        gpus_per_node: GPUs of each node of a cluster. None: they are not known.
    """
    yield from _list_idle_devices(plan)
    if gpus_per_node:
        num_gpus = len(list(list_node_roles(plan, gpus_per_node))) * gpus_per_node
        if idle := num_gpus - plan.num_devices:
            yield f"wasteful: {idle} of the {num_gpus} GPUs of these nodes have no role"
    servers, groups = config.rollout.num_servers, count_groups(config)
    if groups < servers:
        yield (
            f"wasteful: rollout.num_servers={servers}: a step has {groups} prompts at once, and "
            f"all samples of a prompt go to one server; {servers - groups} of them without work"
        )
    for name in (ACTOR, CRITIC):
        if role := plan.find(name):
            yield from _list_engine_waste(config, role.key, role.spec.engine)


def _list_idle_devices(plan: RunPlan) -> Iterator[str]:
    """Yield a line for each role that leaves devices of its pool without work."""
    sizes = {role.name: role.layout.world_size for role in plan if role.name != WARM_START}
    sizes |= {servers.name: servers.num_workers for servers in plan.servers}
    for name, size in sizes.items():
        if size < (num_devices := plan.get_pool(name).num_devices):
            yield (
                f"wasteful: {name} has {size} of the {num_devices} devices of its pool; the others "
                "wait while it works"
            )


def _list_engine_waste(config: RLConfig, key: str, engine: EngineConfig) -> Iterator[str]:
    """Yield lines on mini-batches that are too small for the ranks, even at their full length."""
    longest, layout = config.max_sequence_tokens, engine.layout
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    samples //= config.algorithm.num_mini_batches
    # At least one sequence, and over cp ranks a longer one.
    per_micro_batch = max(1, engine.max_tokens_per_micro_batch * layout.cp // longest)
    if layout.dp > 1 and samples <= per_micro_batch:
        yield (
            f"wasteful: {key}.layout.dp={layout.dp}: a mini-batch has {samples} sequences, and one "
            f"micro-batch has room for {per_micro_batch} ({key}.max_tokens_per_micro_batch="
            f"{engine.max_tokens_per_micro_batch}); dp=1 takes as many passes"
        )
    num_micro_batches = -(-(samples // layout.dp) // per_micro_batch)
    if num_micro_batches < layout.pp:
        yield (
            f"wasteful: {key}.layout.pp={layout.pp}: micro-batches of a rank in a mini-batch: "
            f"{num_micro_batches} at most; stages that wait at any time: "
            f"{layout.pp - num_micro_batches}"
        )
