"""Layouts as text, and what a parser says of words that it does not know."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import pytest

from mcore_rl.cli import bench, convert, plan, verify
from mcore_rl.cli.job import JOB_COMMANDS
from mcore_rl.cli.main import COMMANDS, load_command
from mcore_rl.cli.options import Parser, parse_layout
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import validate_layout
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout


def fits(layout: Layout) -> bool:
    try:
        validate_layout("layout", layout)
    except ConfigError:
        return False
    return True


def test_without_dp_a_layout_has_the_smallest_that_fits():
    for tp, pp, cp, ep, etp in itertools.product((1, 2, 3), (1, 2), (1, 3), (1, 2, 4, 6), (1, 2)):
        text = f"tp={tp},pp={pp},cp={cp},ep={ep},etp={etp}"
        layout = parse_layout("--layout", text, Layout)
        axes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
        assert layout == next(
            layout for dp in itertools.count(1) if fits(layout := Layout(dp=dp, **axes))
        )


@pytest.mark.parametrize(("text", "dp"), [("tp=2", 1), ("tp=2,ep=4", 2), ("tp=8,ep=8", 1), ("", 1)])
def test_without_dp_as_many_engines_serve_as_the_experts_take(text, dp):
    assert parse_layout("--generate", text, GenerationLayout).dp == dp


def test_a_given_dp_is_never_changed():
    assert parse_layout("--layout", "tp=2,ep=2,dp=3", Layout).dp == 3
    assert parse_layout("--layout", "tp=2,ep=4,dp=1", Layout).dp == 1
    with pytest.raises(ConfigError, match=r"= 2; the smallest --layout\.dp that fits: 2"):
        validate_layout("--layout", Layout(tp=2, ep=4))
    with pytest.raises(ConfigError, match=r"generate.ep=4; allowed: 1, or a multiple"):
        parse_layout("--generate", "tp=2,ep=4,dp=1", GenerationLayout)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dp", "ep", "etp", "vpp"])
def test_an_axis_of_no_rank_is_left_for_the_rules(axis):
    layout = parse_layout("--layout", f"{axis}=0", Layout)
    with pytest.raises(ConfigError, match=rf"--layout.{axis}=0; allowed: at least 1"):
        validate_layout("--layout", layout)


@pytest.mark.parametrize(
    ("main", "line", "message"),
    [
        (convert.main, "hf-to-mcor", "unknown command 'hf-to-mcor'; did you mean hf-to-mcore"),
        (
            convert.main,
            "hf-to-mcore --modle m",
            "'--modle'; did you mean --model.*mcore --he",
        ),
        (convert.main, "inspect a --jsn", "option '--jsn'; did you mean --json.*inspect --help"),
        (
            convert.main,
            "inspect a b",
            "unknown argument 'b'; allowed: -h, --help, --family, --json",
        ),
        (convert.main, "hf-to-mcore", "required: --model, --output; see .* hf-to-mcore --help"),
        (plan.main, "reshrad", "unknown command 'reshrad'; did you mean reshard"),
        (verify.main, "parity --agianst hf", "did you mean --against"),
        (bench.main, "reshard --train tp=2,tp=3", "--train=tp=2,tp=3: 'tp' is given twice"),
        (bench.main, "reshard --train tq=2", "--train=tq=2: 'tq' is unknown; allowed: tp, pp"),
        (
            bench.main,
            "reshard --generate tp=two",
            "--generate=tp=two: 'tp=two'; allowed: tp=NUMBER",
        ),
    ],
)
def test_what_a_command_does_not_know_is_named_with_what_is_like_it(main, line, message):
    with pytest.raises(ConfigError, match=message):
        main(line.split())


def test_chat_takes_top_k_and_stop_strings(monkeypatch):
    from mcore_rl.cli import chat
    from mcore_rl.jobs import chat as job

    runs = []
    monkeypatch.setattr(job, "run", runs.append)
    chat.main(["folder", "--top-k", "5", "--stop", "a", "--stop=b"])
    assert (runs[0].top_k, runs[0].stop) == (5, ("a", "b"))
    with pytest.raises(ConfigError, match=r"--stop\[0\]=''; allowed: a text"):
        chat.main(["folder", "--stop", ""])


def list_parsers(parser: Parser) -> Iterator[Parser]:
    """Yield the parser, or those of its subcommands."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    yield from groups[0].choices.values() if groups else [parser]


def build_value(action: argparse.Action) -> str:
    if action.type in (int, float):
        return "3"
    return "word" if action.nargs else "tp=2"  # which looks like a setting


@pytest.mark.parametrize("name", COMMANDS)
def test_a_value_may_stand_behind_a_space_or_an_equals_sign(name):
    for parser in list_parsers(load_command(name).build_parser()):
        positional = [a for a in parser._actions if not a.option_strings]
        words = [next(iter(a.choices or ["seed=3"])) for a in positional]
        options = [a for a in parser._actions if a.option_strings and a.nargs != 0]
        required = {a.option_strings[0]: build_value(a) for a in options if a.required}
        takes_settings = any(action.dest == "settings" for action in positional)
        for action in options:
            option, value = action.option_strings[0], build_value(action)
            filled = [f"{n}={v}" for n, v in required.items() if n != option]
            expected = parser.parse_args([*words, *filled, f"{option}={value}"])
            assert parser.parse_args([*words, *filled, option, value]) == expected
            if action.nargs is None or takes_settings:
                assert parser.parse_args([option, value, *words, *filled]) == expected


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("a=1 --hardware h100 b=2 --dry-run c=3", ["a=1", "b=2", "c=3"]),
        ("--dry-run a=1 --hard h100 word", ["a=1", "word"]),
        ("--hardware=h100 a=1 --dry-run", ["a=1"]),
    ],
)
def test_settings_may_stand_before_and_after_options(line, settings):
    options = JOB_COMMANDS["rl"].build_parser().parse_args(line.split())
    assert (options.settings, options.hardware, options.dry_run) == (settings, "h100", True)


def test_settings_may_follow_an_option_of_several_values():
    line = "simulate --trainers sync one_step_off a=1 --json b=2"
    options = plan.build_parser().parse_args(line.split())
    assert (options.trainers, options.settings) == (["sync", "one_step_off"], ["a=1", "b=2"])
