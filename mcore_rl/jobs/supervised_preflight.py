"""Checks of all inputs of a supervised job (sft, dpo, rm), before any process starts."""

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
from mcore_rl.config.rules import (
    DTYPE_OF_DEVICE,
    list_test_files,
    list_train_files,
    validate_profile,
    validate_profile_steps,
)
from mcore_rl.config.rules_engine import (
    validate_float8_dtype,
    validate_overlap_dtype,
    validate_schedule,
)
from mcore_rl.config.rules_train import (
    count_row_conversations,
    count_steps,
    get_data_config,
    validate_train,
)
from mcore_rl.config.schema import ConversationsConfig, DPOConfig, RMConfig, SFTConfig, TrainConfig
from mcore_rl.data.examples import AnyExamples, ExampleFiles, load_conversations, load_pairs
from mcore_rl.data.images import RowImages, load_row_images
from mcore_rl.data.tokenizer import check_tokenizer_matches, load_tokenizer
from mcore_rl.engine.base import (
    check_engine_package,
    check_engine_settings,
    load_backend,
    use_engine_family,
)
from mcore_rl.jobs.early_checks import require_rows, warn_of_few_rows
from mcore_rl.jobs.lengths import fill_train_length
from mcore_rl.jobs.placement import detect_device_type
from mcore_rl.jobs.remote_paths import fetch_inputs
from mcore_rl.models.base import (
    SEQUENCE,
    HFConfig,
    get_family,
    get_field,
    pad_vocab_size,
)
from mcore_rl.models.heads import build_value_config, get_value_head_suffix, map_model_weights
from mcore_rl.models.rope import count_positions
from mcore_rl.observability.trackers import check_trackers
from mcore_rl.reshard.rules import list_logical_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TrainInputs:
    train: ExampleFiles
    tests: dict[str, ExampleFiles]  # held-out sets, by name
    num_steps: int  # of the run
    images: RowImages | None = None  # reader of the images of data rows


def resolve_for_device(
    config: TrainConfig, device_type: str = "", *, needs_data: bool = True
) -> TrainConfig:
    """Check the settings of a job; fill in the defaults that its engine and the device decide.

    What can be wrong without the model is checked before the model is downloaded.

    Args:
        device_type: "cuda" or "cpu" instead of that of the nodes.
        needs_data: False if data settings may be empty and weights absent, as in a plan.

    Raises:
        ConfigError: A setting is wrong, or the engine or the device cannot do what it says.
    """
    validate_train(config, needs_data=needs_data)
    device = device_type or detect_device_type()
    check_train_engine(config, device)
    if needs_data:
        check_engine_package("engine", config.engine)
    validate_profile(config, config.engine.layout, device)
    dtype = DTYPE_OF_DEVICE[device] if config.model.dtype == "auto" else config.model.dtype
    validate_overlap_dtype("engine", config.engine, dtype)
    validate_float8_dtype("engine", config.engine, dtype)
    config = fetch_inputs(config, with_weights=needs_data)
    use_engine_family("engine", config.model, config.engine)
    config = fill_train_length(config)
    return replace(config, model=replace(config.model, dtype=dtype))


def check_train_engine(config: TrainConfig, device: str) -> None:
    """Check the backend of a job and the settings that it reads, without a model.

    Args:
        device: "cuda" or "cpu" of the ranks.

    Raises:
        ConfigError: The backend does not read a setting, or cannot do what it says.
    """
    model_type = "reward_model" if isinstance(config, RMConfig) else "language_model"
    column = getattr(get_data_config(config), "images_column", "")
    check_engine_settings("engine", config.engine, model_type, device, images_column=column)


def check_train_inputs(config: TrainConfig) -> TrainInputs:
    """Load the data; check model, layout and names.

    Raises:
        ConfigError: An input or a setting is wrong.
    """
    _check_functions(config)
    check_trackers(config.trainer.trackers)
    hf_config = _check_model(config)
    tokenizer = load_tokenizer(config.model.path, config.model.chat_date)
    check_tokenizer_matches(tokenizer, get_field(hf_config, "vocab_size"))
    data = get_data_config(config)
    positions = count_positions(hf_config)
    if positions is not None and data.token_limit > positions:
        raise ConfigError(
            f"data.max_tokens={data.token_limit}; allowed: up to the {positions} positions of the "
            "model"
        )
    images = None
    if isinstance(data, ConversationsConfig):
        images = load_row_images(data, config.model.path, config.output_dir)
    train = _load(config, list_train_files(data), tokenizer, images)
    _check_train_rows(config, train)
    tests, num = {}, config.trainer.eval_samples
    for name, (setting, file) in list_test_files(data).items():
        tests[name] = _load(config, {setting: file}, tokenizer, images)
        warn_of_few_rows("trainer.eval_samples", f"{setting}={file!r}", len(tests[name]), num)
    steps = count_steps(config, len(train))
    validate_schedule("engine.optimizer", config.engine.optimizer, steps)
    validate_profile_steps(config.profile, steps)
    return TrainInputs(train, tests, steps, images)


def _check_train_rows(config: TrainConfig, train: ExampleFiles) -> None:
    """Refuse to draw more rows at a time than a source has: some would be drawn twice."""
    data, size = get_data_config(config), config.trainer.batch_size
    setting, files = f"trainer.batch_size={size}", list(list_train_files(data))
    if not data.train_weights:
        require_rows(setting, " and ".join(files), len(train), size)
        return
    for file, weight, num in zip(files, data.train_weights, train.sizes, strict=True):
        drawn = math.ceil(size * weight / sum(data.train_weights))
        require_rows(f"{setting} takes {drawn} of this file", file, num, drawn)


def _check_functions(config: TrainConfig) -> None:
    if isinstance(config, SFTConfig):
        AGGREGATIONS.bind(config.loss_aggregation, {})
    if isinstance(config, DPOConfig):
        PREFERENCE_LOSSES.bind(config.loss, config.loss_settings)
        needed = get_needs(PREFERENCE_LOSSES[config.loss])
        check_needs(needed, {"reference_log_probs"}, f"loss={config.loss!r}")


def _check_model(config: TrainConfig) -> HFConfig:
    """Check kind, layout and weights of the model; return its config.json."""
    hf_config = read_checkpoint_config(config.model.path)
    get_family(hf_config)
    _check_kind(config, hf_config)
    reader = CheckpointReader(config.model.path)
    weights_config = reader.read_config()  # without MTP layers if the weights have none
    load_backend(config.engine).check_model("engine", config.engine, weights_config)
    weights = map_model_weights(weights_config, pad_vocab_size(weights_config, 1))
    reader.check(list_logical_tensors(weights))
    return hf_config


def _check_kind(config: TrainConfig, hf_config: HFConfig) -> None:
    """Require a language model, or for `rm` a model that transformers has reward models of."""
    if not isinstance(config, RMConfig):
        if get_value_head_suffix(hf_config):
            raise ConfigError(
                f"model.path={config.model.path!r} is a {hf_config['architectures'][0]}; allowed: "
                "a language model"
            )
        return
    import transformers  # slow to import

    [architecture] = build_value_config(hf_config, SEQUENCE)["architectures"]
    if not architecture.endswith(SEQUENCE) or not hasattr(transformers, architecture):
        raise ConfigError(
            f"model.path={config.model.path!r} would become a {architecture}, which is no reward "
            "model that transformers loads; allowed: a language model of a family with a "
            "...ForSequenceClassification, or such a checkpoint with one label"
        )


def _load(
    config: TrainConfig,
    files: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    images: RowImages | None,
) -> ExampleFiles:
    """Load the examples of all sources, which `files` has by setting."""
    data, sources = get_data_config(config), list[AnyExamples]()
    for setting, name in files.items():
        examples: AnyExamples
        if isinstance(data, ConversationsConfig):
            reader = images and images.open_beside(name)
            examples = load_conversations(name, data, tokenizer, setting, reader)
        else:
            examples = load_pairs(name, data, tokenizer, setting)
        if num := examples.num_dropped:
            print(
                f"{setting}={name!r}: {num} of {examples.num_rows} rows left out: more than "
                f"data.max_tokens={data.token_limit} tokens"
            )
        sources.append(examples)
    return ExampleFiles(*sources)


def describe_inputs(config: TrainConfig, inputs: TrainInputs) -> list[str]:
    """Return lines on the model, the data and the number of steps."""
    unit = "conversations" if count_row_conversations(config) == 1 else "pairs"
    num_held_out = sum(map(len, inputs.tests.values()))
    held_out = f", {num_held_out} held out" if num_held_out else ""
    return [
        f"model: {config.model.path}",
        f"data: {len(inputs.train)} {unit} to train{held_out}",
        f"{inputs.num_steps} steps of {config.trainer.batch_size} {unit}, "
        f"{inputs.num_steps * config.trainer.batch_size / len(inputs.train):.2f} epochs",
    ]
