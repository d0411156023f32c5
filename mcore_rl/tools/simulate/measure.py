"""Seconds of a step's parts, measured on this machine by small steps of a job.

A job takes steps of a quarter and of three quarters of its prompts, in turns. A line through the
medians of both gives what a part takes once and what it takes a token, so that steps of another
size, with other lengths or another loop can be simulated. All that a part waits for is in these
numbers: kernels, launches, Python, and the calls of Ray.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

import pyarrow.parquet as pq

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.sample_tables import list_tables
from mcore_rl.observability.timeline import DRIVER, TIMELINE_FILE, StepTimeline, read_timeline
from mcore_rl.tools.simulate.run import prepare_config
from mcore_rl.tools.simulate.times import ResponseLengths, StepTimes
from mcore_rl.trainers.sync import SyncTrainer

PARTS = ("generate", "log_probs", "update", "weight_sync")
_ROUNDS = 5  # steps of each size; those of the first round warm up, and do not count


class SmallStepsTrainer(SyncTrainer):
    """The synchronous loop, whose steps have these shares of the prompts in turns."""

    shares: ClassVar[Sequence[float]] = (0.25, 0.75)

    def steps(self) -> Iterator[int]:
        """Yield the number of each step, with trainer.prompts_per_step set for it."""
        num_prompts = self.config.trainer.prompts_per_step
        for step in super().steps():
            share = self.get_share(step)
            self.config.trainer.prompts_per_step = _count_prompts(share, num_prompts)
            yield step

    @classmethod
    def get_share(cls, step: int) -> float:
        """Return the share of the prompts that a step, from 1 on, has."""
        return cls.shares[(step - 1) % len(cls.shares)]


def _count_prompts(share: float, num_prompts: int) -> int:
    return max(1, round(share * num_prompts))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a synchronous run.

    Attributes:
        step: Number of the step, from 1 on.
        seconds: Of each part.
        prompts: Tokens of the prompt of each sample.
        responses: Tokens of each response.
        events: Phases of the driver, and calls of each role, in the order of their starts.
    """

    step: int
    seconds: Mapping[str, float]
    prompts: Sequence[int]
    responses: Sequence[int]
    events: Mapping[str, Sequence[str]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, with their prompts."""
        return sum(self.prompts) + sum(self.responses)

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Hold the inputs of a simulation that `measure_times` measures."""

    times: StepTimes
    lengths: ResponseLengths
    prompt_tokens: int  # mean


def list_events(timeline: StepTimeline) -> dict[str, list[str]]:
    """Return the phases of the driver and the calls of each role, ordered by their first starts.

    What is between phases of `PARTS` is left out, such as evaluations and tables of samples, which
    simulated runs do not have. A name is listed once: calls that follow each other closely are one
    span of a timeline, so that the number of spans depends on the machine.
    """
    phases = [span for span in timeline.spans if span.role == DRIVER and span.name in PARTS]
    spans = [
        span
        for span in sorted(timeline.spans, key=lambda span: span.start_s)
        if any(phase.start_s <= span.start_s <= phase.end_s for phase in phases)
    ]
    return {
        role: list(dict.fromkeys(span.name for span in spans if span.role == role))
        for role in sorted({span.role for span in spans})
    }


def measure_phases(timeline: StepTimeline) -> dict[str, float]:
    """Return the seconds of each phase of the driver in a step."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for span in timeline.spans:
        if span.role == DRIVER and span.name in seconds:
            seconds[span.name] += span.end_s - span.start_s
    return seconds


def read_steps(run: Path) -> list[MeasuredStep]:
    """Read the steps of a synchronous run whose samples and spans are both written, in order.

    `TimelineWriter` writes the spans of the first steps, then of one in ten.
    """
    timelines = {t.step: t for t in read_timeline(run / TIMELINE_FILE) if t.phase == "training"}
    steps = []
    for step, path in list_tables(run).items():
        if (timeline := timelines.get(step)) is None:
            continue
        table = pq.read_table(path, columns=["prompt_ids", "response_ids"])
        prompts, responses = (
            [len(row) for row in table.column(name).to_pylist()]
            for name in ("prompt_ids", "response_ids")
        )
        seconds, events = measure_phases(timeline), list_events(timeline)
        steps.append(MeasuredStep(step, seconds, prompts, responses, events))
    return steps


def fit_times(steps: Sequence[MeasuredStep], config: RLConfig) -> StepTimes:
    """Return the seconds of parts of a run, from steps of two sizes or more.

    A server decodes a token of all its responses in `decode_s + responses * decode_response_s`:
    together the longest response times the first plus all tokens times the second. The latter has
    prefills, too. Rewards and calls are in the parts that wait for them.

    Raises:
        ConfigError: all steps are of one size.
    """
    dp, servers = config.actor.layout.dp, config.rollout.num_servers
    generated = [(sum(step.responses) / servers, step.seconds["generate"]) for step in steps]
    trained = {
        part: [(step.num_tokens / dp, step.seconds[part]) for step in steps]
        for part in ("log_probs", "update")
    }
    generate_s, decode_response_s = _fit_line(generated)
    log_prob_s, log_prob_token_s = _fit_line(trained["log_probs"])
    update_s, train_token_s = _fit_line(trained["update"])
    longest = median(max(step.responses) for step in steps)
    return StepTimes(
        decode_s=max(generate_s / longest, 1e-9),
        decode_response_s=decode_response_s,
        prefill_token_s=0.0,
        responses_per_server=config.rollout.max_num_seqs or StepTimes().responses_per_server,
        reward_s=0.0,
        log_prob_s=log_prob_s,
        log_prob_token_s=log_prob_token_s,
        train_token_s=train_token_s,
        optimizer_s=update_s / config.algorithm.num_mini_batches,
        weight_sync_s=median(step.seconds["weight_sync"] for step in steps),
        call_s=0.0,
    )


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of a line through the medians of the smaller and larger half.

    Neither is below 0: of a part that takes less for more tokens, the difference is noise.
    """
    ordered = sorted(points)
    halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    (few, fewer_s), (many, more_s) = (
        (median(x for x, _ in half), median(y for _, y in half)) for half in halves
    )
    if few == many:
        raise ConfigError(f"all steps have {few:g} tokens; allowed: steps of two sizes")
    slope = max((more_s - fewer_s) / (many - few), 0.0)
    intercept = (fewer_s + more_s - slope * (few + many)) / 2
    if intercept < 0:
        return 0.0, (fewer_s + more_s) / (few + many)
    return intercept, slope


def build_measured_config(settings: Sequence[str], mode: str, folder: Path) -> RLConfig:
    """Return the settings of a job that measures: all groups are trained on, all samples logged.

    Args:
        mode: Import path of a SmallStepsTrainer.
        folder: Output folder of the job.

    Raises:
        ConfigError: The run has a part that is not simulated, or smaller steps cannot be split.
    """
    num_prompts = prepare_config(compose_config(RLConfig, settings)).trainer.prompts_per_step
    sizes = {_count_prompts(share, num_prompts) for share in SmallStepsTrainer.shares}
    if len(sizes) < len(SmallStepsTrainer.shares):
        raise ConfigError(f"trainer.prompts_per_step={num_prompts}; allowed: from 2, for two sizes")
    for size in sizes:
        prepare_config(compose_config(RLConfig, [*settings, f"trainer.prompts_per_step={size}"]))
    config: RLConfig = compose_config(
        RLConfig,
        [
            *settings, f"trainer.mode={mode}", f"output_dir={folder}", "trainer.save_every=0",
            "algorithm.filter.group_filter=",
            "sample_log.every=1", "sample_log.max_rows=0", "sample_log.max_tokens=0",
        ],
    )  # fmt: skip
    return config


def measure_times(settings: Sequence[str]) -> MeasuredTimes:
    """Run a job of small steps on this machine, and return the seconds of parts and the lengths.

    Raises:
        ConfigError, RunFailed: as a job; the run has a part that is not simulated.
    """
    from mcore_rl.jobs import rl  # imports Ray

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        num_sizes = len(SmallStepsTrainer.shares)
        config = build_measured_config(
            [*settings, f"trainer.num_steps={num_sizes * (1 + _ROUNDS)}"],
            f"{__name__}:{SmallStepsTrainer.__name__}", folder,
        )  # fmt: skip
        rl.run(config)
        steps = [step for step in read_steps(folder) if step.step > num_sizes]
    return summarize_steps(steps, config)


def summarize_steps(steps: Sequence[MeasuredStep], config: RLConfig) -> MeasuredTimes:
    """Return the inputs of a simulation that measured steps give."""
    responses = tuple(length for step in steps for length in step.responses)
    prompts = [length for step in steps for length in step.prompts]
    return MeasuredTimes(
        fit_times(steps, config),
        ResponseLengths(measured=responses),
        max(1, round(sum(prompts) / len(prompts))),
    )
