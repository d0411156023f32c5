"""Checks of all inputs of an RL run, before a process group or a server starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.agents.chat_template.codec import parse_messages
from mcore_rl.algorithms.advantages import ADVANTAGES, GDPOSettings
from mcore_rl.algorithms.sample_choice import CURRICULA, GROUP_FILTERS, DropUniformSettings
from mcore_rl.checkpoint.hf import CheckpointReader, has_weights, read_checkpoint_config
from mcore_rl.checkpoint.peft import check_adapter, get_adapted_linear
from mcore_rl.config.checks import check_choice
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import list_test_files, list_train_files
from mcore_rl.config.rules_algorithm import TOP_TOKEN_LOSSES, build_teachers
from mcore_rl.config.rules_engine import validate_schedule
from mcore_rl.config.rules_rollout import REWARDED_LOOPS, list_reward_terms
from mcore_rl.config.schema import (
    AlgorithmConfig,
    DataConfig,
    DistillationConfig,
    EngineConfig,
    ModelConfig,
    MoEConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    TeacherConfig,
)
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, load_prompts, load_supervised
from mcore_rl.data.examples import load_chats
from mcore_rl.data.files import open_rows
from mcore_rl.data.images import RowImages, load_row_images
from mcore_rl.data.prepared_task import get_task_paths
from mcore_rl.data.rows import RowColumn
from mcore_rl.data.tokenizer import (
    check_tokenizer_matches,
    has_tokenizer,
    load_tokenizer,
    read_stop_ids,
    read_tokenizer,
)
from mcore_rl.engine.base import load_backend
from mcore_rl.examples.tasks.registry import TASKS
from mcore_rl.inference.kv_cache import count_token_bytes
from mcore_rl.inference.registry import check_adapter_rank, check_server_settings, load_server_class
from mcore_rl.jobs.early_checks import require_rows, warn_of_few_rows
from mcore_rl.jobs.placement import detect_device_type
from mcore_rl.jobs.quantization_preflight import check_quantization
from mcore_rl.jobs.run_plan import ACTOR, CRITIC, REWARD_MODEL, WARM_START, Role, RunPlan
from mcore_rl.models.base import (
    SEQUENCE,
    HFConfig,
    get_family,
    get_field,
    get_frozen_prefixes,
    pad_vocab_size,
    read_config,
)
from mcore_rl.models.heads import build_value_config, get_value_head_suffix, map_model_weights
from mcore_rl.models.rope import count_positions
from mcore_rl.observability.trackers import check_trackers
from mcore_rl.reshard.rules import list_logical_tensors, parse_slice
from mcore_rl.rewards.manager import (
    RewardManager,
    build_answer_check,
    check_columns,
    check_judge_models,
)
from mcore_rl.rewards.registry import get_parts
from mcore_rl.trainers.policy_loss import check_functions, check_greedy
from mcore_rl.weight_sync.shared_memory import check_allocator
from mcore_rl.weight_sync.transport import check_transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mcore_rl.agents.chat_template.validation import CodecKind

_CRITIC_AGGREGATIONS = "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The loaded and checked inputs of an RL run."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    tests: dict[str, PromptDataset]  # held-out sets, by name
    examples: Batch | None  # warm-start examples: all, or as many as a dry run checks
    num_examples: int  # rows of warm_start.train_file
    images: RowImages | None = None  # reader of the images of data rows


def check_inputs(config: RLConfig, plan: RunPlan) -> Inputs:
    """Load the data; check models, layouts and names.

    Raises:
        ConfigError: An input or a setting is wrong.
    """
    _check_choices(config, plan)
    _check_weights(config, plan)
    return _load_data(config, plan)


def _check_weights(config: RLConfig, plan: RunPlan, device_type: str = "") -> None:
    check_model(config, plan, device_type)
    _check_frozen_models(config, plan)
    _check_served_models(config.model, plan)


def check_model(config: RLConfig, plan: RunPlan, device_type: str = "") -> None:
    """Check the layouts and the weights of the policy, which may only be served."""
    check_layouts(config, plan, device_type)
    reader = CheckpointReader(config.model.path)
    hf_config = reader.read_config()  # without MTP layers if the weights have none
    if ACTOR in plan:
        load_backend(config.actor, "actor").check_model("actor", config.actor, hf_config)
    weights = get_family(hf_config).weights(hf_config, pad_vocab_size(hf_config, 1))
    reader.check(list_logical_tensors(weights))


def check_existing_inputs(
    config: RLConfig, plan: RunPlan, device_type: str, num_checked: int | None = None
) -> Inputs | None:
    """Check the inputs for a dry run, where weights, tokenizer and data may be missing.

    Args:
        device_type: "cuda" or "cpu".
        num_checked: Rows of each file to check. None: all.

    Returns:
        The inputs; None without a tokenizer or with an unset data source. Data files that are set
        are then only opened.
    """
    _check_choices(config, plan, device_type)
    if has_weights(config.model.path):
        _check_weights(config, plan, device_type)
    else:
        check_layouts(config, plan, device_type)
    has_files = has_weights(config.model.path) or has_tokenizer(config.model.path)
    if has_files and not list_unset_data(config):
        return _load_data(config, plan, num_checked)
    for setting, name in _list_data_files(config).items():
        if name:
            open_rows(name, setting)
    return None


def list_unset_data(config: RLConfig) -> list[str]:
    """Return the data settings that a run needs and that are empty."""
    return [setting for setting, name in _list_data_files(config).items() if not name]


def prepare_task(config: RLConfig, folder: Path, *, exists: bool = False) -> RLConfig:
    """Make the built-in task of config.task, if any; return settings with its model and data.

    Args:
        folder: The task is made in `folder`/task.
        exists: An earlier call has made the task there.
    """
    if not config.task.name:
        return config
    if exists:
        task = get_task_paths(folder / "task")
    else:
        task = TASKS[config.task.name](folder / "task", config.seed, config.task.worked_share)
    return replace(
        config,
        task=replace(config.task, name=""),
        model=replace(config.model, path=str(task.model_dir)),
        data=replace(config.data, train_file=str(task.train_file), test_file=str(task.test_file)),
        warm_start=replace(config.warm_start, train_file=str(task.warm_start_file)),
    )


def _check_choices(config: RLConfig, plan: RunPlan, device_type: str = "") -> None:
    """Check the functions, backends and parts that settings name: what needs no model."""
    check_functions(config.algorithm, config.agent.loop)
    check_greedy(config)
    check_servers(config, plan, device_type)
    if curriculum := config.data.curriculum.name:
        CURRICULA.bind(curriculum, config.data.curriculum.settings)
    check_trackers(config.trainer.trackers)
    lengths = config.rollout.response_limit, config.evaluation.max_response_tokens
    RewardManager(config.reward, min(filter(None, lengths)))  # checks names and settings
    check_judge_models(config.reward, plan.models)
    check_reward_parts(config)
    if config.weight_sync.method == "disaggregated":
        check_transport(config.weight_sync.transport)
    if (device_type or detect_device_type()) == "cuda" and config.weight_sync.method == "colocated":
        check_allocator()


def check_servers(config: RLConfig, plan: RunPlan, device_type: str = "") -> None:
    """Check what the run needs of its servers against the features of their backends."""
    device = device_type or detect_device_type()
    for name, model in plan.models.items():
        if not model.adapter:
            check_server_settings(model.servers, f"models.{name}", device=device)
    features = check_server_settings(config.rollout, device=device)
    servers = f"servers of rollout.backend={config.rollout.backend!r}"
    if not features.sleep and plan.servers_sleep:
        raise ConfigError(
            f"placement.rollout={config.placement.rollout!r}: {servers} cannot sleep while other "
            "roles use their devices; allowed: 'own', with weight_sync.method='disaggregated' or "
            "'full_export'"
        )
    if not features.updates_in_flight and plan.loop == "fully_async":
        raise ConfigError(
            f"trainer.mode={config.trainer.mode!r}: {servers} take no weights while they generate; "
            "allowed: 'sync', 'one_step_off'"
        )
    if not features.adapters and config.rollout.lora == "adapter":
        raise ConfigError(
            f"rollout.lora='adapter': {config.rollout.backend} takes no adapters; allowed: 'merged'"
        )
    if config.rollout.lora == "adapter":
        check_adapter_rank("actor.lora.rank", config.actor.lora.rank, config.rollout)
    if not features.routed_experts and config.actor.moe.router_replay == "rollout":
        raise ConfigError(
            f"actor.moe.router_replay='rollout': {servers} record no experts; allowed: 'off', "
            "'record'"
        )
    if (column := config.data.images_column) and not features.images:
        raise ConfigError(
            f"data.images_column={column!r}: {servers} take none; allowed: rollout.backend='vllm'"
        )
    if features.weight_format is None and config.weight_sync.method != "full_export":
        raise ConfigError(
            f"weight_sync.method={config.weight_sync.method!r}: {servers} take checkpoints only; "
            "allowed: 'full_export'"
        )


def _list_data_files(config: RLConfig) -> dict[str, str]:
    """Return all data sources of a run, by setting."""
    files = list_train_files(config.data) | dict(list_test_files(config.data).values())
    if config.warm_start.num_steps:
        files["warm_start.train_file"] = config.warm_start.train_file
    return files


def _load_data(config: RLConfig, plan: RunPlan, num_checked: int | None = None) -> Inputs:
    """Load tokenizer and data; check them against the model, the reward and the agent loop."""
    is_agent = config.agent.loop != "single_turn"
    tokenizer = load_tokenizer(config.model.path, config.model.chat_date, needs_template=is_agent)
    check_tokenizer_matches(tokenizer, get_field(read_config(config.model.path), "vocab_size"))
    if is_agent:
        from mcore_rl.agents.runner import check_agent, try_out  # imports HTTP clients

        stop_ids = read_stop_ids(config.model.path)
        check_agent(config.agent, tokenizer, plan.models, stop_ids)
    images = load_row_images(
        config.data, config.model.path, config.output_dir, config.rollout.max_images
    )
    load = partial(
        load_prompt_files,
        config=config,
        tokenizer=tokenizer,
        images=images,
        num_checked=num_checked,
    )
    train = load(list_train_files(config.data))
    tests = {name: load(dict([file])) for name, file in list_test_files(config.data).items()}
    examples, num_examples = _load_examples(config, tokenizer, images, num_checked)
    inputs = Inputs(tokenizer, train, tests, examples, num_examples, images)
    _check_row_counts(config, inputs)
    for prompts in (inputs.train, *inputs.tests.values()):
        check_columns(config.reward, prompts[0].fields)
    if is_agent:
        try_out(config.agent, inputs.train[0].fields)
    return inputs


def load_prompt_files(
    files: Mapping[str, str],
    config: RLConfig,
    tokenizer: PreTrainedTokenizerBase,
    images: RowImages | None = None,
    num_checked: int | None = None,
) -> PromptDataset:
    """Load the prompts of all sources.

    Args:
        files: Sources by the setting that names them.
        num_checked: Rows of each to check. None: all.
    """
    datasets = []
    loop = config.agent.loop
    check_chat = None if loop == "single_turn" else parse_messages
    check_answer = build_answer_check(config.reward) if loop in REWARDED_LOOPS else None
    for setting, name in files.items():
        prompts = load_prompts(
            name,
            config.data,
            tokenizer,
            setting=setting,
            check_chat=check_chat,
            check_answer=check_answer,
            images=images and images.open_beside(name),
            num_checked=num_checked,
        )
        for line in prompts.describe_columns():
            print(line)
        if prompts.num_dropped:
            print(
                f"{setting}={name!r}: {prompts.num_dropped} of {prompts.num_rows} rows left out: "
                f"more than data.max_prompt_tokens={config.data.prompt_limit} tokens"
            )
        datasets.append(prompts)
    return PromptDataset(*datasets)


def _check_row_counts(config: RLConfig, inputs: Inputs) -> None:
    """Refuse to draw more rows at a time than a source has: some would be drawn twice."""
    data, warm, step = config.data, config.warm_start, config.trainer.prompts_per_step
    files = [f"{setting}={name!r}" for setting, name in list_train_files(config.data).items()]
    prompts = f"trainer.prompts_per_step={step}"
    if (per_round := config.algorithm.filter.prompts_per_round) > step:
        step, prompts = per_round, f"algorithm.filter.prompts_per_round={per_round}"
    if data.train_weights:
        for file, weight, size in zip(files, data.train_weights, inputs.train.sizes, strict=True):
            drawn = math.ceil(step * weight / sum(data.train_weights))
            require_rows(f"{prompts} takes {drawn} of this file", file, size, drawn)
    else:
        require_rows(prompts, " and ".join(files), len(inputs.train), step)
    num_tests = config.trainer.eval_samples
    for name, (setting, file) in list_test_files(config.data).items():
        size = len(inputs.tests[name])
        warn_of_few_rows("trainer.eval_samples", f"{setting}={file!r}", size, num_tests)
    if inputs.examples is not None:
        size, file = warm.batch_size, f"warm_start.train_file={warm.train_file!r}"
        require_rows(f"warm_start.batch_size={size}", file, inputs.num_examples, size)


def limit_evaluation(config: RLConfig, inputs: Inputs) -> RLConfig:
    """Return settings with eval_samples of at most the rows of the largest held-out set."""
    if not inputs.tests:
        return config
    largest = max(map(len, inputs.tests.values()))
    num = min(config.trainer.eval_samples or largest, largest)
    return replace(config, trainer=replace(config.trainer, eval_samples=num))


def check_layouts(config: RLConfig, plan: RunPlan, device_type: str = "") -> HFConfig:
    """Check the settings that depend on the config.json of models alone; return the policy's.

    Args:
        device_type: "cuda" or "cpu" instead of that of the nodes.
    """
    device_type = device_type or detect_device_type()
    hf_config = read_checkpoint_config(config.model.path)
    if ACTOR in plan:
        load_backend(config.actor, "actor").check_model("actor", config.actor, hf_config)
    load_server_class(config.rollout).check_model(
        config.rollout,
        "rollout",
        hf_config,
        device_type,
        records_experts=config.actor.moe.router_replay == "rollout",
    )
    if role := plan.find(WARM_START):
        warm = replace(role.spec.engine, moe=MoEConfig())
        load_backend(warm, "actor").check_model("warm_start", warm, hf_config)
    if critic := plan.find(CRITIC):
        _check_critic(config, critic, plan[ACTOR], hf_config)
    _check_frozen_layouts(config.algorithm, plan)
    _check_served_layouts(config.rollout, config.model.dtype, plan, device_type)
    if config.rollout.lora == "adapter":
        _check_adapters(config.actor, hf_config)
    if config.weight_sync.method != "full_export":
        _check_stacked_experts(config, hf_config)
    if config.rollout.quantization is not None:
        check_quantization(config, hf_config, is_trained=ACTOR in plan)
    _check_rollout_cache(config, plan, hf_config)
    _check_lengths(config)
    return hf_config


def _check_adapters(actor: EngineConfig, hf_config: HFConfig) -> None:
    """Check that no adapter is of an expert or of a wrapper, which servers take none for."""
    if get_frozen_prefixes(hf_config):
        raise ConfigError(
            f"rollout.lora='adapter': {hf_config['architectures']} has a frozen tower, and its "
            "linear layers have other names on servers than in a model of text; allowed: 'merged'"
        )
    backend, targets = load_backend(actor, "actor"), actor.lora.targets
    if backend.shard_format != "megatron":
        return  # adapters are of linear layers, which experts are not
    for weight in get_family(hf_config).weights(hf_config, pad_vocab_size(hf_config, 1)):
        if weight.expert is not None and get_adapted_linear(weight) in targets:
            raise ConfigError(
                f"rollout.lora='adapter' with actor.lora.targets={targets}: the model has experts, "
                "and servers take no adapters of them; allowed: ['linear_qkv', 'linear_proj'], or "
                "rollout.lora='merged'"
            )


def _check_stacked_experts(config: RLConfig, hf_config: HFConfig) -> None:
    """Check that both sides of a weight sync have the experts of a stacked tensor apart."""
    shard_format = load_backend(config.actor, "actor").shard_format
    weight_format = load_server_class(config.rollout).features.weight_format
    if (shard_format, weight_format) == ("megatron", "vllm"):
        return
    weights = get_family(hf_config).weights(hf_config, pad_vocab_size(hf_config, 1))
    for tensor in list_logical_tensors(weights):
        if (part := parse_slice(tensor.name)) is not None:
            raise ConfigError(
                f"weight_sync.method={config.weight_sync.method!r}: {part.stack} stacks experts, "
                "which actor.backend='megatron' alone gives to servers of rollout.backend='vllm' "
                "as shards; allowed: these two, or 'full_export'"
            )


def _check_critic(config: RLConfig, role: Role, actor: Role, policy: HFConfig) -> None:
    critic, path = config.critic, config.critic.model_path
    initial_config = read_checkpoint_config(path, "critic.model_path") if path else policy
    load_backend(critic, "critic").check_model("critic", critic, build_value_config(initial_config))
    validate_schedule("critic.optimizer", critic.optimizer, role.spec.total_steps)
    validate_schedule("actor.optimizer", config.actor.optimizer, actor.spec.total_steps)
    check_choice("critic.loss_aggregation", critic.loss_aggregation, _CRITIC_AGGREGATIONS)


def _check_rollout_cache(config: RLConfig, plan: RunPlan, hf_config: HFConfig) -> None:
    """Check that the KV cache holds one sequence, of the policy or of an adapter beside it."""
    response = f"data.max_prompt_tokens + {_get_response_setting(config)}"
    lengths = {response: config.max_sequence_tokens} | {
        f"models.{name}.max_context": model.max_context
        for name, model in plan.models.items()
        if model.adapter
    }
    setting, num_tokens = max(lengths.items(), key=lambda item: item[1])
    sequence = f"sequence of {setting} = {num_tokens} tokens"
    _check_kv_cache("rollout", config.rollout, config.model.dtype, hf_config, num_tokens, sequence)


def _check_kv_cache(
    key: str,
    servers: RolloutConfig,
    dtype: str,
    hf_config: HFConfig,
    num_tokens: int,
    sequence: str,
) -> None:
    """Check that the KV cache of a server holds one sequence, which `sequence` describes.

    Servers round up to blocks of tokens, and refuse the rest when they start.
    """
    if servers.kv_cache_bytes is None:
        return  # the default holds one
    least = num_tokens * count_token_bytes(hf_config, servers, dtype)
    if 0 < (load_server_class(servers, key).get_kv_cache_bytes(servers) or 0) < least:
        raise ConfigError(
            f"{key}.kv_cache_bytes={servers.kv_cache_bytes}: one {sequence} takes {least} bytes; "
            "allowed: at least as many"
        )


def _get_response_setting(config: RLConfig) -> str:
    """Return the setting that limits the longest response."""
    eval_tokens = config.evaluation.max_response_tokens or 0
    is_eval = eval_tokens > config.rollout.response_limit
    return f"{'evaluation' if is_eval else 'rollout'}.max_response_tokens"


def _check_lengths(config: RLConfig) -> None:
    """Check that prompt and response fit into the positions of the model."""
    longest, response = config.max_sequence_tokens, _get_response_setting(config)
    positions = count_positions(read_config(config.model.path))
    if positions is not None and longest > positions:
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.prompt_limit} and "
            f"{response}={longest - config.data.prompt_limit} make {longest}; "
            f"allowed: together up to the {positions} positions of the model"
        )


def _load_examples(
    config: RLConfig,
    tokenizer: PreTrainedTokenizerBase,
    images: RowImages | None,
    num_rows: int | None,
) -> tuple[Batch | None, int]:
    """Load the examples of all rows, or of the first `num_rows`; return the number of all rows."""
    warm = config.warm_start
    if not warm.num_steps:
        return None, 0
    images = images and images.open_beside(warm.train_file)
    if not warm.response_column:
        longest = config.data.prompt_limit + config.rollout.response_limit
        examples = load_chats(warm.train_file, config.data, longest, tokenizer, images, num_rows)
    else:
        examples = load_supervised(
            warm.train_file, config.data, warm.response_column, tokenizer, images, num_rows
        )
    if num_rows is None:
        return examples, len(examples)
    return examples, len(open_rows(warm.train_file, "warm_start.train_file"))


# The frozen models that score: reward model and teachers


def _check_frozen_layouts(algorithm: AlgorithmConfig, plan: RunPlan) -> None:
    """Check the settings that depend on each config.json alone."""
    for role in filter(Role.is_scoring, plan):
        engine = role.spec.engine
        hf_config = _read_frozen_config(algorithm.distillation, plan[ACTOR].path, role)
        load_backend(engine, role.key).check_model(role.key, engine, hf_config)


def _check_frozen_models(config: RLConfig, plan: RunPlan) -> None:
    """Check weights, tokenizers and the teacher of each prompt."""
    for role in filter(Role.is_scoring, plan):
        policy = plan[ACTOR].path
        hf_config = _read_frozen_config(config.algorithm.distillation, policy, role)
        reader = CheckpointReader(role.path, role.path_setting)
        reader.check(
            list_logical_tensors(map_model_weights(hf_config, pad_vocab_size(hf_config, 1)))
        )
        _check_frozen_tokenizer(policy, role)
    _check_teacher_column(config.teacher, config.data)


def _read_frozen_config(distillation: DistillationConfig, policy_path: str, role: Role) -> HFConfig:
    """Read the config.json of a role; check that it is the kind of model that the role needs."""
    path, setting = role.path, role.path_setting
    hf_config = read_checkpoint_config(path, setting)
    kind = get_value_head_suffix(hf_config)
    if role.name == REWARD_MODEL:
        if kind != SEQUENCE:
            raise ConfigError(
                f"{setting}={path!r} is of {hf_config.get('architectures')}; allowed: a reward "
                f"model, ...{SEQUENCE}, as mcore-rl rm leaves one"
            )
        return build_value_config(hf_config)
    if kind:
        raise ConfigError(
            f"{setting}={path!r} is of {hf_config['architectures']}; allowed: a language model"
        )
    configs = hf_config, read_config(policy_path)
    vocab_size, policy_vocab_size = (get_field(c, "vocab_size") for c in configs)
    if distillation.loss in TOP_TOKEN_LOSSES:
        if vocab_size != policy_vocab_size:
            raise ConfigError(
                f"{setting}={path!r} has vocab_size={vocab_size}, the policy {policy_vocab_size}; "
                f"allowed with algorithm.distillation.loss={distillation.loss!r}: the same"
            )
        if distillation.top_k > vocab_size:
            raise ConfigError(
                f"algorithm.distillation.top_k={distillation.top_k}; allowed: up to the "
                f"{vocab_size} tokens of the vocabulary"
            )
    return hf_config


def _check_frozen_tokenizer(policy_path: str, role: Role) -> None:
    """Check that a role has the vocabulary of the policy, whose token ids it reads."""
    path, setting = role.path, role.path_setting
    if path == policy_path:
        return
    if not has_tokenizer(path):
        raise ConfigError(f"{setting}={path!r} has no tokenizer to compare with the policy's")
    policy_vocab, vocab = (read_tokenizer(p).get_vocab() for p in (policy_path, path))
    if policy_vocab != vocab:
        token = next(t for t in (policy_vocab | vocab) if policy_vocab.get(t) != vocab.get(t))
        raise ConfigError(
            f"{setting}={path!r} has another vocabulary than model.path={policy_path!r}: "
            f"{token!r} is {vocab.get(token)}, there {policy_vocab.get(token)}; allowed: the same"
        )


def _check_teacher_column(teacher: TeacherConfig, data: DataConfig) -> None:
    if not teacher.column:
        return
    names = build_teachers(teacher)
    column = RowColumn(teacher.column, "teacher.column")
    for source in filter(None, data.train_files or [data.train_file]):
        for row in open_rows(source, "data.train_file"):
            if (name := column.get_text(row)) not in names:
                raise column.build_error(row, name, f"one of: {', '.join(names)}")


# The frozen models with servers (`models`)


def _check_served_layouts(
    policy: RolloutConfig, dtype: str, plan: RunPlan, device_type: str
) -> None:
    """Check the settings that depend on each config.json alone."""
    for name, model in plan.models.items():
        key, servers = f"models.{name}", model.servers
        hf_config = read_checkpoint_config(model.path, f"{key}.path")
        if get_value_head_suffix(hf_config):
            raise ConfigError(
                f"{key}.path={model.path!r} is of {hf_config['architectures']}; allowed: a "
                "language model"
            )
        get_family(hf_config)
        positions = count_positions(hf_config)
        if positions is not None and model.max_context > positions:
            raise ConfigError(
                f"{key}.max_context={model.max_context}; allowed: up to the {positions} positions "
                "of the model"
            )
        if model.adapter:
            rank = check_adapter(f"{key}.adapter", model.adapter, hf_config)
            check_adapter_rank(f"{key}.adapter: rank", rank, policy)
            continue
        load_server_class(servers, key).check_model(servers, key, hf_config, device_type)
        conversation = f"conversation of max_context={model.max_context} tokens"
        _check_kv_cache(key, servers, dtype, hf_config, model.max_context, conversation)


def _check_served_models(policy: ModelConfig, plan: RunPlan) -> None:
    """Check weights, tokenizers and chat templates.

    A model without a path starts from the policy after the warm start, whose weights are checked
    with the policy.
    """
    for name, model in plan.models.items():
        key, hf_config = f"models.{name}", read_config(model.path)
        if model.path != policy.path:
            reader = CheckpointReader(model.path, f"{key}.path")
            weights = map_model_weights(hf_config, pad_vocab_size(hf_config, 1))
            reader.check(list_logical_tensors(weights))
        if not has_tokenizer(model.path):
            raise ConfigError(f"{key}.path={model.path!r} has no tokenizer")
        tokenizer = load_tokenizer(model.path, policy.chat_date)
        check_tokenizer_matches(tokenizer, get_field(hf_config, "vocab_size"))
        try:
            from mcore_rl.agents.chat_template.validation import select_codec

            kind = cast("CodecKind", model.codec)
            select_codec(tokenizer, kind, stop_ids=read_stop_ids(model.path, f"{key}.path"))
        except ConfigError as error:
            raise ConfigError(f"{key}.path={model.path!r}: {error}") from error


# Settings that name a part of the reward


def check_reward_parts(config: RLConfig) -> None:
    """Raise ConfigError if a setting names a part that no reward of the run returns.

    Nothing is checked with a reward outside the package: its parts are known only from a call.
    """
    if config.agent.loop not in REWARDED_LOOPS:
        return
    parts, is_open = _list_reward_parts(config.reward)
    if is_open:
        return
    filters, curriculum = config.algorithm.filter, config.data.curriculum
    if filters.group_filter:
        filter_settings = GROUP_FILTERS.build_settings(
            filters.group_filter, filters.group_filter_settings
        )
        if isinstance(filter_settings, DropUniformSettings):
            setting = f"{GROUP_FILTERS.settings_key}.of"
            _require_parts(setting, [filter_settings.of], ["reward", *parts])
    if curriculum.name:
        _require_parts("data.curriculum.success", [curriculum.success], ["reward", *parts])
    advantage = config.algorithm.advantage
    settings = ADVANTAGES.build_settings(advantage, config.algorithm.advantage_settings)
    if isinstance(settings, GDPOSettings):
        scores = ["model"] if config.reward_model.model_path else []
        _require_parts(f"{ADVANTAGES.settings_key}.parts", [*settings.weights()], parts + scores)


def _list_reward_parts(config: RewardConfig) -> tuple[list[str], bool]:
    """Return the names of the known parts, and whether there may be others."""
    names, is_open = list[str](), False
    for name, term in list_reward_terms(config).items():
        parts = get_parts(f"reward.terms.{name}" if name else "reward", term.name)
        names += [name] if name else []
        names += [f"{name}/{part}" if name else part for part in parts or ()]
        is_open = is_open or parts is None
    return names, is_open


def _require_parts(setting: str, names: list[str], allowed: list[str]) -> None:
    for name in names:
        if name not in allowed:
            choices = ", ".join(allowed) or "none, as the reward has no parts"
            raise ConfigError(
                f"{setting} names {name!r}, no part of the reward; allowed: {choices}"
            )
