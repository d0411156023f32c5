"""Checks that need no large library: settings, the first row of each file, the reward of one.

They come before a job imports torch, Ray and vLLM, which takes seconds. All rows are checked later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from mcore_rl.config.checks import check_model_exists, is_url
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path
from mcore_rl.config.rules import list_test_files, list_train_files, validate_rl
from mcore_rl.config.rules_rollout import REWARDED_LOOPS, list_reward_terms
from mcore_rl.config.rules_train import get_data_config, validate_eval, validate_train
from mcore_rl.config.schema import (
    ConversationsConfig,
    DataConfig,
    EvalConfig,
    PairsConfig,
    RewardConfig,
    RLConfig,
    SetsConfig,
    TrainConfig,
)
from mcore_rl.data.files import Row, read_first_row
from mcore_rl.data.rows import (
    Message,
    RowColumn,
    choose_answer_column,
    choose_prompt_column,
    read_chat,
    read_preference_rows,
    read_supervised_rows,
    read_tool_schemas,
)
from mcore_rl.data.sample import Sample
from mcore_rl.jobs.remote_paths import HUBS, find_published
from mcore_rl.observability.warnings import warn

CheckRow = Callable[[Row], object]


def check_early(config: RLConfig | TrainConfig | EvalConfig, *, needs_data: bool = True) -> None:
    """Check the settings of a job, that its model is there, and the first row of each file.

    Reward functions outside the package are called once, with the first prompt and its answer as
    the response. Models of a hub, files at URLs and rows of a function are left to later checks.

    Args:
        needs_data: False if data settings may be empty, as in a dry run.

    Raises:
        ConfigError: A setting or a row is wrong.
    """
    if isinstance(config, EvalConfig):
        validate_eval(config)
    elif isinstance(config, RLConfig):
        validate_rl(config, needs_data=needs_data)
    else:
        validate_train(config, needs_data=needs_data)
    path = config.model.path
    is_local = not (is_url(path) or path.startswith(HUBS) or find_published(path))
    if path and is_local:  # a dry run takes a published config.json, too
        check_model_exists("model.path", path)
    rows = []
    for setting, (name, check_row) in _list_sources(config).items():
        if name and not is_url(name) and (row := read_first_row(name, setting)) is not None:
            check_row(row)
            if setting.startswith("data."):
                rows.append(row)
    if rows and isinstance(config, EvalConfig):
        _try_reward(rows[0], config.data, config.reward)
    if rows and isinstance(config, RLConfig) and config.agent.loop in REWARDED_LOOPS:
        _try_reward(rows[0], config.data, config.reward)


def _try_reward(row: Row, data: DataConfig | SetsConfig, reward: RewardConfig) -> None:
    """Call the reward functions of the user on a response that is the answer of a row."""
    if not any(is_import_path(term.name) for term in list_reward_terms(reward).values()):
        return
    from mcore_rl.rewards.manager import try_functions

    messages = _read_prompt(row, data)
    fields, prompt = dict(row.values), choose_prompt_column(row, data)
    fields = {n: value for n, value in fields.items() if n not in (prompt.name, data.images_column)}
    answer = choose_answer_column(row, data).name
    if answer in row.values:
        fields["answer"] = row.values[answer]
    text = str(fields.get("answer", ""))
    num_tokens = len(text.split()) + 1
    sample = Sample(
        prompt_ids=[0],
        response_ids=[0] * num_tokens,
        response_mask=[1] * num_tokens,
        rollout_log_probs=[0.0] * num_tokens,
        weight_versions=[0] * num_tokens,
        finish_reason="stop",
        group_id=0,
        fields=json.loads(json.dumps(fields, default=str)),  # as batches of prompts have them
        messages=messages,
    )
    where = f"row {row.index} of {row.source}, before the run, with its answer as the response"
    names = try_functions(reward, sample, text, where)
    if names:
        print(f"reward: {', '.join(names)} called once, with row {row.index} of {row.source}")


def _list_sources(
    config: RLConfig | TrainConfig | EvalConfig,
) -> Mapping[str, tuple[str, CheckRow]]:
    """Return each source and the check of its rows, by setting."""
    if isinstance(config, EvalConfig):
        sets = config.data.sets.items()
        return {f"data.sets.{name}": (file, _check_prompts(config.data)) for name, file in sets}
    data = config.data if isinstance(config, RLConfig) else get_data_config(config)
    if isinstance(data, DataConfig):
        check_row = _check_prompts(data)
    elif isinstance(data, PairsConfig):
        check_row = _check_pairs(data)
    else:
        check_row = _check_conversations(data)
    files = {**list_train_files(data), **dict(list_test_files(data).values())}
    sources = {setting: (name, check_row) for setting, name in files.items()}
    if isinstance(config, RLConfig) and config.warm_start.num_steps:
        column = config.warm_start.response_column
        check = _check_examples(config.data, column)
        sources["warm_start.train_file"] = config.warm_start.train_file, check
    return sources


def _check_prompts(data: DataConfig | SetsConfig) -> CheckRow:
    def check(row: Row) -> None:
        _read_prompt(row, data)
        if data.answer_column is not None:
            RowColumn(data.answer_column, "data.answer_column").get(row)

    return check


def _read_prompt(row: Row, data: DataConfig | SetsConfig) -> list[Message]:
    read_tool_schemas(row, _build_tools_column(data.tools_column))
    column, with_images = choose_prompt_column(row, data), bool(data.images_column)
    return read_chat(row, column, text_role="user", with_images=with_images)


def _check_examples(data: DataConfig, response_column: str) -> CheckRow:
    def check(row: Row) -> None:
        _read_prompt(row, data)
        if response_column:
            RowColumn(response_column, "warm_start.response_column").get_text(row)

    return check


def _check_conversations(data: ConversationsConfig) -> CheckRow:
    def skip_images(row: Row, messages: list[Message]) -> tuple[()]:
        return ()

    messages = RowColumn(data.messages_column, "data.messages_column")
    tools = _build_tools_column(data.tools_column)
    place_images = skip_images if data.images_column else None
    return lambda row: list(read_supervised_rows([row], messages, tools, place_images))


def _check_pairs(data: PairsConfig) -> CheckRow:
    prompt = RowColumn(data.prompt_column, "data.prompt_column")
    chosen = RowColumn(data.chosen_column, "data.chosen_column")
    rejected = RowColumn(data.rejected_column, "data.rejected_column")
    margin = RowColumn(data.margin_column, "data.margin_column") if data.margin_column else None
    tools = _build_tools_column(data.tools_column)
    return lambda row: list(read_preference_rows([row], prompt, chosen, rejected, margin, tools))


def _build_tools_column(name: str) -> RowColumn | None:
    return RowColumn(name, "data.tools_column") if name else None


def require_rows(setting: str, source: str, num_rows: int, num_drawn: int) -> None:
    """Raise ConfigError if a source has fewer rows than a setting draws at a time."""
    if num_drawn > num_rows:
        raise ConfigError(f"{setting}: {source} has {num_rows} rows; allowed: up to as many")


def warn_of_few_rows(setting: str, source: str, num_rows: int, num_wanted: int) -> None:
    """Warn if a held-out source has fewer rows than a setting wants of it."""
    if num_wanted > num_rows:
        warn(f"{setting}={num_wanted}: {source} has {num_rows} rows, and all are taken")
