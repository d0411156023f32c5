"""The plan of a run: its roles, its servers and the devices of each, from settings alone.

What starts a run, checks its inputs, or predicts its memory and time reads this plan: nothing else
works out which roles there are. Pure: no cluster, no files. A run that changes has another plan:
after the warm start, that of settings without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.inputs import get_needs
from mcore_rl.algorithms.losses import (
    ValueClipSettings,
    linear_in_scores,
    negative_log_likelihood,
    value_clip,
)
from mcore_rl.algorithms.preference import PREFERENCE_LOSSES
from mcore_rl.config.rules import (
    OWN_POOL,
    count_extra_groups,
    get_loop,
    get_pool,
    get_staleness,
    list_test_files,
)
from mcore_rl.config.rules_algorithm import TOP_TOKEN_LOSSES, build_teachers
from mcore_rl.config.rules_rollout import ROLE, ServedModel, build_served_models
from mcore_rl.config.rules_train import get_data_config
from mcore_rl.config.schema import (
    ConversationsConfig,
    DPOConfig,
    EngineConfig,
    Layout,
    LoRAConfig,
    ModelConfig,
    RLConfig,
    RMConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)
from mcore_rl.data.images import get_images_folder
from mcore_rl.engine.base import EngineSpec, LossFunction
from mcore_rl.inference.kv_cache import CacheNeed, count_need
from mcore_rl.models.base import HFConfig
from mcore_rl.trainers.base import load_trainer
from mcore_rl.trainers.device_sharing import ROLLOUT
from mcore_rl.trainers.policy_loss import reads_squares

ACTOR, CRITIC, REFERENCE, REWARD_MODEL = "actor", "critic", "reference", "reward_model"
WARM_START = "warm_start"
TEACHER_PREFIX = "teacher."  # of the role of each teacher
MODEL = "model"  # of sft, dpo and rm


@dataclass(frozen=True, slots=True)
class Role:
    """A model on the ranks of a training engine."""

    name: str  # actor, critic, reference, reward_model, teacher.NAME, warm_start; model
    key: str  # of its settings, such as "critic"
    task: str  # what its ranks compute
    pool: str
    spec: EngineSpec
    model_type: str = "language_model"
    # Builds the loss that it is trained on, which may be the user's code. None: it is frozen.
    build_loss: Callable[[], LossFunction] | None = field(default=None, repr=False, compare=False)

    @property
    def layout(self) -> Layout:
        return self.spec.engine.layout

    @property
    def path(self) -> str:
        """Folder of its first weights."""
        return self.spec.model.path

    @property
    def path_setting(self) -> str:
        """Setting of `path`, for a model other than the policy."""
        return f"{self.key}.model_path"

    @property
    def is_trained(self) -> bool:
        return self.build_loss is not None

    def make_trainable(self, num_steps: int, build_loss: Callable[[], LossFunction]) -> Role:
        """Return the role as one that is trained for a number of optimizer steps."""
        spec = replace(self.spec, total_steps=num_steps)
        return replace(self, spec=spec, build_loss=build_loss)

    def build_worker_arguments(self) -> tuple[EngineSpec, LossFunction | None, str]:
        """Return the arguments of its ranks' ModelWorker."""
        return self.spec, self.build_loss and self.build_loss(), self.model_type

    def is_scoring(self) -> bool:
        """Return whether it is a frozen model of its own: the reward model, or a teacher."""
        return self.name == REWARD_MODEL or self.name.startswith(TEACHER_PREFIX)


@dataclass(frozen=True, slots=True)
class Servers:
    """Equal generation servers of a model."""

    name: str  # "rollout": of the policy; "models.NAME": of a frozen model
    task: str
    pool: str
    model: ModelConfig
    settings: RolloutConfig
    sequence_tokens: int  # of the longest sequence
    num_sequences: int | None = None  # most of one server at once; None: as many as it takes

    def count_cache_need(self, model: HFConfig, device_type: str) -> CacheNeed:
        """Count what the KV cache of each worker has to hold.

        Args:
            model: config.json of the servers' model.
            device_type: "cuda" or "cpu".
        """
        return count_need(
            model,
            self.settings,
            self.model.dtype,
            self.sequence_tokens,
            self.num_sequences,
            device_type,
        )

    @property
    def num_workers(self) -> int:
        """Workers of all servers."""
        return self.settings.num_servers * self.settings.num_workers


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that roles share: `num_bundles` bundles, each on one node."""

    name: str
    roles: tuple[str, ...]  # of engines and servers; the warm start has the actor's part
    num_bundles: int
    devices_per_bundle: int = 1

    @property
    def num_devices(self) -> int:
        return self.num_bundles * self.devices_per_bundle


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that a run starts."""

    roles: tuple[Role, ...]  # in the order in which they start; the warm start ends before the rest
    servers: tuple[Servers, ...]  # the policy's first
    pools: tuple[Pool, ...]
    models: Mapping[str, ServedModel] = field(default_factory=dict)  # frozen; also adapters
    loop: str = ""  # "sync", "one_step_off", "fully_async"; "" of a supervised job

    def __iter__(self) -> Iterator[Role]:
        return iter(self.roles)

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def __getitem__(self, name: str) -> Role:
        role = self.find(name)
        if role is None:
            raise KeyError(name)
        return role

    def find(self, name: str) -> Role | None:
        """Return the role of a name, if the run has it."""
        return next((role for role in self.roles if role.name == name), None)

    def find_servers(self, name: str) -> Servers | None:
        """Return the servers of a name, if the run has them."""
        return next((servers for servers in self.servers if servers.name == name), None)

    def get_pool(self, name: str) -> Pool:
        """Return the pool of a role or of servers."""
        part = self.find(name) or self.find_servers(name)
        if part is None:
            raise KeyError(name)
        return next(pool for pool in self.pools if pool.name == part.pool)

    @property
    def pool_names(self) -> dict[str, str]:
        """Name of the pool of each role, and of the servers."""
        roles = {role.name: role.pool for role in self.roles}
        return roles | {servers.name: servers.pool for servers in self.servers}

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def servers_sleep(self) -> bool:
        """Return whether the policy's servers leave their devices to other roles."""
        return len(self.get_pool(ROLLOUT).roles) > 1

    def takes_turns(self, role: str) -> bool:
        """Return whether a role leaves its devices to others."""
        return len(self.get_pool(role).roles) > 1


def plan_run(config: RLConfig) -> RunPlan:
    """Return the plan of an RL run."""
    models = {
        name: replace(model, path=model.path or config.model.path)
        for name, model in build_served_models(config).items()
    }
    roles = tuple(_list_roles(config))
    servers = tuple(_list_servers(config, models))
    return RunPlan(roles, servers, _build_pools(roles, servers), models, get_loop(config.trainer))


def plan_evaluation(config: RLConfig, num_samples: int | None = None) -> RunPlan:
    """Return the plan of the servers of a run alone.

    Args:
        num_samples: Responses of the largest set. None: not known yet.
    """
    share = None if num_samples is None else -(-num_samples // config.rollout.num_servers)
    servers = tuple(replace(s, num_sequences=share) for s in _list_servers(config, {}))
    return RunPlan((), servers, _build_pools((), servers))


def plan_supervised(config: TrainConfig) -> RunPlan:
    """Return the plan of sft, dpo or rm: the model, and dpo's reference if it has one."""
    has_own_pool = isinstance(config, DPOConfig) and config.reference.placement == OWN_POOL
    data = get_data_config(config)
    spec = EngineSpec(
        model=config.model,
        engine=config.engine,
        seed=config.seed,
        timeout_s=config.inner_timeout_s,
        images_folder=get_images_folder(data, config.output_dir)
        if isinstance(data, ConversationsConfig)
        else "",
    )
    loss = negative_log_likelihood if isinstance(config, SFTConfig) else linear_in_scores
    kind = "reward_model" if isinstance(config, RMConfig) else "language_model"
    model = Role(MODEL, "engine", "updates", MODEL, spec, kind)
    roles = [model.make_trainable(config.trainer.num_steps, lambda: loss)]
    if _has_reference_model(config):
        pool = REFERENCE if has_own_pool else MODEL
        spec = replace(spec, engine=_freeze(config.engine))
        roles.append(Role(REFERENCE, "engine", "log-probs for the loss", pool, spec))
    return RunPlan(tuple(roles), (), _build_pools(roles, ()))


def needs_reference_log_probs(config: RLConfig | TrainConfig) -> bool:
    """Return whether a job reads log-probs of a reference: a KL penalty, or the loss of dpo."""
    if isinstance(config, RLConfig):
        return bool(config.algorithm.kl_coef)
    if not isinstance(config, DPOConfig):
        return False
    return "reference_log_probs" in get_needs(PREFERENCE_LOSSES[config.loss])


def _has_reference_model(config: RLConfig | TrainConfig) -> bool:
    """Return whether a job has a separate reference model.

    A LoRA model without its adapters is the reference.
    """
    engine = config.actor if isinstance(config, RLConfig) else config.engine
    return needs_reference_log_probs(config) and not engine.lora.rank


def _list_roles(config: RLConfig) -> Iterator[Role]:
    """Yield the roles with a training engine, in the order in which they start."""
    spec = EngineSpec(
        model=config.model,
        engine=config.actor,
        seed=config.seed,
        timeout_s=config.inner_timeout_s,
        images_folder=get_images_folder(config.data, config.output_dir),
    )

    def build(
        name: str,
        key: str,
        task: str,
        *,
        path: str = "",
        beside: str = "",
        model_type: str = "language_model",
        **changes: Any,
    ) -> Role:
        """Build a frozen role; one `beside` another is on that one's devices."""
        model = replace(config.model, path=path or config.model.path)
        pool = _name_pool(config, beside or name)
        return Role(name, key, task, pool, replace(spec, model=model, **changes), model_type)

    algorithm, num_steps = config.algorithm, config.trainer.num_steps
    has_critic = "values" in get_needs(ADVANTAGES[algorithm.advantage])
    if warm_steps := config.warm_start.num_steps:
        engine, task = _build_warm_engine(config), "supervised training"
        role = build(WARM_START, WARM_START, task, beside=ACTOR, engine=engine)
        yield role.make_trainable(warm_steps, lambda: negative_log_likelihood)
    # While only the critic trains, the actor takes no steps; its schedule has at least one.
    skipped = config.critic.warmup_steps if has_critic else 0
    squares = reads_squares(algorithm)
    role = build(ACTOR, ACTOR, "log-probs, updates", with_sum_pi_squared=squares)
    yield role.make_trainable(
        max(num_steps - skipped, 1) * algorithm.num_mini_batches,
        lambda: load_trainer(config.trainer.mode).build_loss(config),
    )
    if _has_reference_model(config):
        yield build(REFERENCE, ACTOR, "log-probs for the KL", engine=_freeze(config.actor))
    if has_critic:
        path, clip = config.critic.model_path, ValueClipSettings(config.critic.clip_range)
        kind, engine = "value_model", config.critic
        role = build(CRITIC, CRITIC, "values, updates", path=path, model_type=kind, engine=engine)
        num_updates = num_steps * algorithm.num_mini_batches
        yield role.make_trainable(num_updates, lambda: partial(value_clip, settings=clip))
    if path := config.reward_model.model_path:
        task, kind, engine = "scores of responses", "reward_model", config.reward_model
        yield build(REWARD_MODEL, REWARD_MODEL, task, path=path, model_type=kind, engine=engine)
    distillation = algorithm.distillation
    top_k = distillation.top_k if distillation.loss in TOP_TOKEN_LOSSES else 0
    for name, teacher in build_teachers(config.teacher).items():
        yield build(
            f"{TEACHER_PREFIX}{name}",
            f"teacher.models.{name}",
            "log-probs to learn from",
            path=teacher.model_path,
            engine=teacher.engine,
            num_top_log_probs=top_k,
        )


def _build_warm_engine(config: RLConfig) -> EngineConfig:
    """Return the settings of the actor's engine during the warm start, which trains no adapters."""
    warm = config.warm_start
    return replace(
        config.actor,
        layout=warm.layout,
        optimizer=warm.optimizer,
        moe=replace(config.actor.moe, aux_loss_coef=warm.moe_aux_loss_coef, router_replay="off"),
        lora=LoRAConfig(),
        indexer_replay="off",
    )


def _freeze(engine: EngineConfig) -> EngineConfig:
    """Return the settings of a reference: no adapters, and neither experts nor keys recorded."""
    moe = replace(engine.moe, router_replay="off")
    return replace(engine, lora=LoRAConfig(), moe=moe, indexer_replay="off")


def _list_servers(config: RLConfig, models: Mapping[str, ServedModel]) -> Iterator[Servers]:
    """Yield the policy's servers, then those of each frozen model that is no adapter on them."""
    adapters = ", ".join(f"{ROLE}{name}" for name, model in models.items() if model.adapter)
    task = f"generation, {adapters}" if adapters else "generation"
    pool = _name_pool(config, ROLLOUT)
    contexts = [model.max_context for model in models.values() if model.adapter]
    longest = max([config.max_sequence_tokens, *contexts])
    # A trajectory has one with the policy, and one with each adapter that it talks to.
    num = _count_sequences(config, config.rollout.num_servers) * (1 + len(contexts))
    yield Servers(ROLLOUT, task, pool, config.model, config.rollout, longest, num)
    for name, model in models.items():
        if not model.adapter:
            role = f"{ROLE}{name}"
            frozen, servers = replace(config.model, path=model.path), model.servers
            num = _count_sequences(config, servers.num_servers)
            yield Servers(role, "frozen", role, frozen, servers, model.max_context, num)


def _count_sequences(config: RLConfig, num_servers: int) -> int:
    """Return the most trajectories of a server at once, in training and evaluation.

    Whole groups go to a server. With trainer.eval_samples=0 held-out rows do not count:
    `limit_evaluation` sets how many there are, once they are read.
    """
    num_sampled = -(-count_groups(config) // num_servers) * config.algorithm.group_size
    if not (list_test_files(config.data) or config.task.name):
        return num_sampled
    num_held_out = -(-config.trainer.eval_samples // num_servers) * config.evaluation.num_samples
    is_async = get_loop(config.trainer) == "fully_async"
    return num_sampled + num_held_out if is_async else max(num_sampled, num_held_out)


def count_groups(config: RLConfig) -> int:
    """Return the most prompts of training that all servers generate for at once."""
    trainer, asynchronous = config.trainer, config.trainer.asynchronous
    groups = max(trainer.prompts_per_step, config.algorithm.filter.prompts_per_round)
    if get_loop(trainer) == "fully_async":
        groups *= 1 + get_staleness(trainer)
        groups += count_extra_groups(asynchronous.oversampling, trainer.prompts_per_step)
        groups = asynchronous.max_groups or groups
    return groups


def _name_pool(config: RLConfig, role: str) -> str:
    """Return the name of a role's pool; a pool of one role has the role's name."""
    pool = get_pool(config.placement, role)
    return role if pool == OWN_POOL else f"{pool} pool"


def _build_pools(roles: Sequence[Role], servers: Sequence[Servers]) -> tuple[Pool, ...]:
    """Return the pools, each as large as its largest role.

    On a pool of their own, servers have one bundle per server and node, which Ray places on one
    node; on a shared pool a server takes as many bundles as it has workers.
    """
    members: dict[str, list[Role | Servers]] = {}
    parts: list[Role | Servers] = [*roles, *servers]
    for part in parts:
        members.setdefault(part.pool, []).append(part)
    pools = []
    for name, shared in members.items():
        names = tuple(part.name for part in shared if part.name != WARM_START)
        first = shared[0]
        if isinstance(first, Servers) and len(shared) == 1:
            per_bundle = first.settings.workers_per_node
            pools.append(Pool(name, names, first.num_workers // per_bundle, per_bundle))
        else:
            sizes = [
                part.num_workers if isinstance(part, Servers) else part.layout.world_size
                for part in shared
            ]
            pools.append(Pool(name, names, max(sizes)))
    return tuple(pools)
