"""What a comparison is asked for, its prompts, and all that can be wrong: checked first of all."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.files import read_checkpoint_info
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.checks import (
    check_at_least,
    check_choice,
    check_divides,
    check_exists,
    check_positive,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import DTYPES
from mcore_rl.config.resolve_engine import resolve_layout, resolve_model_layout
from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig, ModelConfig
from mcore_rl.data.tokenizer import read_tokenizer
from mcore_rl.engine.base import EngineSpec
from mcore_rl.jobs.parity.engines import ServerSpec, kv_cache_bytes
from mcore_rl.models.base import (
    HFConfig,
    get_family,
    get_field,
    get_model_sizes,
    pad_vocab_size,
    read_config,
)
from mcore_rl.reshard.rules import list_logical_tensors

HF, VLLM = "hf", "vllm"
_LENGTHS = (3, 7, 12, 21, 34, 55)  # tokens, of the prompts that are drawn
_SEED = 0
CONTINUATION = 16  # tokens that vLLM samples after each prompt
# Bounds on the largest and on the mean difference of log-probs, in nats, by dtype. In float32 the
# engines of a small model agree to 1e-5. In bfloat16 rounding gives 1 at single tokens and 0.02 on
# average, and more where it tips a router: the mean is the sharper test.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2.0}
MEAN_TOLERANCES = {"float32": None, "bfloat16": 0.1}

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for; "" where an option is left out."""

    model: str  # folder of a Hugging Face checkpoint, which Megatron loads
    layout: Layout
    against: tuple[str, ...]
    dtype: str = "float32"
    tolerance: float | None = None  # None: the one of the dtype
    prompts: str = ""  # a file
    reference: str = ""  # folder that the other engines load; the model's by default
    checkpoint: str = ""  # Megatron checkpoint that is loaded over the model's weights
    vllm_tp: int = 1
    timeout_s: float = 3600.0  # of what one engine does at a time

    @property
    def inner_timeout_s(self) -> float:
        """Of waits inside an engine: they outlast ours, so that we tell who is stuck."""
        return self.timeout_s + 60.0


@dataclass(frozen=True, slots=True)
class ParityPlan:
    """A request whose inputs have been read and fit together."""

    request: Request
    prompts: list[list[int]]  # token ids
    engine: EngineSpec
    server: ServerSpec | None  # None when vLLM takes no part
    num_layers: int

    @property
    def reference(self) -> str:
        return self.request.reference or self.request.model

    @property
    def tolerance(self) -> float:
        given = self.request.tolerance
        return TOLERANCES[self.request.dtype] if given is None else given

    @property
    def mean_tolerance(self) -> float | None:
        return MEAN_TOLERANCES[self.request.dtype]


def checked(request: Request) -> ParityPlan:
    """Read and check all inputs.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    _check_options(request)
    model = _checked_model("--model", request.model)
    sizes = get_model_sizes(model)
    resolve_model_layout("--layout", request.layout, sizes)
    configs = [model]
    if request.reference:
        configs.append(_checked_model("--reference", request.reference))
    with_vllm = VLLM in request.against
    if with_vllm:
        heads = get_model_sizes(configs[-1]).num_attention_heads
        check_divides("--vllm-tp", request.vllm_tp, "attention heads", heads)
    prompts, longest = _prompts(request, configs, CONTINUATION + 1 if with_vllm else 0)
    server = None
    if with_vllm:
        longest += CONTINUATION + 1
        cache = kv_cache_bytes(configs[-1], longest)
        path = request.reference or request.model
        timeout_s = request.inner_timeout_s
        server = ServerSpec(path, request.dtype, longest, request.vllm_tp, cache, timeout_s)
    return ParityPlan(request, prompts, _engine_spec(request, model), server, sizes.num_layers)


def _check_options(request: Request) -> None:
    for name in request.against:
        check_choice("--against", name, (HF, VLLM))
    if not request.against:
        raise ConfigError(f"--against names no engine; allowed: {HF}, {VLLM} or both")
    check_choice("--dtype", request.dtype, DTYPES)
    if request.tolerance is not None and not 0 <= request.tolerance < math.inf:
        raise ConfigError(f"--tolerance={request.tolerance}; allowed: 0 or more, in nats")
    check_at_least("--vllm-tp", request.vllm_tp, 1)
    check_positive("--timeout", request.timeout_s)
    if VLLM in request.against and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"--against={VLLM}: vllm is not installed; allowed: {HF}")
    resolve_layout("--layout", request.layout)
    num_gpus, needed = torch.cuda.device_count(), request.layout.world_size
    if 0 < num_gpus < needed:
        raise ConfigError(f"--layout has {needed} ranks; this machine has {num_gpus} GPUs")


def _checked_model(option: str, path: str) -> HFConfig:
    """The config of a checkpoint whose family is known and whose tensors are all there."""
    check_exists(option, path)
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


def _prompts(
    request: Request, configs: list[HFConfig], num_after: int
) -> tuple[list[list[int]], int]:
    """(token ids, length of the longest), with room for `num_after` tokens behind each."""
    vocab_size = min(get_field(config, "vocab_size") for config in configs)
    positions = [config.get("max_position_embeddings") for config in configs]
    longest = min(filter(None, positions), default=sys.maxsize) - num_after
    if longest < 2:
        raise ConfigError(
            f"config.json: max_position_embeddings leaves {longest} tokens for a prompt; allowed: "
            "2 or more"
        )
    if request.prompts:
        check_exists("--prompts", request.prompts)
        prompts = prompts_from_file(request.prompts, request.model, vocab_size, longest)
    else:
        prompts = drawn_prompts(vocab_size, longest)
    if not num_after and min(map(len, prompts)) < 2:
        row = [len(ids) for ids in prompts].index(1)
        raise ConfigError(
            f"--prompts {request.prompts}: prompt {row} has one token, and nothing behind it to "
            f"score; allowed: two tokens or more, or --against with {VLLM}, which continues prompts"
        )
    return prompts, max(map(len, prompts))


def _engine_spec(request: Request, config: HFConfig) -> EngineSpec:
    num_threads = len(os.sched_getaffinity(0)) // request.layout.world_size
    lora = _lora_of_checkpoint(request, config) if request.checkpoint else LoRAConfig()
    engine = EngineConfig(layout=request.layout, lora=lora, threads_per_rank=max(1, num_threads))
    model = ModelConfig(path=request.model, dtype=request.dtype)
    return EngineSpec(model, engine, seed=0, num_top_log_probs=1, timeout_s=request.inner_timeout_s)


def _lora_of_checkpoint(request: Request, config: HFConfig) -> LoRAConfig:
    """The adapters that a Megatron checkpoint has; it must fit the model and the dtype."""
    check_exists("--checkpoint", request.checkpoint)
    info: dict[str, Any] = read_checkpoint_info(Path(request.checkpoint))
    if info.get("vocab_size") != config["vocab_size"]:
        raise ConfigError(
            f"--checkpoint {request.checkpoint} is of another model: its vocab_size is "
            f"{info.get('vocab_size')}, that of --model is {config['vocab_size']}"
        )
    if info.get("dtype") != request.dtype:
        raise ConfigError(
            f"--dtype={request.dtype}: --checkpoint {request.checkpoint} was written with "
            f"{info.get('dtype')!r}; allowed: the same"
        )
    return LoRAConfig(**info["lora"]) if info.get("lora") else LoRAConfig()


def drawn_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Token ids drawn from the vocabulary: the same for every model of its size.

    No prompt has more than `longest` tokens.
    """
    random = np.random.default_rng(_SEED)
    lengths = [min(length, longest) for length in _LENGTHS]
    return [random.integers(0, vocab_size, length).tolist() for length in lengths]


def prompts_from_file(path: str, model: str, vocab_size: int, longest: int) -> list[list[int]]:
    """Prompts as token ids: a text a line or, where the first line begins with "{", JSON lines.

    A JSON line has "prompt" (a text) or "prompt_ids". Texts are tokenised by the tokenizer of the
    folder `model`. Empty lines are skipped.

    Raises:
        ConfigError: the file, one of its lines or the tokenizer does not do.
    """
    lines = [(n, line) for n, line in enumerate(_read(path), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path} holds no prompt; it needs at least one line")
    as_json = lines[0][1].lstrip().startswith("{")
    tokenizer: Any = None

    def tokenize(text: str) -> list[int]:
        nonlocal tokenizer
        tokenizer = tokenizer or read_tokenizer(model)
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    found = []
    for number, line in lines:
        where = f"--prompts {path}, line {number}"
        ids = _ids_of_json(line, where, tokenize) if as_json else tokenize(line)
        check_ids(ids, vocab_size, longest, where)
        found.append(ids)
    return found


def check_ids(ids: list[int], vocab_size: int, longest: int, where: str) -> None:
    """Raises ConfigError unless there is a token, not too many, and each is of the vocabulary."""
    if not ids:
        raise ConfigError(f"{where}: the prompt has no tokens; it needs at least one")
    if len(ids) > longest:
        raise ConfigError(
            f"{where}: the prompt has {len(ids)} tokens; allowed: up to {longest}, what "
            "max_position_embeddings of config.json leaves for it"
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: token id {token} is not of the vocabulary; allowed: 0 to "
                f"{vocab_size - 1}"
            )


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read as UTF-8 text: {error}") from error


def _ids_of_json(line: str, where: str, tokenize: Tokenize) -> list[int]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    named = [name for name in ("prompt", "prompt_ids") if isinstance(entry, dict) and name in entry]
    if len(named) != 1:
        raise ConfigError(f'{where} needs an object with one of "prompt" and "prompt_ids"')
    value = entry[named[0]]
    if named[0] == "prompt":
        if not isinstance(value, str):
            raise ConfigError(f'{where}: "prompt" is {value!r}; allowed: a text')
        return tokenize(value)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ConfigError(f'{where}: "prompt_ids" is no list of integers')
    return value
