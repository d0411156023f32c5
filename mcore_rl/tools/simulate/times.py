"""Inputs of a simulation: seconds of each part, lengths of responses, failures."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from mcore_rl.config.checks import check_at_least, check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.models.base import HFConfig
from mcore_rl.planner import generation
from mcore_rl.planner.flops import count_work
from mcore_rl.planner.hardware import Hardware
from mcore_rl.planner.step import get_dtype, predict_step
from mcore_rl.planner.training import Load, TrainingModel, check_backend


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each part, as a plan predicts or a run measured them.

    The defaults are an example: a step of `mcore-rl plan simulate` takes about a minute with them.
    """

    decode_s: float = 0.006  # a token of every response of a server, whatever their number
    decode_response_s: float = 0.00002  # more for each response that a server generates
    prefill_token_s: float = 0.00002  # a token of a prompt, while the server decodes nothing
    responses_per_server: int = 256  # at once; others wait
    reward_s: float = 0.5  # from the last token of a group to its rewards
    log_prob_s: float = 0.0  # a call for log-probs, whatever the tokens
    log_prob_token_s: float = 0.000015  # a token, on a data-parallel rank
    train_token_s: float = 0.00005  # a token, forward and backward, on a data-parallel rank
    optimizer_s: float = 0.5  # an optimizer step
    weight_sync_s: float = 5.0  # new weights into all servers
    server_start_s: float = 120.0  # of a server that has died
    call_s: float = 0.002  # a call from the driver to a rank and back

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            check_at_least(name, value, 0)
        check_positive("decode_s", self.decode_s)
        check_at_least("responses_per_server", self.responses_per_server, 1)

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        """Load a YAML or JSON file of fields; those that are left out are the defaults.

        Raises:
            ConfigError: it cannot be read, or has a field that does not exist, or no number.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"--times={path}: {error}") from error
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(content, dict):
            raise ConfigError(f"--times={path} has no fields; allowed: {', '.join(names)}")
        for name, value in content.items():
            if name not in names:
                raise ConfigError(f"--times={path}: {name!r}; allowed: {', '.join(names)}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"--times={path}: {name}={value!r}; allowed: a number")
        return cls(**content)


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Tokens of responses: log-normal, or drawn from those of a file."""

    median: float = 1000.0
    sigma: float = 0.8
    measured: tuple[int, ...] = ()  # drawn from, if there are any

    @classmethod
    def parse(cls, text: str) -> ResponseLengths:
        """Parse `lognormal:MEDIAN:SIGMA`, or a file with a number of tokens a line.

        Raises:
            ConfigError: it is neither.
        """
        kind, *numbers = text.split(":")
        if kind == "lognormal":
            try:
                median, sigma = map(float, numbers)
            except ValueError:
                median = sigma = -1.0
            if not (1 <= median < float("inf") and 0 <= sigma < float("inf")):
                raise ConfigError(f"--lengths={text}; allowed: lognormal:1000:0.8, or a file")
            return cls(median, sigma)
        try:
            measured = tuple(map(int, Path(text).read_text(encoding="utf-8").split()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--lengths={text}: {error}; allowed: lognormal:1000:0.8, or a file with a "
                "number of tokens a line"
            ) from error
        if not measured or min(measured) < 1:
            raise ConfigError(f"--lengths={text}: allowed: one length a line, from 1")
        return cls(measured=measured)

    def draw(self, seed: list[int], num: int) -> npt.NDArray[np.int64]:
        """Return the tokens of responses without a limit: [num]."""
        rng = np.random.default_rng(seed)
        if self.measured:
            return rng.choice(np.array(self.measured, np.int64), num)
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(num))
        return np.clip(drawn, 1, 2**31).astype(np.int64)


_MOST_PER_ENTRY = 32  # tokens that an entry of a column stands for


@dataclass(frozen=True, slots=True)
class Workload:
    """A job to simulate, without the loop."""

    times: StepTimes = StepTimes()
    lengths: ResponseLengths = ResponseLengths()
    prompt_tokens: int = 512
    tokens_per_entry: int = _MOST_PER_ENTRY  # that an entry of a simulated column stands for
    server_failures_per_hour: float = 0.0  # of each server
    seed: int = 1

    def draw_failure_s(self, server: int, restart: int) -> float:
        """Draw the seconds that a server lives: exponential, with the mean of its rate."""
        if not self.server_failures_per_hour:
            return float("inf")
        rng = np.random.default_rng([self.seed, 2, server, restart])
        return float(rng.exponential(3600.0 / self.server_failures_per_hour))

    def count_entries(self, num_tokens: Any) -> Any:
        """Return the entries that stand for tokens, at least one."""
        return -(-num_tokens // self.tokens_per_entry)


def choose_tokens_per_entry(config: RLConfig) -> int:
    """Return the tokens that an entry stands for: few enough that lengths are hardly rounded."""
    return max(1, min(_MOST_PER_ENTRY, config.rollout.response_limit // 256))


_NUM_DRAWN = 2048  # lengths that a prediction is made for


def predict_times(
    config: RLConfig,
    model: HFConfig,
    hardware: Hardware,
    lengths: ResponseLengths,
    prompt_tokens: int,
    sync_bytes: float | None = None,
) -> StepTimes:
    """Predict the seconds of each part, as `mcore-rl plan step` does (docs/planning_step.md).

    Those of rewards, restarts and calls are no part of a plan: they are the defaults.

    Args:
        config: Resolved settings.
        model: config.json of the policy.
        sync_bytes: See `predict_step`.
    """
    longest = config.rollout.response_limit
    drawn = np.minimum(lengths.draw([0], _NUM_DRAWN), longest)
    planned = generation.Lengths(
        float(drawn.mean()), longest, prompt=prompt_tokens, values=tuple(drawn.tolist())
    )
    check_backend(config.actor)
    work = count_work(model)
    step = predict_step(config, model, hardware, planned, sync_bytes=sync_bytes, work=work)
    engine = TrainingModel(work, config.actor, hardware, get_dtype(config, config.actor))
    forward_s = engine.predict_forward(Load(step.tokens, planned.sequence))
    update, dp = step.update, config.actor.layout.dp
    once_s = update.data_parallel_s + update.optimizer_s  # whatever the number of tokens

    server = generation.ServerModel(work, model, config.rollout, hardware, config.model.dtype)
    slots = server.count_slots(prompt_tokens + planned.mean)
    # A line through a pass of one response and one of as many as a server has at once.
    most, context = max(2, step.generation.most_running), prompt_tokens + planned.mean / 2
    one_s, most_s = (server.predict_pass(num, 1, context)[0] for num in (1, most))
    response_s = (most_s - one_s) / (most - 1)
    num_prefilled = max(prompt_tokens, config.rollout.max_num_batched_tokens or 8192)
    return StepTimes(
        decode_s=one_s - response_s,
        decode_response_s=response_s,
        prefill_token_s=server.predict_prefill(num_prefilled, prompt_tokens) / num_prefilled,
        responses_per_server=slots,
        log_prob_token_s=forward_s * dp / step.tokens,
        train_token_s=(update.total_s - once_s) * step.num_mini_batches * dp / step.tokens,
        optimizer_s=once_s,
        weight_sync_s=step.weight_sync_s,
    )
