"""`mcore-rl eval`, from start to end: check, start servers, sample, compute metrics, report."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from mcore_rl.agents.single_turn import Tokenizer, decode_response
from mcore_rl.algorithms.estimates import compute_mean_and_error, majority_at_k, pass_at_k
from mcore_rl.config.atomic_file import write_atomically
from mcore_rl.config.describe import flatten_settings
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.rules import TRANSFORMERS
from mcore_rl.config.rules_rollout import list_reward_terms
from mcore_rl.config.rules_train import build_server_config, validate_eval
from mcore_rl.config.schema import EvalConfig, RLConfig, ScoringConfig
from mcore_rl.controller.batch_ops import fetch_batch, get_sample_columns
from mcore_rl.controller.pending_call import gather_results
from mcore_rl.controller.worker_group import wait_until_built
from mcore_rl.data import thoughts
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.images import RowImages, load_row_images
from mcore_rl.data.prompt_batches import build_held_out_batch
from mcore_rl.data.tokenizer import check_tokenizer_matches, load_tokenizer
from mcore_rl.inference.kv_cache import DEFAULT_MAX_SEQS
from mcore_rl.inference.registry import check_server_package, check_server_settings
from mcore_rl.jobs.early_checks import warn_of_few_rows
from mcore_rl.jobs.failure import RunFailed, summarize_failure
from mcore_rl.jobs.lengths import fill_evaluation_lengths
from mcore_rl.jobs.output import (
    LOGS,
    STARTED,
    SUMMARY,
    TRACES,
    find_model_folder,
    get_log_dir,
    lock_run_dir,
    open_job_scope,
    read_chat_date,
    write_json,
)
from mcore_rl.jobs.placement import Pools, detect_device_type, get_device_resource, list_rank_nodes
from mcore_rl.jobs.preflight import check_model, load_prompt_files
from mcore_rl.jobs.remote_paths import fetch_inputs
from mcore_rl.jobs.resume import is_same_setting
from mcore_rl.jobs.rl import build_server_pool, open_session
from mcore_rl.jobs.run_plan import RunPlan, plan_evaluation
from mcore_rl.models.base import get_field, read_config, use_family
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.observability.console import StepProgress, get_stdout_console, show_waiting
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.observability.process import get_start_time, list_versions
from mcore_rl.observability.warnings import warn
from mcore_rl.rewards.manager import RewardManager, check_columns, check_judge_models
from mcore_rl.rewards.registry import FindAnswer, get_answer_finder
from mcore_rl.rollout.manager import RolloutPool

SAMPLES = "samples"  # folder with a parquet file per set
EVALUATED = "evaluated"  # key of config.json: resolved model, dtype, date, digests of rows
# Settings that change no response, or only metrics, which are computed again.
_FREE_SETTINGS = (
    "output_dir", "resume", "timeouts", "scoring.ks", "rollout.num_servers", "rollout.max_restarts",
    "rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.kv_cache_bytes",
    "rollout.cores", "rollout.load_format",
)  # fmt: skip
_ROUNDS = 4  # prompts of a call, as a multiple of what the servers run at a time
Metrics = dict[str, Any]  # numbers, or {"mean": ..., "standard_error": ...}
_SETS_PER_TABLE = 3


@dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """The checked inputs of an evaluation."""

    config: EvalConfig
    run: RLConfig  # settings of an RL run with the same servers
    plan: RunPlan
    tokenizer: Any
    sets: dict[str, PromptDataset]
    find_answer: FindAnswer | None  # for majority votes
    images: RowImages | None = None  # reader of the images of data rows

    @property
    def digests(self) -> dict[str, str]:
        """Digest of the rows of each set, by set."""
        return {name: "".join(prompts.digests) for name, prompts in self.sets.items()}

    def count_prompts(self, name: str) -> int:
        """Return how many prompts of a set are sampled."""
        size = len(self.sets[name])
        return min(self.config.data.num_prompts or size, size)


def run(config: EvalConfig) -> None:
    """Run the job; all of its files are in config.output_dir.

    Raises:
        ConfigError: A setting or an input is wrong; nothing was started, nothing is left.
        RunFailed: It had to stop. The samples of finished sets are left.
    """
    started = get_start_time()
    validate_eval(config)
    config = fetch_inputs(config)
    use_family(config.model.family or TRANSFORMERS)  # it is only served
    with (
        lock_run_dir(config.output_dir, config.resume, check_content) as run_lock,
        open_job_scope(run_lock) as scratch_dir,
        PeakMemory() as memory,
    ):
        with show_waiting("checking the inputs"):
            inputs = check_evaluation(config)
            done = find_done_sets(inputs, run_lock.folder)
        metrics = {name: compute_metrics(samples, config.ks) for name, samples in done.items()}
        if metrics.keys() < inputs.sets.keys():
            (run_lock.folder / SUMMARY).unlink(missing_ok=True)
            metrics |= _evaluate_sets(inputs, metrics, run_lock.folder, scratch_dir)
        wall_s = time.monotonic() - started
        metrics = {name: metrics[name] for name in inputs.sets}
        summary = {
            "model": inputs.run.model.path,
            "dtype": inputs.run.model.dtype,
            "sets": metrics,
            "seed": config.seed,
            "peak_memory_bytes": memory.peak_bytes,
            "wall_s": round(wall_s, 1),
            "versions": list_versions(),
        }
        _write_file(run_lock.folder / SUMMARY, summary)
        print_table(metrics)
        print_majority_note(inputs)
        print(f"{wall_s:.0f} s, in {run_lock.folder}")


def find_done_sets(inputs: EvaluationInputs, folder: Path) -> dict[str, SetSamples]:
    """Return the complete samples that an earlier run of this evaluation left, by set."""
    num_prompts = {name: inputs.count_prompts(name) for name in inputs.sets}
    done = read_done_sets(inputs.config, inputs.run, folder, num_prompts, inputs.digests)
    if done:
        print(f"going on in {folder}: the samples of {', '.join(done)} are there")
    return done


def _evaluate_sets(
    inputs: EvaluationInputs, done: Collection[str], folder: Path, scratch_dir: Path
) -> dict[str, Metrics]:
    """Start servers and evaluate the sets that are not done; return their metrics by set."""
    config, logs = inputs.config, get_log_dir(folder)
    with (
        open_session(inputs.run, inputs.plan.num_devices, scratch_dir),
        summarize_failure(logs / TRACES),
        _start_servers(inputs, logs) as pool,
    ):
        write_json(folder / STARTED, build_settings(config, inputs.run, inputs.digests))
        (folder / SAMPLES).mkdir(exist_ok=True)
        if inputs.images is not None:
            inputs.images.store.open_folder()
        pending = [name for name in inputs.sets if name not in done]
        return {name: _evaluate_set(name, inputs, pool, folder / SAMPLES) for name in pending}


def check_evaluation(config: EvalConfig) -> EvaluationInputs:
    """Load the data sets; check model, reward and servers. Raise ConfigError if one is wrong."""
    chat_date = config.model.chat_date or read_chat_date(config.model.path)
    folder = find_model_folder(config.model.path)
    config = fill_evaluation_lengths(config, folder)
    run = build_server_config(config, detect_device_type(), str(folder), chat_date)
    RewardManager(config.reward, config.rollout.response_limit)  # checks names and settings
    check_judge_models(config.reward, ())
    check_server_package(run.rollout)
    check_server_settings(run.rollout, device=detect_device_type())
    plan = plan_evaluation(run)
    check_model(run, plan)
    tokenizer = load_tokenizer(run.model.path, run.model.chat_date, needs_template=False)
    check_tokenizer_matches(tokenizer, get_field(read_config(run.model.path), "vocab_size"))
    images = load_row_images(run.data, run.model.path, config.output_dir, config.rollout.max_images)
    sets = {
        name: load_prompt_files({f"data.sets.{name}": source}, run, tokenizer, images)
        for name, source in config.data.sets.items()
    }
    for prompts in sets.values():
        check_columns(config.reward, prompts[0].fields)
    _warn_about_short_sets(config, sets)
    find_answer = _get_find_answer(config)
    inputs = EvaluationInputs(config, run, plan, tokenizer, sets, find_answer, images)
    num_samples = max(map(inputs.count_prompts, sets)) * config.rollout.n
    return replace(inputs, plan=plan_evaluation(run, num_samples))


def _warn_about_short_sets(config: EvalConfig, sets: Mapping[str, PromptDataset]) -> None:
    num = config.data.num_prompts
    for name, prompts in sets.items():
        warn_of_few_rows("data.num_prompts", f"data.sets.{name}", len(prompts), num)


def _get_find_answer(config: EvalConfig) -> FindAnswer | None:
    """Return the function that finds the answer in a response, if the scoring reward has one.

    The sum of several terms has none.
    """
    name, terms = config.scoring.term, list_reward_terms(config.reward)
    if name not in terms:
        return None
    key = f"reward.terms.{name}" if name else "reward"
    return get_answer_finder(key, terms[name].name, terms[name].settings)


def print_majority_note(inputs: EvaluationInputs) -> None:
    """Print why there is no majority@k, if there is none."""
    if inputs.find_answer is None:
        reward = "a sum of terms (scoring.term='')"
        if not inputs.config.reward.terms or inputs.config.scoring.term:
            terms = list_reward_terms(inputs.config.reward)
            reward = f"the reward {terms[inputs.config.scoring.term].name!r}"
        print(f"no majority@k: {reward} does not say what the answer in a response is")


@contextmanager
def _start_servers(inputs: EvaluationInputs, logs: Path) -> Iterator[RolloutPool]:
    """Start servers with the weights of the checkpoint."""
    config, plan = inputs.run, inputs.plan
    with (
        Pools(plan, get_device_resource(), config.timeouts, logs) as pools,
        build_server_pool(config, plan, pools) as servers,
    ):
        with show_waiting("starting the servers"):
            wait_until_built(servers.groups)
            for line in list_rank_nodes([servers]):
                print(line)
            gather_results(servers.submit_prepare())
            gather_results(servers.submit_start())
            servers.mark_started()
        yield RolloutPool(servers, config.rollout, config.seed)


def _evaluate_set(name: str, inputs: EvaluationInputs, pool: RolloutPool, folder: Path) -> Metrics:
    """Sample one set, write its samples, and return its metrics."""
    config, servers = inputs.config, inputs.config.rollout
    prompts = build_held_out_batch(inputs.sets[name], inputs.count_prompts(name))
    most = servers.max_num_seqs or DEFAULT_MAX_SEQS[detect_device_type()]
    num_running = servers.num_servers * servers.dp * most
    size = max(servers.num_servers, _ROUNDS * num_running // servers.n)
    parts: list[Batch] = []
    with (
        StepProgress(name, len(prompts) * servers.n) as progress,
        ACTIVITY.enter_phase(f"sampling {name}"),
    ):
        sampling = _SamplingProgress(progress, time.monotonic())
        for start in range(0, len(prompts), size):
            rows = range(start, min(start + size, len(prompts)))
            batch = pool.generate(prompts.take(rows), servers.n, on_samples=sampling.add)
            parts.append(fetch_batch(batch, f"the samples of {name}", config.timeouts.call_s))
            progress.update(sampling.num, sampling.report)
    samples = SetSamples.build(
        prompts,
        Batch.concat(parts),
        inputs.tokenizer,
        inputs.find_answer,
        config.scoring,
        servers.stop,
        config.reward.text,
    )
    _write_file(folder / f"{name}.parquet", samples)
    return compute_metrics(samples, config.ks)


@dataclass(slots=True)
class _SamplingProgress:
    """Progress of a set: its samples so far."""

    progress: StepProgress
    started_s: float
    num: int = 0
    rewards: float = 0.0
    num_tokens: int = 0

    def add(self, batches: Sequence[Samples]) -> None:
        """Count samples that have arrived, and draw the progress."""
        for batch in map(get_sample_columns, batches):
            self.num += len(batch)
            self.rewards += float(batch.array("rewards").sum())
            self.num_tokens += int(batch.array("response_tokens").sum())
        if self.num:
            self.progress.draw(self.num, self.report)

    @property
    def report(self) -> str:
        """Mean reward and speed."""
        rate = self.num_tokens / (time.monotonic() - self.started_s)
        return f"reward {self.rewards / self.num:.3f}  {rate:,.0f} tok/s"


def _write_file(path: Path, content: Any) -> None:
    """Write samples as parquet, anything else as JSON, atomically."""
    try:
        if isinstance(content, SetSamples):
            with write_atomically(path) as partial_path:
                pq.write_table(content.to_table(), partial_path)
        else:
            write_json(path, content)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error}") from error


# Resuming an evaluation


def check_content(folder: Path, names: set[str], output_dir: str, resume: str) -> None:
    """Raise ConfigError if an evaluation may not start, or resume, in a folder with these files."""
    is_evaluation = STARTED in names and EVALUATED in read_json_object(folder / STARTED)
    files = {name for name in names if not name.endswith(".partial")} - {LOGS}
    if resume == "never" and names:
        hint = ", or resume=auto to go on with the evaluation in it" if is_evaluation else ""
        raise ConfigError(f"output_dir={output_dir!r} is not empty; allowed: a new folder{hint}")
    if files and not is_evaluation:
        raise ConfigError(
            f"output_dir={output_dir!r} is not empty and holds no evaluation; allowed: a new folder"
        )


def build_settings(config: EvalConfig, run: RLConfig, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of config.json: the settings, and what they were resolved to.

    Args:
        run: Settings with the resolved model.
        digests: Digest of the rows of each set.
    """
    model = run.model
    resolved = {"model": model.path, "dtype": model.dtype, "chat_date": model.chat_date}
    return asdict(config) | {EVALUATED: {**resolved, "rows": dict(digests)}}


def read_done_sets(
    config: EvalConfig,
    run: RLConfig,
    folder: Path,
    num_prompts: Mapping[str, int],
    digests: Mapping[str, str],
) -> dict[str, SetSamples]:
    """Read the sets of this evaluation whose samples are all in the folder.

    Raises:
        ConfigError: The folder is of another model, of other settings, or of other rows.
    """
    if not (folder / STARTED).is_file():
        return {}
    settings = build_settings(config, run, digests)
    _check_settings(settings, read_json_object(folder / STARTED), folder)
    sets = {}
    for name, num in num_prompts.items():
        samples = _read_samples(folder / SAMPLES / f"{name}.parquet", config.rollout.n, num)
        if samples is not None:
            sets[name] = samples
    return sets


def _check_settings(
    settings: Mapping[str, Any], saved_settings: Mapping[str, Any], folder: Path
) -> None:
    """Refuse changes of settings that change responses."""
    values, saved = dict(flatten_settings(settings)), dict(flatten_settings(saved_settings))
    changed = [k for k in values if k in saved and not is_same_setting(k, values[k], saved[k])]
    refused = [key for key in changed if not _may_change(key)]
    if refused:
        changes = "; ".join(f"{key}={values[key]!r}, there {saved[key]!r}" for key in refused)
        raise ConfigError(
            f"{folder} is of another evaluation: {changes}; allowed: the same, or another "
            "output_dir"
        )


def _may_change(key: str) -> bool:
    """Return whether a setting may differ from that of the run whose samples are read."""
    return any(key == setting or key.startswith(f"{setting}.") for setting in _FREE_SETTINGS)


def _read_samples(path: Path, n: int, num_prompts: int) -> SetSamples | None:
    """Read the samples of a set; None if they are not all there, to sample the set again."""
    if not path.is_file():
        return None
    try:
        samples = SetSamples.read(path, n)
    except (OSError, pa.ArrowException) as error:
        warn(f"{path} cannot be read, its set is sampled again: {error}")
        return None
    return samples if len(samples.columns["row"]) == n * num_prompts else None


# Samples and metrics of a set


@dataclass(frozen=True, slots=True)
class SetSamples:
    """n responses to each prompt, in the order of the prompts."""

    n: int
    columns: dict[str, list[Any]]  # of the samples table, with an entry per response
    has_answers: bool

    @classmethod
    def build(
        cls,
        prompts: Batch,
        samples: Batch,
        tokenizer: Tokenizer,
        find_answer: FindAnswer | None,
        config: ScoringConfig,
        stop: Sequence[str] = (),
        reward_text: str = "answer",
    ) -> SetSamples:
        """Build the table of a set.

        Args:
            samples: Samples of the prompts, from a RolloutPool.
            stop: Stop strings of the sampling.
            reward_text: The text that `find_answer` reads (reward.text).
        """
        group_rows = {group: row for row, group in enumerate(prompts.array("group_ids").tolist())}
        rows = [group_rows[group] for group in samples.array("group_ids").tolist()]
        order = sorted(range(len(samples)), key=rows.__getitem__)  # stable within a prompt
        samples, n = samples.take(order), len(samples) // len(prompts)
        prompt_rows = [row for row in range(len(prompts)) for _ in range(n)]
        reasons = samples.array("finish_reasons").tolist()
        ids = samples.jagged("response_ids")
        texts = [
            _decode_response(tokenizer, tokens.tolist(), reason, stop)
            for tokens, reason in zip(ids, reasons, strict=True)
        ]
        fields = [json.loads(entry) for entry in prompts.jagged("fields").texts]
        errors = samples.array("reward_errors").tolist()
        column = f"reward/{config.term}" if config.term else "rewards"
        # A term without a column: the reward of every response has failed.
        values = samples.array(column) if column in samples else np.full(len(samples), np.nan)
        scores = np.nan_to_num(values, nan=-np.inf)
        prompt_texts = [tokenizer.decode(p.tolist()) for p in prompts.jagged("prompt_ids")]
        columns: dict[str, list[Any]] = {
            "row": [int(prompts.array("rows")[row]) for row in prompt_rows],
            "number": [number for _ in range(len(prompts)) for number in range(n)],
            "prompt": [prompt_texts[row] for row in prompt_rows],
            "response": texts,
            "answer": [str(fields[row].get("answer", "")) for row in prompt_rows],
            "reward": samples.array("rewards").tolist(),
            "correct": [
                bool(score >= config.correct_from) and not error
                for score, error in zip(scores, errors, strict=True)
            ],
            "finish_reason": reasons,
            "response_tokens": ids.lengths.tolist(),
            "reward_error": errors,
        }
        if find_answer is not None:
            if reward_text == "answer":
                prompts_of = (prompt_texts[row] for row in prompt_rows)
                texts = [*map(thoughts.find_answer, texts, prompts_of)]
            answers = [find_answer(t, r) for t, r in zip(texts, reasons, strict=True)]
            columns["extracted_answer"] = answers
        for name in sorted(samples.columns):
            if name.startswith("reward/"):
                columns[name] = samples.array(name).tolist()
        return cls(n, columns, find_answer is not None)

    @classmethod
    def read(cls, path: Path, n: int) -> SetSamples:
        """Read the table of a set from its file."""
        columns = pq.read_table(path).to_pydict()
        return cls(n, columns, "extracted_answer" in columns)

    def group_by_prompt(self, column: str) -> list[list[Any]]:
        """Return a list per prompt with the n values of a column."""
        values = self.columns[column]
        return [values[start : start + self.n] for start in range(0, len(values), self.n)]

    def to_table(self) -> pa.Table:
        """Return the samples as an Arrow table."""
        types = {"extracted_answer": pa.string()}  # all of them may be null
        arrays = {name: pa.array(v, types.get(name)) for name, v in self.columns.items()}
        return pa.table(arrays)


def _decode_response(
    tokenizer: Tokenizer, token_ids: list[int], reason: str, stop: Sequence[str]
) -> str:
    """Decode a response, without its end token unless a stop string has ended it."""
    text = tokenizer.decode(token_ids) if stop else ""
    return text if any(s in text for s in stop) else decode_response(tokenizer, token_ids, reason)


def compute_metrics(samples: SetSamples, ks: Sequence[int]) -> Metrics:
    """Return the metrics of a set; standard errors are over prompts."""
    correct, n = samples.group_by_prompt("correct"), samples.n
    values = {
        "reward": [np.mean(group) for group in samples.group_by_prompt("reward")],
        f"mean@{n}": [np.mean(group) for group in correct],
    }
    values |= {f"pass@{k}": [pass_at_k(n, sum(group), k) for group in correct] for k in ks}
    if samples.has_answers:
        answers = samples.group_by_prompt("extracted_answer")
        votes = [majority_at_k(a, c, ks) for a, c in zip(answers, correct, strict=True)]
        values |= {f"majority@{k}": [row[i] for row in votes] for i, k in enumerate(ks)}
    metrics: Metrics = {
        "prompts": len(correct),
        "responses": len(samples.columns["correct"]),
        "reward_errors": sum(map(bool, samples.columns["reward_error"])),
        "cut_off": float(np.mean([e == "length" for e in samples.columns["finish_reason"]])),
    }
    lengths = samples.group_by_prompt("response_tokens")
    values["response_tokens"] = [np.mean(group) for group in lengths]
    for name, column in values.items():
        mean, error = compute_mean_and_error(column)
        metrics[name] = {"mean": mean, "standard_error": error}
    return metrics


def print_table(set_metrics: Mapping[str, Metrics], console: Console | None = None) -> None:
    """Print a table with a row per metric and a column per set; standard errors are after ±.

    Many sets make several tables, each for a terminal of 80 columns.
    """
    names = list(set_metrics)
    for first in range(0, len(names), _SETS_PER_TABLE):
        shown = {name: set_metrics[name] for name in names[first : first + _SETS_PER_TABLE]}
        title = "mean ± standard error over prompts" if not first else None
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for name in shown:
            table.add_column(name, justify="right", overflow="fold")
        for metric in next(iter(shown.values())):
            cells = [_format_cell(metric, metrics[metric]) for metrics in shown.values()]
            table.add_row(metric, *cells)
        (console or get_stdout_console()).print(table)


def _format_cell(metric: str, value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
    digits = 1 if metric == "response_tokens" else 3
    error = value["standard_error"]
    suffix = "" if error is None else f" ± {error:.{digits}f}"
    return f"{value['mean']:.{digits}f}{suffix}"
