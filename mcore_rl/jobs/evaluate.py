"""Evaluation of a checkpoint on data sets: check, start servers, sample, count, report."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

from mcore_rl.config.eval_schema import EvalConfig, as_run, resolve_eval
from mcore_rl.config.resolve import reward_terms
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.batch_ops import fetch_batch, get_sample_columns
from mcore_rl.controller.pending import gathered
from mcore_rl.controller.worker_group import wait_until_built
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.prompt_batches import held_out_batch
from mcore_rl.data.tokenizer import check_tokenizer_matches, load_tokenizer
from mcore_rl.jobs.dry_run import say, show
from mcore_rl.jobs.eval_report import SetSamples, metrics_of, print_table
from mcore_rl.jobs.eval_resume import SAMPLES, check_content, done_before, settings_of
from mcore_rl.jobs.failure import RunFailed, summarize_failure
from mcore_rl.jobs.output import (
    STARTED,
    SUMMARY,
    TRACES,
    exclusive_run_dir,
    inspect_run_dir,
    job_scope,
    log_dir,
    write_json,
)
from mcore_rl.jobs.placement import Pools, places
from mcore_rl.jobs.preflight import check_model, prompts_of
from mcore_rl.jobs.rl import server_pool
from mcore_rl.jobs.roles import roles
from mcore_rl.jobs.run_folder import chat_date_of, model_folder
from mcore_rl.jobs.session import lane, resource, session
from mcore_rl.models.base import field, read_config
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.observability.console import StepProgress, get_stdout_console, waiting
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.observability.start import began
from mcore_rl.observability.versions import versions
from mcore_rl.observability.warnings import warn
from mcore_rl.rewards.base import FindAnswer, answers_of
from mcore_rl.rewards.judge import Judge, check_columns, check_judges
from mcore_rl.rollout.manager import RolloutPool

_MAX_NUM_SEQS = 1024  # largest default of rollout.max_num_seqs on any GPU
_ROUNDS = 4  # a call asks for this many times what the servers run at once


@dataclass(frozen=True, slots=True)
class _Inputs:
    config: EvalConfig
    run: RLConfig  # the same, as servers are started by it
    tokenizer: Any
    sets: dict[str, PromptDataset]
    find_answer: FindAnswer | None  # for majority votes

    @property
    def digests(self) -> dict[str, str]:
        """Of the rows of each set, each of which is one file."""
        return {name: "".join(prompts.digests) for name, prompts in self.sets.items()}

    def num_prompts(self, name: str) -> int:
        size = len(self.sets[name])
        return min(self.config.data.num_prompts or size, size)


def run(config: EvalConfig) -> None:
    """Run the job; everything it leaves lies in config.output_dir.

    Raises:
        ConfigError: a setting or an input is wrong; nothing has been started, nothing is left.
        RunFailed: it had to stop. The samples of data sets that were done are left.
    """
    started = began()
    resolve_eval(config)
    with (
        exclusive_run_dir(config.output_dir, config.resume, check_content) as claim,
        job_scope(claim.folder, claim.lock) as scratch,
        PeakMemory() as memory,
    ):
        with waiting("checking the inputs"):
            inputs = _check(config)
            done = _done_before(inputs, claim.folder)
        found = {name: metrics_of(samples, config.ks) for name, samples in done.items()}
        if found.keys() < inputs.sets.keys():
            (claim.folder / SUMMARY).unlink(missing_ok=True)
            found |= _sampled(inputs, found, claim.folder, scratch)
        wall_s = time.monotonic() - started
        found = {name: found[name] for name in inputs.sets}
        summary = {
            "model": inputs.run.model.path,
            "dtype": inputs.run.model.dtype,
            "sets": found,
            "seed": config.seed,
            "peak_memory_bytes": memory.peak_bytes,
            "wall_s": round(wall_s, 1),
            "versions": versions(),
        }
        _written(claim.folder / SUMMARY, summary)
        print_table(found)
        _tell_of_votes(inputs)
        print(f"{wall_s:.0f} s, in {claim.folder}")


def _done_before(inputs: _Inputs, folder: Path) -> dict[str, SetSamples]:
    num_prompts = {name: inputs.num_prompts(name) for name in inputs.sets}
    done = done_before(inputs.config, inputs.run, folder, num_prompts, inputs.digests)
    if done:
        print(f"going on in {folder}: the samples of {', '.join(done)} are there")
    return done


def _sampled(
    inputs: _Inputs, done: Collection[str], folder: Path, scratch: Path
) -> dict[str, dict[str, Any]]:
    """Metrics of the sets that are not done, by servers that are started for them."""
    config, logs = inputs.config, log_dir(folder)
    num_devices = config.rollout.num_servers * config.rollout.tp
    with (
        session(inputs.run, num_devices, scratch),
        summarize_failure(logs / TRACES),
        _serving(inputs, logs) as pool,
    ):
        write_json(folder / STARTED, settings_of(config, inputs.run, inputs.digests))
        (folder / SAMPLES).mkdir(exist_ok=True)
        left = [name for name in inputs.sets if name not in done]
        return {name: _evaluate(name, inputs, pool, folder / SAMPLES) for name in left}


def dry_run(config: EvalConfig, console: Console | None = None) -> None:
    """Check all that an evaluation checks before its start, then print what it would start.

    Raises:
        ConfigError: the job would be refused, for the same reason.
    """
    console = console or get_stdout_console()
    resolve_eval(config)
    folder, refusal = inspect_run_dir(config.output_dir, config.resume, check_content)
    with waiting("checking the inputs"):
        inputs = _check(config)
        if not refusal:
            _done_before(inputs, folder)
    n = config.rollout.n
    say(console, f"model: {inputs.run.model.path}")
    for name in inputs.sets:
        prompts = inputs.num_prompts(name)
        say(console, f"data.sets.{name}: {prompts} prompts, {prompts * n} responses")
    *_, servers = roles(inputs.run, read_config(inputs.run.model.path))
    show(servers, console)
    say(console, "", f"pass@k for k = {', '.join(map(str, config.ks))}")
    _tell_of_votes(inputs)
    end = "sizes are of one rank, without what libraries take; nothing was started"
    say(console, end, *refusal)


def _check(config: EvalConfig) -> _Inputs:
    chat_date = config.model.chat_date or chat_date_of(config.model.path)
    run = as_run(config, lane(), str(model_folder(config.model.path)), chat_date)
    Judge(config.reward, config.rollout.max_response_tokens)  # checks names and settings
    check_judges(config.reward, ())
    check_model(run)
    tokenizer = load_tokenizer(run.model.path, run.model.chat_date)
    check_tokenizer_matches(tokenizer, field(read_config(run.model.path), "vocab_size"))
    sets = {
        name: prompts_of({f"data.sets.{name}": source}, run, tokenizer)
        for name, source in config.data.sets.items()
    }
    for prompts in sets.values():
        check_columns(config.reward, prompts[0].fields)
    _tell_of_short_sets(config, sets)
    return _Inputs(config, run, tokenizer, sets, _find_answer(config))


def _tell_of_short_sets(config: EvalConfig, sets: Mapping[str, PromptDataset]) -> None:
    asked = config.data.num_prompts
    for name, prompts in sets.items():
        if asked > (size := len(prompts)):
            warn(f"data.num_prompts={asked}: data.sets.{name} has {size} rows, and all are taken")


def _find_answer(config: EvalConfig) -> FindAnswer | None:
    """Of the reward that says what is correct; a sum of several has no answer."""
    name, terms = config.scoring.term, reward_terms(config.reward)
    if name not in terms:
        return None
    key = f"reward.terms.{name}" if name else "reward"
    return answers_of(key, terms[name].name, terms[name].settings)


def _tell_of_votes(inputs: _Inputs) -> None:
    if inputs.find_answer is None:
        what = "a sum of terms (scoring.term='')"
        if not inputs.config.reward.terms or inputs.config.scoring.term:
            terms = reward_terms(inputs.config.reward)
            what = f"the reward {terms[inputs.config.scoring.term].name!r}"
        print(f"no majority@k: {what} does not say what the answer in a response is")


@contextmanager
def _serving(inputs: _Inputs, logs: Path) -> Iterator[RolloutPool]:
    """Servers that have loaded the checkpoint."""
    config = inputs.run
    with (
        Pools(config, resource(), logs) as pools,
        server_pool(config, pools) as servers,
    ):
        with waiting("starting the servers"):
            wait_until_built(servers.groups)
            for line in places([servers]):
                print(line)
            gathered(servers.submit("prepare"))
            gathered(servers.submit_start())
            servers.started()
        yield RolloutPool(servers, config.rollout, config.seed)


def _evaluate(name: str, inputs: _Inputs, pool: RolloutPool, folder: Path) -> dict[str, Any]:
    """Sample one set, write its samples, and return its metrics."""
    config, servers = inputs.config, inputs.config.rollout
    prompts = held_out_batch(inputs.sets[name], inputs.num_prompts(name))
    at_once = servers.num_servers * (servers.max_num_seqs or _MAX_NUM_SEQS)
    size = max(servers.num_servers, _ROUNDS * at_once // servers.n)
    parts: list[Batch] = []
    with (
        StepProgress(name, len(prompts) * servers.n) as progress,
        ACTIVITY.phase(f"sampling {name}"),
    ):
        so_far = _SoFar(progress, time.monotonic())
        for start in range(0, len(prompts), size):
            rows = range(start, min(start + size, len(prompts)))
            made = pool.generate(prompts.take(rows), servers.n, on_samples=so_far.heard)
            parts.append(fetch_batch(made, f"the samples of {name}", config.timeouts.call_s))
            progress.update(so_far.num, so_far.report)
    samples = SetSamples.of(
        prompts,
        Batch.concat(parts),
        inputs.tokenizer,
        inputs.find_answer,
        config.scoring,
        servers.stop,
    )
    _written(folder / f"{name}.parquet", samples)
    return metrics_of(samples, config.ks)


@dataclass(slots=True)
class _SoFar:
    """What has come of a set."""

    progress: StepProgress
    begun: float
    num: int = 0
    rewards: float = 0.0
    num_tokens: int = 0

    def heard(self, found: Sequence[Batch]) -> None:
        for batch in found:
            batch = get_sample_columns(batch)
            self.num += len(batch)
            self.rewards += float(batch.array("rewards").sum())
            self.num_tokens += int(batch.array("response_tokens").sum())
        if self.num:
            self.progress.draw(self.num, self.report)

    @property
    def report(self) -> str:
        rate = self.num_tokens / (time.monotonic() - self.begun)
        return f"reward {self.rewards / self.num:.3f}  {rate:,.0f} tok/s"


def _written(path: Path, content: Any) -> None:
    try:
        if isinstance(content, SetSamples):
            aside = path.with_name(f".{path.name}.partial")
            pq.write_table(content.table(), aside)
            aside.replace(path)
        else:
            write_json(path, content)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error}") from error
