"""mcore-rl plan step, layout and calibrate: time of a step, the fastest layouts, this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mcore_rl.cli.options import print_text, write_file
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig

if TYPE_CHECKING:
    from mcore_rl.models.base import HFConfig
    from mcore_rl.planner.generation import Lengths
    from mcore_rl.planner.layout import Candidate, SearchResult
    from mcore_rl.planner.step import StepTime

ABOUT_STEP = """\
Seconds of each part of an RL step, from settings and config.json: generation, log-probs, update by
cause, weight sync, idle time. Needs no weights, data or GPU; formulas: docs/planning_step.md."""
ABOUT_LAYOUT = """\
The ten fastest layouts of trainer and servers that fit a cluster, with what decides the place of
each; those that nearly fit; settings to paste, or a recipe (--write)."""
ABOUT_CALIBRATE = """\
Measures products, memory, copies, launches and links of this machine; prints a file for --hardware.
With settings of a run it takes small steps of the job instead, and prints the seconds of each part,
a file for --times of plan simulate."""
_SETTINGS = "settings of the run, as of mcore-rl rl: recipe=NAME model.path=DIR KEY=VALUE ..."


def add_step_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("settings", nargs="*", metavar="KEY=VALUE", help=_SETTINGS)
    add("--hardware", required=True, metavar="NAME", help="h100, h200, ... or a .yaml file")
    about = "mean tokens of a response; default: half of rollout.max_response_tokens"
    add("--response-tokens", type=float, metavar="N", help=about)
    about = "spread of the logarithm of the lengths; default: 0.6"
    add("--length-sigma", type=float, default=0.6, metavar="X", help=about)
    about = "mean tokens of a prompt; default: half of data.max_prompt_tokens"
    add("--prompt-tokens", type=float, metavar="N", help=about)
    add("--lengths", type=Path, metavar="FILE", help="lengths of responses instead, one a line")
    add("--json", action="store_true", help="print one JSON object")


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser)
    add = parser.add_argument
    add("--devices", type=int, required=True, metavar="N", help="of trainer and servers together")
    add("--write", type=Path, metavar="YAML", help="recipe of the fastest layout")


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("settings", nargs="*", metavar="KEY=VALUE", help=f"to measure its parts: {_SETTINGS}")
    add("--device", default="cpu", help="cpu (the default) or cuda")
    about = "hardware with links that are not measured; default: cpu, of cuda h100"
    add("--base", metavar="NAME", help=about)
    about = "with settings: write the lengths of the responses here, one a line"
    add("--lengths", type=Path, metavar="FILE", help=about)
    add("--write", type=Path, metavar="YAML", help="file to write; default: print it")


def run_step(options: argparse.Namespace) -> int:
    config, model, lengths = _read_run(options)
    from mcore_rl.planner.hardware import load_hardware
    from mcore_rl.planner.step import predict_step

    hardware = load_hardware(options.hardware)
    step = predict_step(
        config, model, hardware, lengths, sync_bytes=count_sync_bytes(config, model, hardware)
    )
    if options.json:
        json.dump(asdict(step) | {"tokens_per_s": step.tokens_per_s}, sys.stdout, indent=1)
        print()
    else:
        print_step(step, config.trainer.mode)
    return 0


def run_layout(options: argparse.Namespace) -> int:
    config, model, lengths = _read_run(options)
    from mcore_rl.planner.hardware import load_hardware
    from mcore_rl.planner.layout import search_layouts

    result = search_layouts(
        config, model, load_hardware(options.hardware), options.devices, lengths
    )
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
        write_file(options.write, text, "--write")
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
        write_file(options.lengths, lines, "--lengths")
    print_text(f"prompts have {measured.prompt_tokens} tokens on average")
    return str(yaml.safe_dump(asdict(measured.times), sort_keys=False))


def _read_run(options: argparse.Namespace) -> tuple[RLConfig, HFConfig, Lengths]:
    """Return the resolved settings of a run, config.json of its model, and response lengths."""
    from mcore_rl.planner.generation import Lengths, read_lengths

    config, model = read_planned_run(options.settings, options.hardware)
    longest = config.rollout.max_response_tokens
    prompt = options.prompt_tokens
    if prompt is None:
        prompt = config.data.max_prompt_tokens / 2
    if options.lengths and options.response_tokens is not None:
        raise ConfigError("--response-tokens with --lengths, which has lengths; allowed: one")
    if options.lengths:
        return config, model, read_lengths(options.lengths, longest, prompt)
    mean = options.response_tokens if options.response_tokens is not None else longest / 2
    return config, model, Lengths(mean, longest, options.length_sigma, prompt)


def read_planned_run(settings: Sequence[str], hardware: str) -> tuple[RLConfig, HFConfig]:
    """Return the resolved settings of a run on some hardware, and config.json of its model."""
    from mcore_rl.cli.compose import compose_config
    from mcore_rl.jobs.placement import resolve_for_nodes
    from mcore_rl.models.base import read_config
    from mcore_rl.planner.hardware import load_hardware

    if not settings:
        raise ConfigError("no settings; allowed: recipe=NAME model.path=DIR KEY=VALUE ...")
    load_hardware(hardware)  # an unknown name is refused before a model is read
    lane = "cpu" if hardware.lower() == "cpu" else "cuda"
    config = resolve_for_nodes(compose_config(RLConfig, [*settings]), lane, needs_data=False)
    model = read_config(config.model.path)
    model.pop("quantization_config", None)  # planned as model.dtype, which it is trained in
    return config, model


def count_sync_bytes(config: RLConfig, model: HFConfig, hardware: Any) -> float | None:
    """Return the most bytes into or out of a device in a weight sync; None without a plan."""
    from mcore_rl.inference.registry import load_server_class
    from mcore_rl.jobs.dry_run import compute_sync_traffic
    from mcore_rl.models.base import get_family

    weight_format = load_server_class(config.rollout).features.weight_format
    if config.weight_sync.method == "full_export" or (
        weight_format == "vllm" and get_family(model).vllm_weights is None
    ):
        return None
    traffic = compute_sync_traffic(config, model, hardware.devices_per_node)
    return float(max(traffic.most_received, traffic.most_sent))


def print_step(step: StepTime, mode: str) -> None:
    """Print the parts of a step as a table."""
    from rich.table import Table

    from mcore_rl.observability.console import get_stdout_console

    n, update, generation = step.num_mini_batches, step.update, step.generation
    rows = [
        ("generation", generation.total_s),
        ("  prefill", generation.prefill_s),
        ("  decode", generation.decode_s),
        ("  expert-parallel exchange", generation.expert_parallel_s),
        ("  tail: under a tenth of the slots", generation.tail_s),
        ("log-probs of the actor", step.log_probs_s),
        ("log-probs of the reference", step.reference_s),
        ("critic", step.values_s),
        (f"update, {n} optimizer step{'s' * (n > 1)}", step.update_s),
        ("  forward and backward", n * update.compute_s),
        ("  recompute", n * update.recompute_s),
        ("  tensor-parallel communication", n * update.tensor_parallel_s),
        ("  expert-parallel exchange", n * update.expert_parallel_s),
        ("  context-parallel communication", n * update.context_parallel_s),
        ("  transfers between stages", n * update.pipeline_s),
        ("  pipeline bubble", n * update.bubble_s),
        ("  data-parallel communication", n * update.data_parallel_s),
        ("  optimizer", n * update.optimizer_s),
        ("offload and onload", step.offload_s),
        ("weight sync", step.weight_sync_s),
        (f"a step ({mode})", step.step_s),
        ("  trainer idle", step.trainer_idle_s),
        ("  servers idle", step.servers_idle_s),
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("seconds", justify="right")
    for name, seconds in rows:
        if seconds or not name.startswith("  "):
            table.add_row(name, f"{seconds:,.3g}" if seconds < 100 else f"{seconds:,.0f}")
    console = get_stdout_console()
    console.print(table)
    console.print(
        f"{step.tokens_per_s:,.0f} tokens a second and device on {step.num_devices}; "
        f"MFU of the update {step.mfu:.0%}; at most {generation.most_running} responses at once "
        "on a server",
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
            str(number),
            f"{candidate.step.step_s:,.1f}",
            trainer,
            candidate.engine.recompute.granularity,
            f"{candidate.training_bytes / 1e9:.0f}",
            servers,
            f"{candidate.serving_bytes / 1e9:.0f}",
            candidate.reason,
        )
    console.print(table)
    for exceeding in result.exceeding:
        axes = asdict(exceeding.engine.layout).items()
        text = " ".join(f"{axis}={n}" for axis, n in axes if n not in (1, None))
        console.print(
            f"nearly fits: {text}: {exceeding.missing_bytes / 1e9:.1f} GB too much a device, most "
            f"of it {exceeding.largest}; an update would take {exceeding.step_s:.1f} s",
            soft_wrap=True,
        )
    console.print(f"\n{' '.join(result.best[0].list_overrides())}", soft_wrap=True)


def _build_json(result: SearchResult) -> dict[str, Any]:
    return {
        "best": [
            {
                "step_s": candidate.step.step_s,
                "training_bytes": candidate.training_bytes,
                "serving_bytes": candidate.serving_bytes,
                "reason": candidate.reason,
                "overrides": candidate.list_overrides(),
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
    words = [*options.settings, *candidate.list_overrides()]
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
    write_file(options.write, head + yaml.safe_dump(recipe, sort_keys=False), "--write")
    print_text(f"wrote {options.write}")
