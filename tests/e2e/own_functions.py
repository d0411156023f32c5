"""Functions that a user may write outside of the package; a job names them by import path."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mcore_rl.algorithms.advantages import grpo
from mcore_rl.algorithms.inputs import AdvantageInputs, LossInputs
from mcore_rl.algorithms.losses import ppo_clip
from mcore_rl.config.schema import GRPOSettings, PPOClipSettings
from mcore_rl.data.batch import Jagged
from mcore_rl.examples.tasks import last_digit
from mcore_rl.reshard.executor import Bucket, Exchange, GroupTransport, Pending, Transfer
from mcore_rl.rewards.registry import run_in_thread


@dataclass(frozen=True)
class LengthSettings:
    per_character: float


def length(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: LengthSettings
) -> dict[str, float]:
    return {"reward": settings.per_character * len(text), "characters": float(len(text))}


@run_in_thread  # processes that import torch would take minutes from many jobs
def fingerprint(text: str, fields: Mapping[str, Any], finish_reason: str) -> dict[str, float]:
    """Reward by the text: the mean of the parts identifies samples; half of all rewards are 1."""
    return _compute_fingerprint(text, fields, finish_reason)


def _compute_fingerprint(
    text: str, fields: Mapping[str, Any], finish_reason: str
) -> dict[str, float]:
    digest = zlib.crc32(f"{fields['answer']} {text} {finish_reason}".encode())
    return {"reward": float(digest % 2), "fingerprint": digest / 2**32}


def letters_of(verdict: str) -> float:
    """Score a verdict by its number of letters, as the model may say anything."""
    return float(sum(letter.isalpha() for letter in verdict))


def problems() -> Iterator[dict[str, Any]]:
    """Yield a few prompts, as a source of data."""
    for problem in last_digit.split_problems()[0][:10]:
        messages = [{"role": "user", "content": last_digit.question(problem)}]
        yield {"messages": messages, "answer": last_digit.answer(problem)}


def first_token(inputs: AdvantageInputs) -> Jagged:
    """Compute GRPO's advantage at the first token of a response, and none at the others."""
    responses = grpo(inputs, GRPOSettings())
    lengths = inputs.response_lengths.tolist()
    rows = [np.arange(n) == 0 for n in lengths]
    return Jagged.pack([row * a for row, a in zip(rows, responses, strict=True)], np.float32)


@dataclass(frozen=True)
class PauseSettings:
    file: str  # made when the function is called first; then there are seconds to do something


def _pause(file: str, seconds: float = 4) -> None:
    with contextlib.suppress(FileExistsError):
        Path(file).touch(exist_ok=False)
        time.sleep(seconds)


@run_in_thread
def pausing_reward(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: PauseSettings
) -> dict[str, float]:
    """While the servers generate."""
    _pause(settings.file)
    return {"reward": float(len(text))}


def pausing_loss(inputs: LossInputs, settings: PauseSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """While the actor is on its devices and has all that an update needs."""
    _pause(settings.file, 8)  # its memory is looked at every 4 s
    return ppo_clip(inputs, PPOClipSettings())


def loss_before_a_pausing_push(
    inputs: LossInputs, settings: PauseSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Pause the push of what is trained here, when the server has the first bucket."""
    _pause_pushes(settings.file)
    return ppo_clip(inputs, PPOClipSettings())


@functools.cache
def _pause_pushes(file: str) -> None:
    run = Exchange.run

    def paused(*args: Any) -> Iterator[Bucket]:
        for bucket in run(*args):
            yield bucket
            _pause(file, 8)

    Exchange.run = paused


def loss_before_a_pausing_transfer(
    inputs: LossInputs, settings: PauseSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Pause the push of what is trained here, when the servers wait for the first message."""
    _pause_transfers(settings.file)
    return ppo_clip(inputs, PPOClipSettings())


@functools.cache
def _pause_transfers(file: str) -> None:
    start = GroupTransport.start

    def paused(transport: GroupTransport, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        if transfers and transfers[0].is_send:
            _pause(file)
        return start(transport, transfers)

    GroupTransport.start = paused


def every_second_group(batch):
    return batch.array("group_ids") % 2 == 0


_CALLS = itertools.count()  # of later_pausing_reward, in the process of a server


@dataclass(frozen=True)
class LaterPauseSettings:
    file: str
    after: int  # calls before the one that pauses
    log: str  # of the server whose calls they are
    seconds: float = 30  # its process is killed meanwhile


@run_in_thread
def later_pausing_reward(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: LaterPauseSettings
) -> dict[str, float]:
    """While a server generates what comes later."""
    _pause_later(settings)
    return {"reward": float(len(text))}


@run_in_thread
def later_pausing_fingerprint(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: LaterPauseSettings
) -> dict[str, float]:
    _pause_later(settings)
    return _compute_fingerprint(text, fields, finish_reason)


def _pause_later(settings: LaterPauseSettings) -> None:
    is_of_server = os.path.basename(os.path.realpath("/proc/self/fd/2")) == settings.log
    if is_of_server and next(_CALLS) >= settings.after:
        _pause(settings.file, settings.seconds)
