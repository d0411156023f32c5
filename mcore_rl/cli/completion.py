"""mcore-rl completion: scripts for the Tab key, and the words that they complete.

Only settings and parsers are imported, so that a Tab is answered quickly; for the name of a loss or
another registered function its registry, too, which takes seconds.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields

from mcore_rl.cli import main as command_line
from mcore_rl.cli import recipes
from mcore_rl.cli.job import SCHEMAS, list_choices
from mcore_rl.cli.options import Parser, print_text
from mcore_rl.config.describe import list_setting_groups
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout

_BASH = """\
_mcore_rl() {
    local line=${COMP_LINE:0:COMP_POINT} typed= reply
    case $COMP_WORDBREAKS in # bash replaces no more than what stands behind the last =
        *=*) typed=${line##* } typed=${typed%"${typed##*=}"} ;;
    esac
    COMPREPLY=()
    while IFS= read -r reply; do
        COMPREPLY+=("${reply#"$typed"}")
    done < <("${COMP_WORDS[0]}" completion words "$line" 2>/dev/null)
    case ${COMPREPLY[0]-} in *=|*/) compopt -o nospace ;; esac
}
complete -o default -F _mcore_rl mcore-rl"""
_ZSH = """\
_mcore_rl() {
    local -a found
    found=(${(f)"$("${words[1]}" completion words "$LBUFFER" 2>/dev/null)"})
    if (( ! $#found )); then
        compset -P '*='
        _files
    elif [[ ${found[1]} == *[=/] ]]; then
        compadd -Q -S '' -a found
    else
        compadd -Q -a found
    fi
}
compdef _mcore_rl mcore-rl"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH}
_PATHS = ("DIR", "FILE", "RUN")  # arguments for which the shell completes file names itself
_AXES = {"--layout": Layout, "--train": Layout, "--target": Layout, "--generate": GenerationLayout}


def main(arguments: list[str]) -> None:
    """Print a script, or for `words LINE`, which scripts call, the words that may end the line."""
    if arguments[:1] == ["words"]:
        if matches := complete(arguments[1]):  # an empty line would be a word, and stop paths
            print_text("\n".join(matches))
        return
    shell = build_parser().parse_args(arguments).shell
    print_text(SCRIPTS[shell])


def build_parser() -> Parser:
    about = """eval "$(mcore-rl completion bash)" in ~/.bashrc, or zsh in ~/.zshrc, lets the Tab key
    complete commands, options, settings, recipes and values."""
    parser = Parser(prog="mcore-rl completion", description=about)
    parser.add_argument("shell", choices=sorted(SCRIPTS))
    return parser


def complete(line: str) -> list[str]:
    """Return the words that may end a line; none where a file name is expected."""
    try:
        before = shlex.split(line)
    except ValueError:  # an open quote
        before = line.split()
    current = "" if line[-1:].isspace() else before.pop()
    return [word for word in _list_candidates(before[1:], current) if word.startswith(current)]


def _list_candidates(before: Sequence[str], current: str) -> Iterator[str]:
    """Yield the words that may follow those of `before`, whatever `current` begins with."""
    if not before:
        yield from (*command_line.COMMANDS, *command_line.OPTIONS)
        return
    name = before[0]
    if name not in command_line.COMMANDS:
        return
    parser = command_line.load_command(name).build_parser()
    for word in before[1:]:
        parser = _get_subcommands(parser).get(word, parser)
    if (option := parser.find_option(before[-1])) is not None:
        yield from _list_option_values(option, current)
        return
    if name in SCHEMAS and not current.startswith("-"):
        yield from _list_settings(name, current, is_topic="-h" in before or "--help" in before)
        if current:
            return
    yield from _list_arguments(parser, current)


def _list_settings(name: str, current: str, *, is_topic: bool) -> Iterator[str]:
    """Yield key= of all settings, KEY=VALUE once a key is typed; of a help topic, the groups."""
    groups = list(list_setting_groups(SCHEMAS[name]()))
    if is_topic:
        yield from (group.key for group in groups if group.key)
        return
    key, equals, text = current.partition("=")
    if not equals:
        yield from ("recipe=", *(f"{s.key}=" for group in groups for s in group.settings))
    elif key == "recipe":
        yield from (
            f"recipe={name}" for name in (*recipes.list_recipes(), *recipes.find_files(text))
        )
    else:
        for group in groups:
            for setting in group.settings:
                if setting.key == key:
                    yield from (f"{key}={value}" for value in list_choices(setting))


def _list_arguments(parser: Parser, current: str) -> Iterator[str]:
    """Yield the subcommands, choices and options."""
    yield from _get_subcommands(parser)
    takes_path = any(a.metavar in _PATHS and not a.option_strings for a in parser._actions)
    if takes_path and not current.startswith("-"):
        return
    for action in parser._actions:
        if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
            yield from map(str, action.choices)
        yield from (name for name in action.option_strings if name.startswith("--"))


def _list_option_values(action: argparse.Action, current: str) -> Iterator[str]:
    """Yield the values of an option: the axes of a layout, or the names that its help lists."""
    axes = [_AXES[name] for name in action.option_strings if name in _AXES]
    if axes:
        done, comma, _ = current.rpartition(",")
        given = [part.partition("=")[0] for part in done.split(",")]
        free = [field.name for field in fields(axes[0]) if field.name not in given]
        yield from (f"{done}{comma}{name}=" for name in free)
    elif isinstance(action.metavar, str) and "|" in action.metavar:
        yield from action.metavar.split("|")


def _get_subcommands(parser: Parser) -> dict[str, Parser]:
    return {
        name: subparser
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, subparser in action.choices.items()
    }
