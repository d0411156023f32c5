"""All inputs of a run, read and checked before a process group or a server is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.agents.messages import messages_of
from mcore_rl.algorithms.sample_choice import CURRICULA
from mcore_rl.checkpoint.hf import CheckpointReader, read_checkpoint_config
from mcore_rl.config.checks import one_of
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import resolve_rollout_model
from mcore_rl.config.resolve_engine import (
    resolve_model_engine,
    resolve_model_layout,
    resolve_schedule,
)
from mcore_rl.config.resolve_models import served_models
from mcore_rl.config.schema import RLConfig
from mcore_rl.config.sources import test_files, train_files
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import (
    PromptDataset,
    load_prompts,
    load_supervised,
)
from mcore_rl.data.examples import load_chats
from mcore_rl.data.files import open_rows
from mcore_rl.data.tasks.prepared import prepared
from mcore_rl.data.tokenizer import (
    check_tokenizer_matches,
    has_tokenizer,
    load_tokenizer,
    stop_ids_of,
)
from mcore_rl.engine.base import backend_of
from mcore_rl.engine.lora_targets import check_targets
from mcore_rl.jobs.model_checks import check_model_layouts, check_models
from mcore_rl.jobs.placement import needs_critic
from mcore_rl.jobs.reward_parts import REWARDED_LOOPS, check_reward_parts
from mcore_rl.jobs.scorers import check_scorer_layouts, check_scorers
from mcore_rl.jobs.session import lane
from mcore_rl.jobs.tasks import TASKS
from mcore_rl.models.base import (
    HFConfig,
    family_of,
    field,
    kv_elements_per_token,
    model_sizes,
    padded_vocab_size,
    read_config,
)
from mcore_rl.models.heads import value_config
from mcore_rl.observability.trackers import check_trackers
from mcore_rl.reshard.rules import logical_tensors
from mcore_rl.rewards.judge import Judge, answer_check, check_columns, check_judges
from mcore_rl.trainers.policy_loss import check_functions, check_greedy
from mcore_rl.weight_sync.nixl import nixl_api
from mcore_rl.weight_sync.shared_memory import check_allocator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CRITIC_AGGREGATIONS = "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"


@dataclass(frozen=True, slots=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    tests: dict[str, PromptDataset]  # the held-out sets by name
    examples: Batch | None  # of the warm start


def check_inputs(config: RLConfig) -> Inputs:
    """Load the data and check model, layouts and names; raises ConfigError for the first fault."""
    _check_choices(config)
    _check_weights(config)
    return _read_data(config)


def _check_weights(config: RLConfig) -> None:
    check_model(config)
    check_scorers(config)
    check_models(config)


def check_model(config: RLConfig) -> None:
    """Check the weights of the model, and layouts for it."""
    check_layouts(config)
    reader = CheckpointReader(config.model.path)
    hf_config = reader.config()  # layers for prediction that the weights lack are left out
    resolve_model_engine("actor", config.actor, model_sizes(hf_config))
    weights = family_of(hf_config).weights(hf_config, padded_vocab_size(hf_config, 1))
    reader.check(logical_tensors(weights))


def check_existing_inputs(config: RLConfig) -> Inputs | None:
    """Check what is there already, for a plan: weights, tokenizer and data may be missing.

    Returns None without a tokenizer or with an unset source of data: then files are only opened.
    """
    _check_choices(config)
    if has_weights(config):
        _check_weights(config)
    else:
        check_layouts(config)
    has_files = has_weights(config) or has_tokenizer(config.model.path)
    if has_files and not unset_data(config):
        return _read_data(config)
    for setting, name in _data_files(config).items():
        if name:
            open_rows(name, setting)
    return None


def unset_data(config: RLConfig) -> list[str]:
    """Settings of data that a run needs and that name nothing."""
    return [setting for setting, name in _data_files(config).items() if not name]


def has_weights(config: RLConfig) -> bool:
    return any(Path(config.model.path).glob("*.safetensors*"))


def has_experts(config: RLConfig) -> bool:
    """Whether the run's model is a mixture of experts, as the one that every task makes is."""
    return bool(config.task.name or model_sizes(read_config(config.model.path)).num_experts)


def prepare_task(config: RLConfig, folder: Path, *, is_made: bool = False) -> RLConfig:
    """Make the synthetic task, when one is asked for, and point the settings at it.

    `is_made` in `folder` by an earlier call, it is taken as it is.
    """
    if not config.task.name:
        return config
    if is_made:
        task = prepared(folder / "task")
    else:
        make = TASKS[config.task.name]
        task = make(folder / "task", config.seed, config.task.worked_share)
    return replace(
        config,
        task=replace(config.task, name=""),
        model=replace(config.model, path=str(task.model_dir)),
        data=replace(config.data, train_file=str(task.train_file), test_file=str(task.test_file)),
        warm_start=replace(config.warm_start, train_file=str(task.warm_start_file)),
    )


def _check_choices(config: RLConfig) -> None:
    check_functions(config.algorithm, config.agent.loop)
    check_greedy(config)
    if curriculum := config.data.curriculum.name:
        CURRICULA.bound(curriculum, config.data.curriculum.settings)
    check_trackers(config.trainer.trackers)
    lengths = config.rollout.max_response_tokens, config.evaluation.max_response_tokens
    Judge(config.reward, min(filter(None, lengths)))  # checks names and settings
    check_judges(config.reward, served_models(config))
    check_reward_parts(config)
    if config.weight_sync.method == "disaggregated" and config.weight_sync.transport == "nixl":
        nixl_api()
    backend_of(config.actor).check_modules(config.actor.modules, lane())
    if lane() == "cuda" and config.weight_sync.method == "colocated":
        check_allocator()


def _data_files(config: RLConfig) -> dict[str, str]:
    """All sources of data that a run reads, by setting."""
    found = train_files(config.data) | dict(test_files(config.data).values())
    if config.warm_start.num_steps:
        found["warm_start.train_file"] = config.warm_start.train_file
    return found


def _read_data(config: RLConfig) -> Inputs:
    tokenizer = load_tokenizer(config.model.path, config.model.chat_date)
    check_tokenizer_matches(tokenizer, field(read_config(config.model.path), "vocab_size"))
    if config.agent.loop != "single_turn":
        from mcore_rl.agents.runner import check_agent, try_out  # imports clients of HTTP

        models, stop_ids = served_models(config), stop_ids_of(config.model.path)
        check_agent(config.agent, tokenizer, models, stop_ids)
    inputs = Inputs(
        tokenizer=tokenizer,
        train=prompts_of(train_files(config.data), config, tokenizer),
        tests={
            name: prompts_of(dict([file]), config, tokenizer)
            for name, file in test_files(config.data).items()
        },
        examples=_examples(config, tokenizer),
    )
    _check_numbers_of_rows(config, inputs)
    for prompts in (inputs.train, *inputs.tests.values()):
        check_columns(config.reward, prompts[0].fields)
    if config.agent.loop != "single_turn":
        try_out(config.agent, inputs.train[0].fields)
    return inputs


def prompts_of(
    files: Mapping[str, str], config: RLConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptDataset:
    """Load the prompts of sources, by setting."""
    found = []
    loop = config.agent.loop
    check_chat = None if loop == "single_turn" else messages_of
    check_answer = answer_check(config.reward) if loop in REWARDED_LOOPS else None
    for setting, name in files.items():
        prompts = load_prompts(
            name,
            config.data,
            tokenizer,
            setting=setting,
            check_chat=check_chat,
            check_answer=check_answer,
        )
        if prompts.num_dropped:
            print(
                f"{setting}={name!r}: {prompts.num_dropped} of {prompts.num_rows} rows left out: "
                f"more than data.max_prompt_tokens={config.data.max_prompt_tokens} tokens"
            )
        found.append(prompts)
    return PromptDataset(*found)


def _check_numbers_of_rows(config: RLConfig, inputs: Inputs) -> None:
    """Refuse to draw more rows at a time than there are: some would come twice."""
    data, warm, step = config.data, config.warm_start, config.trainer.prompts_per_step
    files = [f"{setting}={name!r}" for setting, name in train_files(config.data).items()]
    prompts = f"trainer.prompts_per_step={step}"
    if (per_round := config.algorithm.samples.prompts_per_round) > step:
        step, prompts = per_round, f"algorithm.samples.prompts_per_round={per_round}"
    if data.train_weights:
        for file, weight, size in zip(files, data.train_weights, inputs.train.sizes, strict=True):
            drawn = math.ceil(step * weight / sum(data.train_weights))
            _refuse_fewer(f"{prompts} takes {drawn} of this file", file, size, drawn)
    else:
        _refuse_fewer(prompts, " and ".join(files), len(inputs.train), step)
    num_tests = config.trainer.eval_samples
    for name, (setting, file) in test_files(config.data).items():
        size = len(inputs.tests[name])
        _refuse_fewer(f"trainer.eval_samples={num_tests}", f"{setting}={file!r}", size, num_tests)
    if inputs.examples is not None:
        size, file = warm.batch_size, f"warm_start.train_file={warm.train_file!r}"
        _refuse_fewer(f"warm_start.batch_size={size}", file, len(inputs.examples), size)


def _refuse_fewer(setting: str, source: str, num_rows: int, drawn: int) -> None:
    if drawn > num_rows:
        raise ConfigError(f"{setting}: {source} has {num_rows} rows; allowed: up to as many")


def check_layouts(config: RLConfig) -> HFConfig:
    """Check all that depends on config.json alone; returns its contents."""
    found = read_checkpoint_config(config.model.path)
    family = family_of(found)
    sizes = model_sizes(found)
    resolve_model_layout("actor.layout", config.actor.layout, sizes)
    resolve_model_engine("actor", config.actor, sizes)
    if config.actor.moe.router_replay == "rollout" and sizes.is_mla and lane() == "cpu":
        raise ConfigError(
            "actor.moe.router_replay='rollout': vLLM on a CPU records no experts of models with "
            "latent attention; allowed: 'off', 'record'"
        )
    if config.warm_start.num_steps:
        resolve_model_layout("warm_start.layout", config.warm_start.layout, sizes)
    if needs_critic(config):
        _check_critic(config, found)
    check_scorer_layouts(config)
    check_model_layouts(config)
    resolve_rollout_model(config.rollout, sizes)
    _check_cache(config, found)
    _check_lengths(config)
    if config.actor.lora.rank:
        weights = family.weights(found, padded_vocab_size(found, 1))
        check_targets("actor.lora", weights, config.actor.lora)
    return found


def _check_critic(config: RLConfig, actor: HFConfig) -> None:
    critic, steps = config.critic, config.trainer.num_steps * config.algorithm.num_mini_batches
    path = critic.model_path
    starts_from = read_checkpoint_config(path, "critic.model_path") if path else actor
    sizes = model_sizes(value_config(starts_from))
    resolve_model_layout("critic.layout", critic.layout, sizes)
    resolve_model_engine("critic", critic, sizes)
    resolve_schedule("critic.optimizer", critic.optimizer, steps)
    one_of("critic.loss_aggregation", critic.loss_aggregation, _CRITIC_AGGREGATIONS)


def _check_cache(config: RLConfig, hf_config: HFConfig) -> None:
    """A bound from below: vLLM rounds up to blocks of tokens, and says so when it starts."""
    num_tokens, response = config.max_sequence_tokens, _longest_response(config)
    itemsize = getattr(torch, config.model.dtype).itemsize
    least = num_tokens * kv_elements_per_token(hf_config, config.rollout.tp) * itemsize
    if config.rollout.kv_cache_bytes < least:
        raise ConfigError(
            f"rollout.kv_cache_bytes={config.rollout.kv_cache_bytes}: one sequence of "
            f"data.max_prompt_tokens + {response} = {num_tokens} tokens takes "
            f"{least} bytes; allowed: at least as many"
        )


def _longest_response(config: RLConfig) -> str:
    """The setting that says how long one can be."""
    is_own = (config.evaluation.max_response_tokens or 0) > config.rollout.max_response_tokens
    return f"{'evaluation' if is_own else 'rollout'}.max_response_tokens"


def _check_lengths(config: RLConfig) -> None:
    longest, response = config.max_sequence_tokens, _longest_response(config)
    positions = read_config(config.model.path).get("max_position_embeddings")
    if positions is not None and longest > positions:
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and "
            f"{response}={longest - config.data.max_prompt_tokens} make {longest}; "
            f"allowed: together up to the model's max_position_embeddings={positions}"
        )


def _examples(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> Batch | None:
    warm = config.warm_start
    if not warm.num_steps:
        return None
    if not warm.response_column:
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        return load_chats(warm.train_file, config.data, longest, tokenizer)
    return load_supervised(
        warm.train_file,
        config.data.prompt_column,
        warm.response_column,
        tokenizer,
        tools_column=config.data.tools_column,
    )
