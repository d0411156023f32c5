"""Every rule between the settings of a run, checked before a process is started. Pure.

Those of the algorithm, of a training engine and of generation are in the files beside this one. A
rule that fails raises ConfigError naming the setting, its value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from mcore_rl.config.allowed import MODES
from mcore_rl.config.checks import check_at_least, check_between, check_values
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path, load_user_function
from mcore_rl.config.limits import OneOf, check_limit, check_limits
from mcore_rl.config.rules_algorithm import (
    fill_correction_level,
    validate_algorithm,
    validate_frozen_models,
)
from mcore_rl.config.rules_engine import (
    validate_engine,
    validate_float8_dtype,
    validate_layout,
    validate_optimizer,
    validate_overlap_dtype,
    validate_plain_engine,
    validate_schedule,
)
from mcore_rl.config.rules_rollout import (
    validate_agent,
    validate_batches_on_device,
    validate_drafts,
    validate_evaluation,
    validate_quantized_dtype,
    validate_reward,
    validate_served_models,
    validate_servers,
    validate_truncation,
)
from mcore_rl.config.schema import (
    AnyData,
    AsynchronousConfig,
    DataConfig,
    Layout,
    OptimizerConfig,
    PlacementConfig,
    ProfileConfig,
    RLConfig,
    TrainConfig,
    TrainerConfig,
    WeightSyncConfig,
)

TRANSFORMERS = "transformers"  # model.family for every architecture of transformers
DTYPE_OF_DEVICE = {"cpu": "float32", "cuda": "bfloat16"}
# Largest and mean gap of log-probs between trainer and servers, in nats, where a run sets none.
LOGPROB_GAPS = {"float32": (0.5, 1e-4), "bfloat16": (2.0, 0.1)}
# The largest in bfloat16 where trainer and servers route a token each by themselves: rounding tips
# a router near a tie, and that token differs by nats (2.3 in 3 steps of the quickstart's model).
ROUTED_LOGPROB_GAP = 20.0
# With rollout.quantization or actor.fp8: one side rounds weights and activations to 4 significant
# bits, bfloat16 to 8. The policies differ by more than rounding, and correction weights account
# for that.
FLOAT8_LOGPROB_GAPS = (20.0, 0.5)
OWN_POOL = "own"
MAX_PROFILES = 64  # traces of a model
DEFAULT_STALENESS = {"sync": 0, "one_step_off": 1, "fully_async": 2}


def validate_rl(config: RLConfig, *, needs_data: bool = True) -> None:
    """Check every setting that needs no file; without `needs_data` sources of data may be unset."""
    check_values(config)
    check_limits("", config)
    validate_evaluation(config)
    has_sets = bool(list_test_files(config.data) or config.task.name)
    validate_held_out(config, has_sets=has_sets)
    validate_trackers(config.trainer.trackers)
    if config.weight_sync.bind_address in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"weight_sync.bind_address={config.weight_sync.bind_address!r}: servers connect to it; "
            "allowed: 'auto', or an address of rank 0's machine that they reach"
        )
    _validate_data(config.data)
    _validate_files(config, needs_data)
    validate_engine("actor", config.actor)
    _validate_replay(config)
    validate_servers(config.rollout)
    stops = {"rollout.stop": config.rollout.stop, "evaluation.stop": config.evaluation.stop or []}
    validate_agent(config.agent, stops)
    validate_truncation(config)
    validate_drafts(config)
    validate_reward(config.reward)
    _validate_weight_sync(config)
    validate_mode(config)
    _validate_placement(config)
    is_quantized = config.rollout.quantization is not None
    validate_algorithm(config.algorithm, get_staleness(config.trainer), is_quantized=is_quantized)
    _validate_batch(config)
    actor_steps = config.trainer.num_steps * config.algorithm.num_mini_batches
    validate_schedule("actor.optimizer", config.actor.optimizer, actor_steps)
    validate_plain_engine("critic", config.critic)
    validate_frozen_models(config)
    validate_served_models(config)
    _validate_warm_start(config)


def _validate_replay(config: RLConfig) -> None:
    """Check that the experts and keys to replay are there wherever samples are trained on."""
    replay, share = config.actor.moe.router_replay, config.algorithm.filter.replay.share
    if replay == "rollout" and share:
        raise ConfigError(
            f"algorithm.filter.replay.share={share} with actor.moe.router_replay='rollout': the "
            "experts of samples of earlier steps are not kept; allowed: 0, or router_replay='off'"
        )
    for key, mode in (
        ("actor.moe.router_replay", replay),
        ("actor.indexer_replay", config.actor.indexer_replay),
    ):
        if mode == "record" and config.algorithm.correction.use_rollout_log_probs:
            raise ConfigError(
                f"{key}='record' records while log-probs are computed, and "
                "algorithm.correction.use_rollout_log_probs=true computes none; allowed: 'off'"
            )


def _validate_warm_start(config: RLConfig) -> None:
    warm = config.warm_start
    if warm.num_steps:
        validate_layout("warm_start.layout", warm.layout)
        validate_optimizer("warm_start.optimizer", warm.optimizer)
        validate_schedule("warm_start.optimizer", warm.optimizer, warm.num_steps)


def resolve_for_device_type(
    config: RLConfig, device_type: str, *, has_experts: bool = False
) -> RLConfig:
    """Return the settings with the defaults that the device type and the kind of model decide.

    Args:
        device_type: "cuda" or "cpu": the device of the ranks.
        has_experts: Whether the model is a mixture of experts.

    Raises:
        ConfigError: The device type cannot do what the settings say.
    """
    config = replace(config, placement=resolve_placement(config))
    is_shared = are_colocated(config.placement, "actor", "rollout")
    if device_type == "cuda" and config.weight_sync.method == "colocated" and not is_shared:
        raise ConfigError(
            "weight_sync.method='colocated': trainer and servers are on different GPUs "
            f"(placement.actor={config.placement.actor!r}, "
            f"placement.rollout={config.placement.rollout!r}); allowed: a pool for both, or "
            "weight_sync.method='disaggregated', 'full_export'"
        )
    validate_batches_on_device(config, device_type)
    validate_profile(config, config.actor.layout, device_type)
    validate_profile_steps(config.profile, config.trainer.num_steps)
    staleness = get_staleness(config.trainer)
    dtype = config.model.dtype if config.model.dtype != "auto" else DTYPE_OF_DEVICE[device_type]
    for key in ("actor", "critic", "reward_model", "teacher"):
        validate_overlap_dtype(key, getattr(config, key), dtype)
        validate_float8_dtype(key, getattr(config, key), dtype)
    trainer, (largest, mean) = replace(config.trainer, staleness=staleness), LOGPROB_GAPS[dtype]
    if has_experts and dtype == "bfloat16" and config.actor.moe.router_replay != "rollout":
        largest = ROUTED_LOGPROB_GAP
    if config.rollout.quantization is not None:
        validate_quantized_dtype(config.rollout, dtype)
    is_float8 = config.rollout.quantization is not None or config.actor.fp8.recipe != "off"
    if is_float8:
        largest, mean = FLOAT8_LOGPROB_GAPS
    if trainer.max_logprob_gap is None:
        trainer = replace(trainer, max_logprob_gap=largest)
    if trainer.mean_logprob_gap is None:
        trainer = replace(trainer, mean_logprob_gap=mean)
    is_off_policy = staleness > 0 or is_float8
    algorithm = fill_correction_level(config.algorithm, is_off_policy=is_off_policy)
    if algorithm.loss_aggregation == "sequence_sum_fixed_length":
        length = {"length": config.rollout.response_limit}
        settings = length | algorithm.loss_aggregation_settings
        algorithm = replace(algorithm, loss_aggregation_settings=settings)
    model = replace(config.model, dtype=dtype)
    return replace(config, model=model, trainer=trainer, algorithm=algorithm)


def validate_profile(config: RLConfig | TrainConfig, layout: Layout, device_type: str) -> None:
    """Check the settings of profiles of a model with a layout, on "cuda" or "cpu"."""
    profile = config.profile
    for index, rank in enumerate(profile.ranks):
        check_between(f"profile.ranks[{index}]", rank, 0, layout.world_size - 1)
    for name, values in (("steps", profile.steps), ("ranks", profile.ranks)):
        if len({*values}) < len(values):
            raise ConfigError(f"profile.{name}={values}: a number is there twice; allowed: once")
    if profile.steps and not profile.ranks:
        raise ConfigError("profile.ranks=[] profiles nothing; allowed: ranks of the trained model")
    if (num := len(profile.steps) * len(profile.ranks)) > MAX_PROFILES:
        raise ConfigError(
            f"profile.steps and profile.ranks make {num} traces of each model; allowed: up to "
            f"{MAX_PROFILES}"
        )
    if profile.memory and device_type == "cpu":
        raise ConfigError(
            "profile.memory=true: torch records the memory of CUDA's allocator alone, and the ranks"
            " compute on CPUs; allowed: false"
        )
    if profile.memory and not profile.steps:
        raise ConfigError("profile.memory=true without profile.steps; allowed: steps to profile")


def validate_profile_steps(profile: ProfileConfig, num_steps: int) -> None:
    """Raise ConfigError for a profiled step beyond the last one of the run."""
    if profile.steps and max(profile.steps) > num_steps:
        raise ConfigError(
            f"profile.steps={profile.steps}; allowed: the run's steps 1 to {num_steps}"
        )


def validate_trackers(trackers: Sequence[str]) -> None:
    """Check that each tracker is named once."""
    if len(set(trackers)) < len(trackers):
        raise ConfigError(f"trainer.trackers={list(trackers)}; allowed: each once")


def validate_held_out(config: RLConfig | TrainConfig, *, has_sets: bool) -> None:
    """Refuse settings of evaluations without a held-out set, or at other steps.

    A checkpoint can be the best by an evaluation if there is one at its step.
    """
    reads_sets = {
        f"evaluation.every={config.evaluation.every}": config.evaluation.every > 0,
        f"checkpoint.keep_best={config.checkpoint.keep_best!r}": (
            config.checkpoint.keep_best.removeprefix("-").startswith("eval/")
        ),
    }
    for setting, reads in reads_sets.items():
        if reads and not has_sets:
            raise ConfigError(f"{setting} needs data.test_file or data.test_files")
    best, every = config.checkpoint.keep_best, config.evaluation.every
    save = config.trainer.save_every
    if best.removeprefix("-").startswith("eval/") and save and (not every or save % every):
        raise ConfigError(
            f"checkpoint.keep_best={best!r}: trainer.save_every={save} saves steps without an "
            f"evaluation (evaluation.every={every}); allowed: evaluation.every above 0 that "
            "divides trainer.save_every"
        )


def _validate_data(config: DataConfig) -> None:
    validate_sources(config)
    curriculum, weights = config.curriculum, config.train_weights
    if curriculum.name and weights:
        raise ConfigError(
            f"data.curriculum.name={curriculum.name!r} and data.train_weights={weights} both say "
            "how often a prompt is drawn; allowed: one of the two"
        )


def validate_sources(config: AnyData) -> None:
    """Check that training and held-out data are each named once, and that weights fit the files."""
    files, weights = config.train_files, config.train_weights
    if files and config.train_file:
        raise ConfigError(
            f"data.train_file={config.train_file!r} and data.train_files={files}; allowed: one of "
            "the two"
        )
    if weights and len(weights) != len(files):
        raise ConfigError(
            f"data.train_weights={weights}: {len(files)} files in data.train_files; allowed: a "
            "weight for each of them, or []"
        )
    if config.test_files and config.test_file:
        raise ConfigError(
            f"data.test_file={config.test_file!r} and data.test_files={config.test_files}; "
            "allowed: one of the two"
        )


def list_train_files(config: AnyData) -> dict[str, str]:
    """Return the sources that are trained on, by setting."""
    several = {f"data.train_files[{i}]": name for i, name in enumerate(config.train_files)}
    return several or {"data.train_file": config.train_file}


def list_test_files(config: AnyData) -> dict[str, tuple[str, str]]:
    """Return setting and source of each held-out set, by its name."""
    several = config.test_files
    sources = {name: (f"data.test_files.{name}", file) for name, file in several.items()}
    if config.test_file:
        sources["test"] = "data.test_file", config.test_file
    return sources


def _validate_files(config: RLConfig, needs_data: bool) -> None:
    data = config.data
    made_by_task = {"model.path": config.model.path}
    made_by_task["data.train_file"] = data.train_file or ", ".join(data.train_files)
    if config.warm_start.num_steps:
        made_by_task["warm_start.train_file"] = config.warm_start.train_file
    test = {"data.test_file": data.test_file or ", ".join(data.test_files)}
    for key, value in (made_by_task | test).items():
        if config.task.name and value:
            raise ConfigError(
                f"{key}={value!r}: task.name={config.task.name!r} makes its own; allowed: ''"
            )
        is_needed = key not in test and (needs_data or key == "model.path")
        if not config.task.name and not value and is_needed:
            raise ConfigError(f"{key}='' names nothing; it is needed when task.name is empty")


def are_colocated(placement: PlacementConfig, *roles: str) -> bool:
    """Return whether these roles share a pool of devices."""
    pools = {get_pool(placement, role) for role in roles}
    return len(pools) == 1 and OWN_POOL not in pools


def get_pool(placement: PlacementConfig, role: str) -> str:
    """Return the pool of a role; that of teacher.math is that of teacher."""
    pool: str = getattr(placement, role.partition(".")[0])
    return pool


def resolve_placement(config: RLConfig) -> PlacementConfig:
    """Return the placement, with the pool of the servers decided."""
    if config.placement.rollout != "auto":
        return config.placement
    is_async = get_loop(config.trainer) != "sync"
    has_own_pool = is_async or config.weight_sync.method == "disaggregated"
    return replace(config.placement, rollout=OWN_POOL if has_own_pool else "shared")


def _validate_placement(config: RLConfig) -> None:
    placement = resolve_placement(config)
    other_roles = asdict(placement).keys() - {"rollout"}
    colocated = sorted(role for role in other_roles if are_colocated(placement, "rollout", role))
    if colocated and get_loop(config.trainer) == "one_step_off":
        raise ConfigError(
            f"placement.rollout={config.placement.rollout!r} has the servers on the pool of "
            f"{', '.join(colocated)}; trainer.mode='one_step_off' trains while they generate; "
            "allowed: placement.rollout='own', or a pool of no other role"
        )
    is_shared = are_colocated(placement, "actor", "rollout")
    if is_shared and config.weight_sync.method == "disaggregated":
        raise ConfigError(
            f"placement.rollout={config.placement.rollout!r}: the servers are on the actor's "
            "devices, where weight_sync.method='disaggregated' has no part; allowed: "
            "placement.rollout='own', or weight_sync.method='colocated', 'full_export'"
        )


def _validate_adapters(config: RLConfig) -> None:
    """Check what servers that get adapters alone need."""
    for setting, is_allowed, allowed in (
        (f"actor.lora.rank={config.actor.lora.rank}", config.actor.lora.rank, "above 0"),
        (
            f"rollout.load_format={config.rollout.load_format!r}",
            config.rollout.load_format != "dummy",
            "'auto', 'checkpoint'",
        ),
        (
            f"trainer.mode={config.trainer.mode!r}",
            get_loop(config.trainer) != "fully_async",
            "another loop, or rollout.lora='merged': running requests keep their adapter",
        ),
        (
            f"rollout.nodes_per_server={config.rollout.nodes_per_server}",
            config.rollout.nodes_per_server == 1,
            "1, or rollout.lora='merged'",
        ),
        (
            f"rollout.dp={config.rollout.dp}",
            config.rollout.dp == 1,
            "1, or rollout.lora='merged': adapters have not run on data-parallel ranks",
        ),
    ):
        if not is_allowed:
            raise ConfigError(f"rollout.lora='adapter' with {setting}; allowed: {allowed}")


def _validate_weight_sync(config: RLConfig) -> None:
    method, transport = config.weight_sync.method, config.weight_sync.transport
    if method != "disaggregated" and transport != WeightSyncConfig.transport:
        raise ConfigError(
            f"weight_sync.transport={transport!r} has no part in weight_sync.method={method!r}; "
            "allowed: weight_sync.method='disaggregated'"
        )
    if config.rollout.lora == "adapter":
        _validate_adapters(config)
    if method == "full_export" and config.rollout.load_format == "dummy":
        raise ConfigError(
            "rollout.load_format='dummy': vLLM's own loader, which reads what "
            "weight_sync.method='full_export' writes, does not check that all weights are there; "
            "allowed: 'auto', 'checkpoint', or another method"
        )
    num_workers = config.rollout.num_servers * config.rollout.num_workers
    num_ranks = config.actor.layout.world_size
    if method == "colocated" and num_workers > num_ranks:
        raise ConfigError(
            "weight_sync.method='colocated': rollout.num_servers * rollout.dp * rollout.tp = "
            f"{num_workers} workers of servers share the devices of actor.layout's {num_ranks} "
            "ranks; allowed: at most as many workers, or weight_sync.method='disaggregated'"
        )


def validate_mode(config: RLConfig) -> None:
    """Check trainer.mode, trainer.staleness and the settings of asynchronous training."""
    trainer, loop = config.trainer, get_loop(config.trainer)
    if waiting := trainer.asynchronous.max_waiting_samples:
        samples_per_step = trainer.prompts_per_step * config.algorithm.group_size
        check_at_least("trainer.asynchronous.max_waiting_samples", waiting, samples_per_step)
    if loop == "sync" and trainer.staleness:
        raise ConfigError(
            f"trainer.staleness={trainer.staleness}: trainer.mode={trainer.mode!r} trains on "
            "samples of the policy; allowed: 0, or trainer.mode='one_step_off', 'fully_async'"
        )
    if loop == "fully_async":
        _validate_fully_async(config)
        return
    check_between("trainer.staleness", get_staleness(trainer), 0, 1)
    if trainer.asynchronous != AsynchronousConfig():
        raise ConfigError(
            f"trainer.asynchronous has no part in trainer.mode={trainer.mode!r}; allowed: its "
            "defaults, or trainer.mode='fully_async'"
        )


def get_loop(trainer: TrainerConfig) -> str:
    """Return the loop of this package whose rules hold: trainer.mode, or that of a user's trainer.

    A trainer by import path names it as its attribute `mode`.

    Raises:
        ConfigError: There is no such loop, or the import path leads nowhere.
    """
    if not is_import_path(trainer.mode):
        check_limit("trainer.mode", trainer.mode, OneOf(*MODES, contract="RLTrainer"))
        return trainer.mode
    loop = getattr(load_user_function("trainer.mode", trainer.mode), "mode", None)
    if loop not in MODES:
        raise ConfigError(
            f"trainer.mode={trainer.mode!r} has mode={loop!r}; allowed: a subclass of "
            f"mcore_rl.RLTrainer, with one of {', '.join(MODES)}"
        )
    return str(loop)


def get_staleness(config: TrainerConfig) -> int:
    """Return by how many versions samples may be older than the policy."""
    if config.staleness is not None:
        return config.staleness
    return DEFAULT_STALENESS[get_loop(config)]


def count_extra_groups(oversampling: float, prompts_per_step: int) -> int:
    """Return the groups to begin beyond those of a step: a share of a step, rounded up."""
    return math.ceil(round(oversampling * prompts_per_step, 9))  # 0.07 of 100 is 7


def _validate_fully_async(config: RLConfig) -> None:
    asynchronous, algorithm = config.trainer.asynchronous, config.algorithm
    mode = "trainer.mode='fully_async'"
    if asynchronous.oversampling and not get_staleness(config.trainer):
        raise ConfigError(
            f"trainer.asynchronous.oversampling={asynchronous.oversampling} with "
            "trainer.staleness=0: groups that a step leaves are too old for the next; allowed: 0, "
            "or staleness above 0"
        )
    is_uncut = algorithm.loss == "decoupled_ppo" and not algorithm.loss_settings.get("weight_cap")
    if is_uncut and get_staleness(config.trainer):
        raise ConfigError(
            f"algorithm.loss='decoupled_ppo' with {mode} and no weight_cap in "
            "algorithm.loss_settings: training collapses by weights of old samples without a "
            "bound; allowed: weight_cap above 0, such as 5"
        )
    if algorithm.filter.prompts_per_round:
        raise ConfigError(
            f"algorithm.filter.prompts_per_round={algorithm.filter.prompts_per_round}: {mode} "
            "generates in no rounds; allowed: 0"
        )
    if config.reward.shuffle and algorithm.filter.group_filter:
        raise ConfigError(
            f"reward.shuffle=true with {mode} and algorithm.filter.group_filter="
            f"{algorithm.filter.group_filter!r}: groups are filtered as they come, before "
            "rewards could be permuted over a step; allowed: group_filter=''"
        )


def _validate_batch(config: RLConfig) -> None:
    prompts, mini_batches = config.trainer.prompts_per_step, config.algorithm.num_mini_batches
    if prompts % mini_batches:
        raise ConfigError(
            f"algorithm.num_mini_batches={mini_batches} does not divide "
            f"trainer.prompts_per_step={prompts}"
        )
    samples = prompts // mini_batches * config.algorithm.group_size
    for role, engine in (("actor", config.actor), ("critic", config.critic)):
        if samples % (dp := engine.layout.dp):
            raise ConfigError(
                f"{role}.layout.dp={dp} does not divide the {samples} samples of a mini-batch "
                f"(trainer.prompts_per_step / algorithm.num_mini_batches * algorithm.group_size)"
            )
    warm = config.warm_start
    if warm.num_steps and warm.batch_size % warm.layout.dp:
        raise ConfigError(
            f"warm_start.layout.dp={warm.layout.dp} does not divide "
            f"warm_start.batch_size={warm.batch_size}"
        )


def list_warnings(config: RLConfig) -> Iterator[str]:
    """Yield a line for each setting that is valid but probably a mistake."""
    data, warm, trainer = config.data, config.warm_start, config.trainer
    for key, file in list_test_files(data).values():
        if file in (data.train_file, *data.train_files):
            where = "data.train_file" if data.train_file else "in data.train_files"
            yield f"{key}={file!r} is {where}: evaluations are of training data"
    if warm.train_file and not warm.num_steps:
        yield (
            f"warm_start.train_file={warm.train_file!r} is not read: warm_start.num_steps=0 "
            "disables supervised training"
        )
    if config.reward.shuffle:
        yield "reward.shuffle=true: a control experiment, in which rewards have no signal"
    yield from list_checkpoint_warnings(config)
    steps = trainer.num_steps * config.algorithm.num_mini_batches
    yield from list_optimizer_warnings("actor.optimizer", config.actor.optimizer, steps)
    if warm.num_steps:
        yield from list_optimizer_warnings("warm_start.optimizer", warm.optimizer, warm.num_steps)


def list_checkpoint_warnings(config: RLConfig | TrainConfig) -> Iterator[str]:
    """Yield a line for each setting of checkpoints that a run without them does not read."""
    if config.trainer.save_every:
        return
    unused: dict[str, object] = {
        "checkpoint.keep_best": config.checkpoint.keep_best,
        "checkpoint.async_save": config.checkpoint.async_save,
        "resume": config.resume if config.resume == "auto" else "",
    }
    for key, value in unused.items():
        if value:
            yield f"{key}={value!r}: trainer.save_every=0 writes no training checkpoints"


def list_optimizer_warnings(key: str, config: OptimizerConfig, num_steps: int) -> Iterator[str]:
    """Yield a line for each setting of an optimizer that has no effect in `num_steps` updates."""
    if config.warmup_steps >= num_steps > 0:
        yield (
            f"{key}.warmup_steps={config.warmup_steps}: all {num_steps} steps are warm-up "
            f"to {key}.lr={config.lr}"
        )
    if config.schedule == "constant" and config.min_lr:
        yield f"{key}.min_lr={config.min_lr} has no effect with {key}.schedule='constant'"
