"""All inputs of a job that trains on examples, read and checked before anything is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.algorithms.aggregation import AGGREGATIONS
from mcore_rl.algorithms.inputs import check_needs, get_needs
from mcore_rl.algorithms.preference import PREFERENCE_LOSSES
from mcore_rl.checkpoint.hf import CheckpointReader, read_checkpoint_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import DTYPE_OF_LANE, list_test_files, list_train_files
from mcore_rl.config.resolve_engine import (
    resolve_model_engine,
    resolve_model_layout,
    resolve_schedule,
)
from mcore_rl.config.resolve_train import count_row_conversations, count_steps, get_data_config
from mcore_rl.config.schema import (
    ConversationsConfig,
    DPOConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
)
from mcore_rl.data.examples import AnyExamples, ExampleFiles, load_conversations, load_pairs
from mcore_rl.data.tokenizer import check_tokenizer_matches, load_tokenizer
from mcore_rl.engine.base import backend_of
from mcore_rl.engine.lora_targets import check_targets
from mcore_rl.jobs.session import lane
from mcore_rl.models.base import (
    SEQUENCE,
    HFConfig,
    get_family,
    get_field,
    get_model_sizes,
    pad_vocab_size,
)
from mcore_rl.models.heads import build_value_config, get_value_head_suffix, map_model_weights
from mcore_rl.observability.trackers import check_trackers
from mcore_rl.reshard.rules import list_logical_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TrainInputs:
    train: ExampleFiles
    tests: dict[str, ExampleFiles]  # held-out sets, by name
    num_steps: int  # of the whole run


def for_device(config: TrainConfig, device: str) -> TrainConfig:
    """The settings with the dtype of the lane, "cpu" or "cuda", where none is given."""
    if config.model.dtype != "auto":
        return config
    return replace(config, model=replace(config.model, dtype=DTYPE_OF_LANE[device]))


def needs_reference(config: TrainConfig) -> bool:
    """Whether the loss reads the log-probs of a reference model."""
    if not isinstance(config, DPOConfig):
        return False
    return "reference_log_probs" in get_needs(PREFERENCE_LOSSES[config.loss])


def has_reference_model(config: TrainConfig) -> bool:
    """Whether that is a model of its own; one with adapters is its own reference."""
    return needs_reference(config) and not config.engine.lora.rank


def check_train_inputs(config: TrainConfig) -> TrainInputs:
    """Load the data and check model, layout and names; raises ConfigError for the first fault."""
    _check_functions(config)
    check_trackers(config.trainer.trackers)
    backend_of(config.engine).check_modules(config.engine.modules, lane())
    found = _check_model(config)
    tokenizer = load_tokenizer(config.model.path, config.model.chat_date)
    check_tokenizer_matches(tokenizer, get_field(found, "vocab_size"))
    data = get_data_config(config)
    positions = found.get("max_position_embeddings")
    if positions is not None and data.max_tokens > positions:
        raise ConfigError(
            f"data.max_tokens={data.max_tokens}; allowed: up to the model's "
            f"max_position_embeddings={positions}"
        )
    train = _load(config, list_train_files(data), tokenizer)
    _check_train_rows(config, train)
    tests, num = {}, config.trainer.eval_samples
    for name, (setting, file) in list_test_files(data).items():
        tests[name] = _load(config, {setting: file}, tokenizer)
        _refuse_fewer(f"trainer.eval_samples={num}", num, setting, len(tests[name]))
    steps = count_steps(config, len(train))
    resolve_schedule("engine.optimizer", config.engine.optimizer, steps)
    return TrainInputs(train, tests, steps)


def _check_train_rows(config: TrainConfig, train: ExampleFiles) -> None:
    """Refuse to draw more rows at a time than there are: some would come twice."""
    data, size = get_data_config(config), config.trainer.batch_size
    setting, files = f"trainer.batch_size={size}", list(list_train_files(data))
    if not data.train_weights:
        return _refuse_fewer(setting, size, " and ".join(files), len(train))
    for file, weight, num in zip(files, data.train_weights, train.sizes, strict=True):
        drawn = math.ceil(size * weight / sum(data.train_weights))
        _refuse_fewer(f"{setting} takes {drawn} of this file", drawn, file, num)


def _refuse_fewer(setting: str, drawn: int, source: str, num_rows: int) -> None:
    if drawn > num_rows:
        raise ConfigError(f"{setting}: {source} has {num_rows} rows; allowed: up to as many")


def _check_functions(config: TrainConfig) -> None:
    if isinstance(config, SFTConfig):
        AGGREGATIONS.bind(config.loss_aggregation, {})
    if isinstance(config, DPOConfig):
        PREFERENCE_LOSSES.bind(config.loss, config.loss_settings)
        needed = get_needs(PREFERENCE_LOSSES[config.loss])
        check_needs(needed, {"reference_log_probs"}, f"loss={config.loss!r}")


def _check_model(config: TrainConfig) -> HFConfig:
    """config.json, when the settings fit it and the weights are those of it."""
    found = read_checkpoint_config(config.model.path)
    get_family(found)
    _check_kind(config, found)
    resolve_model_layout("engine.layout", config.engine.layout, get_model_sizes(found))
    reader = CheckpointReader(config.model.path)
    held = reader.read_config()  # layers for prediction that the weights lack are left out
    resolve_model_engine("engine", config.engine, get_model_sizes(held))
    weights = map_model_weights(held, pad_vocab_size(held, 1))
    reader.check(list_logical_tensors(weights))
    if config.engine.lora.rank:
        check_targets("engine.lora", weights, config.engine.lora)
    return found


def _check_kind(config: TrainConfig, found: HFConfig) -> None:
    """A language model; for a reward model also one, in a family that transformers has them of."""
    head = get_value_head_suffix(found)
    if not isinstance(config, RMConfig):
        if head:
            raise ConfigError(
                f"model.path={config.model.path!r} is a {found['architectures'][0]}; allowed: a "
                "language model"
            )
        return
    import transformers  # slow to import

    [architecture] = build_value_config(found, SEQUENCE)["architectures"]
    if not architecture.endswith(SEQUENCE) or not hasattr(transformers, architecture):
        raise ConfigError(
            f"model.path={config.model.path!r} would become a {architecture}, which is no reward "
            "model that transformers loads; allowed: a language model of a family with a "
            "...ForSequenceClassification, or such a checkpoint with one label"
        )


def _load(
    config: TrainConfig, files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase
) -> ExampleFiles:
    """Those of sources, by setting."""
    data, found = get_data_config(config), list[AnyExamples]()
    for setting, name in files.items():
        if isinstance(data, ConversationsConfig):
            found.append(load_conversations(name, data, tokenizer, setting))
        else:
            found.append(load_pairs(name, data, tokenizer, setting))
        if num := found[-1].num_dropped:
            print(
                f"{setting}={name!r}: {num} of {found[-1].num_rows} rows left out: more than "
                f"data.max_tokens={data.max_tokens} tokens"
            )
    return ExampleFiles(*found)


def describe_inputs(config: TrainConfig, inputs: TrainInputs) -> list[str]:
    what = "conversations" if count_row_conversations(config) == 1 else "pairs"
    num_held_out = sum(map(len, inputs.tests.values()))
    held_out = f", {num_held_out} held out" if num_held_out else ""
    return [
        f"model: {config.model.path}",
        f"data: {len(inputs.train)} {what} to train{held_out}",
        f"{inputs.num_steps} steps of {config.trainer.batch_size} {what}, "
        f"{inputs.num_steps * config.trainer.batch_size / len(inputs.train):.2f} epochs",
    ]
