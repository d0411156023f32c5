"""Rules of the settings of `mcore-rl sft`, `dpo`, `rm` and `eval`. Pure.

A rule that fails raises ConfigError naming the setting, its value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from mcore_rl.config.checks import check_values
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import check_limits
from mcore_rl.config.rules import (
    DTYPE_OF_DEVICE,
    OWN_POOL,
    list_checkpoint_warnings,
    list_optimizer_warnings,
    list_test_files,
    list_train_files,
    validate_held_out,
    validate_sources,
    validate_trackers,
)
from mcore_rl.config.rules_engine import validate_engine
from mcore_rl.config.rules_rollout import (
    list_reward_terms,
    validate_batch_on_device,
    validate_quantized_dtype,
    validate_reward,
    validate_servers,
)
from mcore_rl.config.schema import (
    ConversationsConfig,
    DataConfig,
    DPOConfig,
    EvalConfig,
    ModelConfig,
    PairsConfig,
    PlacementConfig,
    RLConfig,
    RMConfig,
    SamplingConfig,
    SFTConfig,
    TrainConfig,
)


def validate_train(config: TrainConfig, *, needs_data: bool = True) -> None:
    """Check every setting that needs no file.

    Args:
        needs_data: False if data settings may be empty.
    """
    check_values(config)
    check_limits("", config)
    validate_trackers(config.trainer.trackers)
    validate_engine("engine", config.engine)
    if config.engine.moe.router_replay == "rollout":
        raise ConfigError("engine.moe.router_replay='rollout': nothing is rolled out here; 'off'")
    data = get_data_config(config)
    files = list_train_files(data) if needs_data else {}
    for key, value in ({"model.path": config.model.path} | files).items():
        if not value:
            raise ConfigError(f"{key}='' names nothing; it is needed")
    validate_sources(data)
    validate_held_out(config, has_sets=bool(list_test_files(data)))
    _validate_pairs(config)
    dp, rows = config.engine.layout.dp, config.trainer.batch_size * count_row_conversations(config)
    if rows % dp:
        raise ConfigError(
            f"engine.layout.dp={dp} does not divide the {rows} conversations of a step "
            f"(trainer.batch_size={config.trainer.batch_size})"
        )


def _validate_pairs(config: TrainConfig) -> None:
    """Check engine settings that only one of the three losses supports."""
    if isinstance(config, SFTConfig):
        for name, mode in (
            ("moe.router_replay", config.engine.moe.router_replay),
            ("indexer_replay", config.engine.indexer_replay),
        ):
            if mode == "record":
                raise ConfigError(
                    f"engine.{name}='record': there is one pass, and nothing to record; "
                    "allowed: 'off'"
                )
        return
    if config.engine.mtp_loss_coef:
        raise ConfigError(
            f"engine.mtp_loss_coef={config.engine.mtp_loss_coef}: prediction layers are trained by "
            "mcore-rl sft; allowed: 0"
        )


def get_data_config(config: TrainConfig) -> ConversationsConfig | PairsConfig:
    assert isinstance(config, SFTConfig | DPOConfig | RMConfig)
    return config.data


def count_row_conversations(config: TrainConfig) -> int:
    """Return the conversations of a row of data.train_file."""
    return 1 if isinstance(config, SFTConfig) else 2


def count_steps(config: TrainConfig, num_rows: int) -> int:
    """Return the optimizer steps of the whole run.

    >>> count_steps(SFTConfig(), 130)
    3
    """
    steps = config.trainer
    return steps.num_steps or math.ceil(steps.num_epochs * num_rows / steps.batch_size)


def list_train_warnings(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each setting that is valid but probably a mistake."""
    data, optimizer = get_data_config(config), config.engine.optimizer
    for key, file in list_test_files(data).values():
        if file in (data.train_file, *data.train_files):
            where = "data.train_file" if data.train_file else "in data.train_files"
            yield f"{key}={file!r} is {where}: evaluations are of training data"
    yield from list_checkpoint_warnings(config)
    yield from list_optimizer_warnings("engine.optimizer", optimizer, config.trainer.num_steps)


def validate_eval(config: EvalConfig) -> None:
    """Check every setting that needs no file."""
    check_values(config)
    check_limits("", config)
    if not config.data.sets:
        raise ConfigError("data.sets is empty; allowed: one or more, as data.sets.NAME=FILE")
    _validate_sampling(config.rollout)
    validate_reward(config.reward)
    _validate_metrics(config)


def _validate_sampling(config: SamplingConfig) -> None:
    validate_servers(config)
    if config.load_format == "dummy":
        raise ConfigError(
            "rollout.load_format='dummy': an evaluation has no trainer that sends weights; "
            "allowed: 'auto', 'checkpoint'"
        )
    if not config.temperature and config.n > 1:
        raise ConfigError(
            f"rollout.n={config.n}: with rollout.temperature=0 all responses to a prompt are the "
            "same; allowed: 1"
        )


def _validate_metrics(config: EvalConfig) -> None:
    for k in config.ks:
        if k > config.rollout.n:
            raise ConfigError(f"scoring.ks: {k}; allowed: 1 to rollout.n={config.rollout.n}")
    if config.scoring.term and config.scoring.term not in config.reward.terms:
        raise ConfigError(
            f"scoring.term={config.scoring.term!r}; allowed: '', or one of reward.terms: "
            f"{', '.join(list_reward_terms(config.reward)) or 'there is none'}"
        )
    if config.reward.on_error == "drop" or config.reward.shuffle:
        raise ConfigError(
            "reward.on_error='drop' and reward.shuffle=true are for training; allowed: 'stop' or "
            "'zero' (a response without a reward is wrong), and false"
        )


def build_server_config(config: EvalConfig, device: str, path: str, chat_date: str) -> RLConfig:
    """Return the settings of a run whose servers evaluate the model in the folder `path`.

    `device` is "cpu" or "cuda"; `chat_date` the date that chat templates write.
    """
    data = config.data
    dtype = config.model.dtype if config.model.dtype != "auto" else DTYPE_OF_DEVICE[device]
    run = RLConfig(
        seed=config.seed,
        output_dir=config.output_dir,
        placement=replace(PlacementConfig(), rollout=OWN_POOL),
        model=ModelConfig(path, dtype, chat_date),
        data=DataConfig(
            prompt_column=data.prompt_column,
            answer_column=data.answer_column,
            tools_column=data.tools_column,
            images_column=data.images_column,
            max_image_pixels=data.max_image_pixels,
            images_dir=data.images_dir,
            max_prompt_tokens=data.max_prompt_tokens,
            long_prompts=data.long_prompts,
        ),
        rollout=config.rollout,
        reward=config.reward,
        timeouts=config.timeouts,
    )
    validate_quantized_dtype(run.rollout, dtype)
    validate_batch_on_device("rollout", run.rollout, run.max_sequence_tokens, device)
    return run
