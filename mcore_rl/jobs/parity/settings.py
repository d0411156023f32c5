"""Options and prompts of a comparison, checked before any engine starts."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.files import read_checkpoint_info
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.allowed import DTYPES
from mcore_rl.config.checks import (
    check_at_least,
    check_choice,
    check_divides,
    check_exists,
    check_model_exists,
    check_positive,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.packages import check_installed
from mcore_rl.config.rules_engine import validate_layout, validate_model_layout
from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig, ModelConfig
from mcore_rl.data.tokenizer import read_tokenizer
from mcore_rl.engine.base import EngineSpec
from mcore_rl.jobs.parity.engines import VLLMSpec
from mcore_rl.jobs.remote_paths import fetch_model
from mcore_rl.models.base import (
    HFConfig,
    get_family,
    get_field,
    get_model_sizes,
    pad_vocab_size,
    read_config,
    use_family,
)
from mcore_rl.models.rope import count_positions
from mcore_rl.reshard.rules import list_logical_tensors

HF, VLLM = "hf", "vllm"
_LENGTHS = (3, 7, 12, 21, 34, 55)  # of the sampled prompts, in tokens
_SEED = 0
CONTINUATION = 16  # tokens that vLLM samples after each prompt
# Bounds on the largest and on the mean difference of log-probs, in nats, by dtype. In float32 the
# engines of a small model agree to 1e-5. In bfloat16 rounding gives 1 at single tokens and 0.02 on
# average, and more where it tips a router: the mean is the sharper test.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2.0}
MEAN_TOLERANCES = {"float32": None, "bfloat16": 0.1}

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class ParitySettings:
    """Options of `mcore-rl verify parity`; "" for an option that was not given."""

    model: str  # folder of a Hugging Face checkpoint, which Megatron loads
    layout: Layout
    against: tuple[str, ...]
    dtype: str = "float32"
    tolerance: float | None = None  # None: TOLERANCES of the dtype
    prompts: str = ""  # a file
    reference: str = ""  # folder that the other engines load; default: `model`
    checkpoint: str = ""  # Megatron checkpoint to load over the weights of `model`
    vllm_tp: int = 1
    timeout_s: float = 3600.0  # per request to an engine
    family: str = ""  # as model.family

    @property
    def inner_timeout_s(self) -> float:
        """Timeout inside an engine: longer than timeout_s, whose error names the stuck process."""
        return self.timeout_s + 60.0


@dataclass(frozen=True, slots=True)
class ParityPlan:
    """Settings with the inputs that were read and checked."""

    settings: ParitySettings
    prompts: list[list[int]]  # token ids
    engine: EngineSpec
    server: VLLMSpec | None  # None without vLLM
    num_layers: int

    @property
    def reference(self) -> str:
        return self.settings.reference or self.settings.model

    @property
    def tolerance(self) -> float:
        tolerance = self.settings.tolerance
        return TOLERANCES[self.settings.dtype] if tolerance is None else tolerance

    @property
    def mean_tolerance(self) -> float | None:
        return MEAN_TOLERANCES[self.settings.dtype]


def build_plan(settings: ParitySettings) -> ParityPlan:
    """Read and check all inputs.

    Raises:
        ConfigError: An option or input is wrong.
    """
    use_family(settings.family, "--family")
    _check_options(settings)
    settings = replace(
        settings,
        model=fetch_model("--model", settings.model),
        reference=fetch_model("--reference", settings.reference),
    )
    model = _read_model_config("--model", settings.model)
    sizes = get_model_sizes(model)
    validate_model_layout("--layout", settings.layout, sizes)
    configs = [model]
    if settings.reference:
        configs.append(_read_model_config("--reference", settings.reference))
    uses_vllm = VLLM in settings.against
    if uses_vllm:
        heads = get_model_sizes(configs[-1]).num_attention_heads
        check_divides("--vllm-tp", settings.vllm_tp, "attention heads", heads)
    prompts = _load_prompts(settings, configs, CONTINUATION + 1 if uses_vllm else 0)
    server = None
    if uses_vllm:
        longest = max(map(len, prompts)) + CONTINUATION + 1
        path = settings.reference or settings.model
        timeout_s = settings.inner_timeout_s
        server = VLLMSpec(path, settings.dtype, longest, settings.vllm_tp, timeout_s)
    engine = _build_engine_spec(settings, model)
    return ParityPlan(settings, prompts, engine, server, sizes.num_layers)


def _check_options(settings: ParitySettings) -> None:
    for name in settings.against:
        check_choice("--against", name, (HF, VLLM))
    if not settings.against:
        raise ConfigError(f"--against names no engine; allowed: {HF}, {VLLM} or both")
    check_choice("--dtype", settings.dtype, DTYPES)
    if settings.tolerance is not None and not 0 <= settings.tolerance < math.inf:
        raise ConfigError(f"--tolerance={settings.tolerance}; allowed: 0 or more, in nats")
    check_at_least("--vllm-tp", settings.vllm_tp, 1)
    check_positive("--timeout", settings.timeout_s)
    if VLLM in settings.against:
        check_installed(f"--against={VLLM}", "vllm", HF)
    validate_layout("--layout", settings.layout)
    num_gpus, needed = torch.cuda.device_count(), settings.layout.world_size
    if 0 < num_gpus < needed:
        raise ConfigError(f"--layout has {needed} ranks; this machine has {num_gpus} GPUs")


def _read_model_config(option: str, path: str) -> HFConfig:
    """Read the config of a checkpoint; check that its family is known and no tensor is missing."""
    check_model_exists(option, path)
    try:
        get_family(read_config(path))
        reader = CheckpointReader(path)
        config = reader.read_config()
        weights = get_family(config).weights(config, pad_vocab_size(config, 1))
        reader.check(list_logical_tensors(weights))
    except ConfigError as error:
        reason = str(error).removeprefix(f"model.path={path!r}: ")
        raise ConfigError(f"{option} {path}: {reason}") from error
    return config


def _load_prompts(
    settings: ParitySettings, configs: list[HFConfig], num_after: int
) -> list[list[int]]:
    """Return prompts as token ids, short enough for `num_after` more tokens after each."""
    vocab_size = min(get_field(config, "vocab_size") for config in configs)
    positions = [count_positions(config) for config in configs]
    longest = min(filter(None, positions), default=sys.maxsize) - num_after
    if longest < 2:
        raise ConfigError(
            f"config.json: the positions of the model leave {longest} tokens for a prompt; "
            "allowed: 2 or more"
        )
    if settings.prompts:
        check_exists("--prompts", settings.prompts)
        prompts = read_prompts(settings.prompts, settings.model, vocab_size, longest)
    else:
        prompts = sample_prompts(vocab_size, longest)
    if not num_after and min(map(len, prompts)) < 2:
        row = [len(ids) for ids in prompts].index(1)
        raise ConfigError(
            f"--prompts {settings.prompts}: prompt {row} has one token, and nothing behind it to "
            f"score; allowed: two tokens or more, or --against with {VLLM}, which continues prompts"
        )
    return prompts


def _build_engine_spec(settings: ParitySettings, config: HFConfig) -> EngineSpec:
    num_threads = len(os.sched_getaffinity(0)) // settings.layout.world_size
    lora = _read_checkpoint_lora(settings, config) if settings.checkpoint else LoRAConfig()
    engine = EngineConfig(layout=settings.layout, lora=lora, threads_per_rank=max(1, num_threads))
    model = ModelConfig(path=settings.model, dtype=settings.dtype, family=settings.family)
    timeout_s = settings.inner_timeout_s
    return EngineSpec(model, engine, seed=0, num_top_log_probs=1, timeout_s=timeout_s)


def _read_checkpoint_lora(settings: ParitySettings, config: HFConfig) -> LoRAConfig:
    """Read the adapters of a Megatron checkpoint; check that it fits the model and the dtype."""
    check_exists("--checkpoint", settings.checkpoint)
    info: dict[str, Any] = read_checkpoint_info(Path(settings.checkpoint))
    if info.get("vocab_size") != config["vocab_size"]:
        raise ConfigError(
            f"--checkpoint {settings.checkpoint} is of another model: its vocab_size is "
            f"{info.get('vocab_size')}, that of --model is {config['vocab_size']}"
        )
    if info.get("dtype") != settings.dtype:
        raise ConfigError(
            f"--dtype={settings.dtype}: --checkpoint {settings.checkpoint} was written with "
            f"{info.get('dtype')!r}; allowed: the same"
        )
    return LoRAConfig(**info["lora"]) if info.get("lora") else LoRAConfig()


def sample_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Sample prompts of up to `longest` tokens; the same for all models of a vocabulary size."""
    random = np.random.default_rng(_SEED)
    lengths = [min(length, longest) for length in _LENGTHS]
    return [random.integers(0, vocab_size, length).tolist() for length in lengths]


def read_prompts(path: str, model: str, vocab_size: int, longest: int) -> list[list[int]]:
    """Read a file of prompts, one text per line or JSON lines, as token ids.

    The file is JSON lines if its first line begins with "{": each has "prompt" (a text) or
    "prompt_ids". The tokenizer of the folder `model` tokenizes texts. Empty lines are skipped.

    Raises:
        ConfigError: The file, a line or the tokenizer is wrong.
    """
    lines = [(n, line) for n, line in enumerate(_read_lines(path), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path} holds no prompt; it needs at least one line")
    is_json = lines[0][1].lstrip().startswith("{")
    tokenizer: Any = None

    def tokenize(text: str) -> list[int]:
        nonlocal tokenizer
        tokenizer = tokenizer or read_tokenizer(model)
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    prompts = []
    for number, line in lines:
        where = f"--prompts {path}, line {number}"
        ids = _parse_json_prompt(line, where, tokenize) if is_json else tokenize(line)
        check_token_ids(ids, vocab_size, longest, where)
        prompts.append(ids)
    return prompts


def check_token_ids(ids: list[int], vocab_size: int, longest: int, where: str) -> None:
    """Raise ConfigError if a prompt is empty, too long or has an id outside the vocabulary."""
    if not ids:
        raise ConfigError(f"{where}: the prompt has no tokens; it needs at least one")
    if len(ids) > longest:
        raise ConfigError(
            f"{where}: the prompt has {len(ids)} tokens; allowed: up to {longest}, what "
            "the positions of the model leave for it"
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: token id {token} is not of the vocabulary; allowed: 0 to "
                f"{vocab_size - 1}"
            )


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read as UTF-8 text: {error}") from error


def _parse_json_prompt(line: str, where: str, tokenize: Tokenize) -> list[int]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    keys = [key for key in ("prompt", "prompt_ids") if isinstance(entry, dict) and key in entry]
    if len(keys) != 1:
        raise ConfigError(f'{where} needs an object with one of "prompt" and "prompt_ids"')
    value = entry[keys[0]]
    if keys[0] == "prompt":
        if not isinstance(value, str):
            raise ConfigError(f'{where}: "prompt" is {value!r}; allowed: a text')
        return tokenize(value)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ConfigError(f'{where}: "prompt_ids" is no list of integers')
    return value
