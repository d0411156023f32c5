"""mcore-rl plan step, layout and calibrate: time of a step, the fastest layouts, this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mcore_rl.cli.options import print_text, write_option_file
from mcore_rl.config.checks import check_choice
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_train import get_data_config
from mcore_rl.config.schema import JOB_SCHEMAS, RLConfig, TrainConfig

if TYPE_CHECKING:
    from mcore_rl.models.base import HFConfig
    from mcore_rl.planner.generation import Lengths
    from mcore_rl.planner.hardware import Hardware
    from mcore_rl.planner.layout import Candidate, SearchResult
    from mcore_rl.planner.step import StepTime
    from mcore_rl.planner.supervised import SupervisedStepTime
    from mcore_rl.planner.training import UpdateTime

ABOUT_STEP = """\
Seconds of each part of a step, from settings and config.json: generation, log-probs, update by
cause, weight sync, idle time. Needs no weights, data or GPU: docs/planning_step.md.
Takes the settings of mcore-rl rl, or of --job."""
ABOUT_LAYOUT = """\
The ten fastest layouts of trainer and servers that fit a cluster, with what decides the place of
each; those that nearly fit; settings to paste, or a recipe (--write)."""
ABOUT_CALIBRATE = """\
Measures products, memory, copies, launches and links of this machine; prints a file for --hardware.
With settings of a run it takes small steps of the job instead, and prints the seconds of each part,
a file for --times of plan simulate."""
_SETTINGS = "settings of the run, as of mcore-rl rl: recipe=NAME model.path=DIR KEY=VALUE ..."


def add_settings(parser: argparse.ArgumentParser) -> None:
    about = f"a published model or a folder instead of model.path=; {_SETTINGS}"
    parser.add_argument("settings", nargs="*", metavar="[MODEL] KEY=VALUE", help=about)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the settings and the command that takes them."""
    add_settings(parser)
    about = "command whose settings they are: rl (the default), sft, dpo or rm"
    parser.add_argument("--job", default="rl", metavar="rl", help=about)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)
    _add_time_options(parser)


def _add_time_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hardware", required=True, metavar="NAME", help="h100, h200, ... or a .yaml file")
    about = "mean tokens of a response; default: half of rollout.max_response_tokens, of a "
    about += "supervised job a quarter of data.max_tokens"
    add("--response-tokens", type=float, metavar="N", help=about)
    about = "spread of the logarithm of the lengths; default: 0.6"
    add("--length-sigma", type=float, default=0.6, metavar="X", help=about)
    about = "mean tokens of a prompt; default: half of data.max_prompt_tokens, or that quarter"
    add("--prompt-tokens", type=float, metavar="N", help=about)
    add("--lengths", type=Path, metavar="FILE", help="lengths of responses instead, one a line")
    add("--json", action="store_true", help="print one JSON object")


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    _add_time_options(parser)
    add = parser.add_argument
    add("--devices", type=int, required=True, metavar="N", help="of trainer and servers together")
    add("--write", type=Path, metavar="YAML", help="recipe of the fastest layout")


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("settings", nargs="*", metavar="KEY=VALUE", help=f"to measure its parts: {_SETTINGS}")
    add("--device", default="cpu", help="cpu (the default) or cuda")
    about = "hardware with links that are not measured; default: cpu, of cuda h100"
    add("--base", metavar="NAME", help=about)
    about = "with settings: a file for the lengths of the responses, one a line"
    add("--lengths", type=Path, metavar="FILE", help=about)
    add("--write", type=Path, metavar="YAML", help="file to write; default: print it")


def run_step(options: argparse.Namespace) -> int:
    config = compose_job(options)
    from mcore_rl.planner.hardware import load_hardware
    from mcore_rl.planner.step import predict_step
    from mcore_rl.planner.supervised import predict_supervised_step

    step: StepTime | SupervisedStepTime
    hardware = load_hardware(options.hardware)
    with prepare_job(config, hardware) as (prepared, model):
        lengths = _build_lengths(prepared, options)
        if isinstance(prepared, RLConfig):
            sync_bytes = count_sync_bytes(prepared, model, hardware)
            step = predict_step(prepared, model, hardware, lengths, sync_bytes=sync_bytes)
            rows = _list_step_rows(step, prepared.trainer.mode)
            note = f"; at most {step.generation.most_running} responses at once on a server"
        else:
            step = predict_supervised_step(prepared, model, hardware, lengths)
            rows, note = _list_supervised_rows(step), ""
    if options.json:
        numbers = {"tokens_per_s": step.tokens_per_s, "step_s": step.step_s}
        json.dump(asdict(step) | numbers, sys.stdout, indent=1)
        print()
    else:
        _print_step(step, rows, note)
    return 0


def run_layout(options: argparse.Namespace) -> int:
    options.job = "rl"
    config = compose_job(options)
    from mcore_rl.planner.hardware import load_hardware
    from mcore_rl.planner.layout import search_layouts
    from mcore_rl.planner.memory_check import check_settings

    hardware = load_hardware(options.hardware)
    with prepare_job(config, hardware, checks_layout=False) as (prepared, model):
        assert isinstance(prepared, RLConfig)
        lengths = _build_lengths(prepared, options)
        check = partial(check_settings, device_type=hardware.device)
        result = search_layouts(prepared, model, hardware, options.devices, lengths, check)
    if options.write:
        _write_recipe(options, result.best[0])
    if options.json:
        json.dump(_build_json(result), sys.stdout, indent=1)
        print()
    else:
        _print_layouts(result)
    return 0


def run_calibrate(options: argparse.Namespace) -> int:
    if options.lengths and not options.settings:
        raise ConfigError(f"--lengths={str(options.lengths)!r}; allowed: with settings of a run")
    text = _measure_run(options) if options.settings else _measure_machine(options)
    if options.write:
        write_option_file(options.write, text, "--write")
        print_text(f"wrote {options.write}")
    else:
        print_text(text.rstrip())
    return 0


def _measure_machine(options: argparse.Namespace) -> str:
    from mcore_rl.planner.calibrate import calibrate
    from mcore_rl.planner.hardware import load_hardware

    base = load_hardware(options.base, "--base") if options.base else None
    return calibrate(options.device, base).to_yaml()


def _measure_run(options: argparse.Namespace) -> str:
    """Measure the parts of a run by small steps; write the lengths, return the seconds as YAML."""
    from mcore_rl.tools.simulate.measure import measure_times

    measured = measure_times(options.settings)
    if options.lengths:
        lines = "".join(f"{length}\n" for length in measured.lengths.measured)
        write_option_file(options.lengths, lines, "--lengths")
    print_text(f"prompts have {measured.prompt_tokens} tokens on average")
    return str(yaml.safe_dump(asdict(measured.times), sort_keys=False))


def compose_job(options: argparse.Namespace) -> RLConfig | TrainConfig:
    """Compose the settings of a command line with `--job`, of which the first may be a model."""
    check_choice("--job", options.job, tuple(JOB_SCHEMAS))
    if not options.settings:
        raise ConfigError("no settings; allowed: recipe=NAME model.path=DIR KEY=VALUE ...")
    from mcore_rl.cli.compose import compose_config  # imports Hydra
    from mcore_rl.jobs.remote_paths import find_published

    name, *settings = options.settings
    if "=" not in name and (os.path.isdir(name) or find_published(name)):
        name = f"model.path={name}"
    config: RLConfig | TrainConfig = compose_config(JOB_SCHEMAS[options.job], [name, *settings])
    return config


@contextmanager
def prepare_job(
    config: RLConfig | TrainConfig, hardware: Hardware, *, checks_layout: bool = True
) -> Iterator[tuple[RLConfig | TrainConfig, HFConfig]]:
    """Resolve settings for some hardware; yield them and config.json of the model.

    Args:
        checks_layout: False if the layouts of the settings are replaced.
    """
    from mcore_rl.planner.memory_check import prepare_plan

    with prepare_plan(config, hardware.device, checks_layout=checks_layout) as (prepared, model):
        # Planned as model.dtype, which it is trained in.
        yield prepared, {k: v for k, v in model.items() if k != "quantization_config"}


def _build_lengths(config: RLConfig | TrainConfig, options: argparse.Namespace) -> Lengths:
    """Return the lengths of responses; of a supervised job, of what follows the prompts."""
    from mcore_rl.planner.generation import Lengths, read_lengths

    if options.lengths and options.response_tokens is not None:
        raise ConfigError("--response-tokens with --lengths, which has lengths; allowed: one")
    prompt, mean = options.prompt_tokens, options.response_tokens
    if isinstance(config, RLConfig):
        longest = config.rollout.response_limit
        prompt = config.data.prompt_limit / 2 if prompt is None else prompt
        mean = longest / 2 if mean is None else mean
        if prompt > config.data.prompt_limit:
            raise ConfigError(
                f"--prompt-tokens={prompt:g}: data.max_prompt_tokens="
                f"{config.data.prompt_limit}; allowed: up to that"
            )
    else:
        most = get_data_config(config).token_limit
        prompt = max(1, most / 4) if prompt is None else prompt
        mean = max(1, most / 4) if mean is None else mean
        longest = int(most - prompt)
        if longest < 1 or mean > longest:
            raise ConfigError(
                f"--prompt-tokens={prompt:g} and --response-tokens={mean:g}: "
                f"data.max_tokens={most}; allowed: up to {most} together"
            )
    if options.lengths:
        return read_lengths(options.lengths, longest, prompt)
    return Lengths(mean, longest, options.length_sigma, prompt)


def count_sync_bytes(config: RLConfig, model: HFConfig, hardware: Hardware) -> float | None:
    """Return the most bytes into or out of a device in a weight sync; None without a plan."""
    from mcore_rl.inference.registry import load_server_class
    from mcore_rl.jobs.run_plan import plan_run
    from mcore_rl.models.base import get_family
    from mcore_rl.planner.cluster import compute_sync_traffic

    weight_format = load_server_class(config.rollout).features.weight_format
    if config.weight_sync.method == "full_export" or (
        weight_format == "vllm" and get_family(model).vllm_weights is None
    ):
        return None
    plan = plan_run(config)
    traffic = compute_sync_traffic(config, plan, model, hardware.devices_per_node)
    return float(max(traffic.most_received, traffic.most_sent))


def _list_step_rows(step: StepTime, mode: str) -> list[tuple[str, float]]:
    """Return the parts of a step of RL and their seconds."""
    n, generation = step.num_mini_batches, step.generation
    return [
        ("generation", generation.total_s),
        ("  prefill", generation.prefill_s),
        ("  decode", generation.decode_s),
        ("  expert-parallel exchange", generation.expert_parallel_s),
        ("  tail: under a tenth of the slots", generation.tail_s),
        ("log-probs of the actor", step.log_probs_s),
        ("log-probs of the reference", step.reference_s),
        ("scores of the reward model", step.reward_model_s),
        ("log-probs of teachers", step.teachers_s),
        ("critic", step.values_s),
        (f"update, {n} optimizer step{'s' * (n > 1)}", step.update_s),
        *_list_update_rows(step.update, n),
        ("offload and onload", step.offload_s),
        ("weight sync", step.weight_sync_s),
        (f"a step ({mode})", step.step_s),
        ("  trainer idle", step.trainer_idle_s),
        ("  servers idle", step.servers_idle_s),
    ]


def _list_supervised_rows(step: SupervisedStepTime) -> list[tuple[str, float]]:
    return [
        ("log-probs or scores before the update", step.scores_s),
        ("log-probs of the reference", step.reference_s),
        ("offload and onload", step.offload_s),
        ("update", step.update.total_s),
        *_list_update_rows(step.update, 1),
        ("a step", step.step_s),
    ]


def _list_update_rows(update: UpdateTime, count: int) -> list[tuple[str, float]]:
    """Return the causes of the time of `count` optimizer steps."""
    return [
        ("  forward and backward", count * update.compute_s),
        ("  recompute", count * update.recompute_s),
        ("  tensor-parallel communication", count * update.tensor_parallel_s),
        ("  expert-parallel exchange", count * update.expert_parallel_s),
        ("  context-parallel communication", count * update.context_parallel_s),
        ("  transfers between stages", count * update.pipeline_s),
        ("  pipeline bubble", count * update.bubble_s),
        ("  data-parallel communication", count * update.data_parallel_s),
        ("  optimizer", count * update.optimizer_s),
    ]


def _print_step(
    step: StepTime | SupervisedStepTime, rows: Sequence[tuple[str, float]], note: str
) -> None:
    """Print the parts of a step that take time as a table."""
    from rich.table import Table

    from mcore_rl.observability.console import get_stdout_console

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("seconds", justify="right")
    for name, seconds in rows:
        if seconds:
            table.add_row(name, f"{seconds:,.3g}" if seconds < 100 else f"{seconds:,.0f}")
    console = get_stdout_console()
    console.print(table)
    console.print(
        f"{step.tokens_per_s:,.0f} tokens a second and device on {step.num_devices}; "
        f"MFU of the update {step.mfu:.0%}{note}",
        soft_wrap=True,
    )


def _describe(candidate: Candidate) -> tuple[str, str]:
    layout, rollout = asdict(candidate.engine.layout), candidate.rollout
    axes = " ".join(f"{axis}={n}" for axis, n in layout.items() if n not in (1, None))
    servers = f"{rollout.num_servers} x tp={rollout.tp}"
    servers += f" dp={rollout.dp}" * (rollout.dp > 1) + " ep" * rollout.ep
    return axes or "tp=1", servers


def _print_layouts(result: SearchResult) -> None:
    from rich.table import Table

    from mcore_rl.observability.console import get_stdout_console

    console, table = get_stdout_console(), Table(box=None, pad_edge=False)
    for name in ("", "s a step", "trainer", "recompute", "GB", "servers", "GB", "decided by"):
        table.add_column(name, justify="right" if name in ("s a step", "GB") else "left")
    for number, candidate in enumerate(result.best, 1):
        trainer, servers = _describe(candidate)
        table.add_row(
            f"{number}{'' if candidate.has_margin else ' *'}",
            f"{candidate.step.step_s:,.1f}",
            trainer,
            candidate.engine.recompute.granularity,
            f"{candidate.training_bytes / 1e9:.0f}",
            servers,
            f"{candidate.serving_bytes / 1e9:.0f}",
            candidate.reason,
        )
    console.print(table)
    if not all(candidate.has_margin for candidate in result.best):
        note = "* takes more than nine tenths of a device, of which a plan does not know all"
        console.print(f"{note}; after all others", soft_wrap=True)
    for exceeding in result.exceeding:
        axes = asdict(exceeding.engine.layout).items()
        text = " ".join(f"{axis}={n}" for axis, n in axes if n not in (1, None))
        console.print(
            f"nearly fits: {text}: {exceeding.missing_bytes / 1e9:.1f} GB too much a device, most "
            f"of it {exceeding.largest}; an update would take {exceeding.step_s:.1f} s",
            soft_wrap=True,
        )
    # Lists are in brackets, which would be markup.
    console.print(
        f"\n{' '.join(result.best[0].overrides)}", markup=False, highlight=False, soft_wrap=True
    )


def _build_json(result: SearchResult) -> dict[str, Any]:
    return {
        "best": [
            {
                "step_s": candidate.step.step_s,
                "training_bytes": candidate.training_bytes,
                "serving_bytes": candidate.serving_bytes,
                "has_margin": candidate.has_margin,
                "reason": candidate.reason,
                "overrides": list(candidate.overrides),
            }
            for candidate in result.best
        ],
        "exceeding": [
            {
                "layout": asdict(exceeding.engine.layout),
                "missing_bytes": exceeding.missing_bytes,
                "largest": exceeding.largest,
                "update_s": exceeding.step_s,
            }
            for exceeding in result.exceeding
        ],
        "num_layouts": result.num_layouts,
    }


def _write_recipe(options: argparse.Namespace, candidate: Candidate) -> None:
    """Write a recipe: the settings given, of which `recipe` is its base, then the layout."""
    recipe: dict[str, Any] = {}
    words = [*options.settings, *candidate.overrides]
    for key, _, text in (word.partition("=") for word in words):
        *groups, name = key.split(".")
        level = recipe
        for group in groups:
            level = level.setdefault(group, {})
        level[name] = yaml.safe_load(text)
    head = (
        f"# Layout of mcore-rl plan layout for {options.devices} x {options.hardware}: a step is "
        f"predicted to take {candidate.step.step_s:.1f} s.\n"
    )
    write_option_file(options.write, head + yaml.safe_dump(recipe, sort_keys=False), "--write")
    print_text(f"wrote {options.write}")
