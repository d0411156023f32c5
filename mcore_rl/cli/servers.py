"""mcore-rl servers: generation servers leave a run that goes on, and join it again."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.cli.options import Parser
from mcore_rl.config.checks import check_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object

_ABOUT = """\
Says which generation servers a run is to have, or takes some out and back in while it goes on: to
spare a node that is to be maintained, or is slow. The run does so before its next push of weights,
and says it in its log; prompts of a server that leaves begin again on the others."""


def main(arguments: list[str]) -> None:
    from mcore_rl.rollout.desired_servers import read_desired_servers, write_desired_servers

    options = build_parser().parse_args(arguments)
    num = _read_num_servers(options.run)
    desired = read_desired_servers(options.run, num)
    joining, leaving = {*options.add}, {*options.remove}
    _check_numbers("--add", joining, {*range(num)} - desired)
    _check_numbers("--remove", leaving, desired)
    left = (desired | joining) - leaving
    if not left:
        raise ConfigError(f"--remove {_join(leaving)}: one server has to stay")
    if joining or leaving:
        write_desired_servers(options.run, left)
    when = ", from the next push of weights on" if joining or leaving else ""
    print(f"{options.run} is to have server {_join(left)} of {_join({*range(num)})}{when}")


def _read_num_servers(run: Path) -> int:
    check_exists("RUN", run)
    settings = read_json_object(run / "config.json")
    rollout = settings.get("rollout")
    if not isinstance(rollout, dict) or not isinstance(rollout.get("num_servers"), int):
        raise ConfigError(f"{run} has no servers: it is no run of mcore-rl rl")
    num: int = rollout["num_servers"]
    return num


def _check_numbers(option: str, numbers: set[int], allowed: set[int]) -> None:
    if numbers - allowed:
        raise ConfigError(f"{option} {_join(numbers)}; allowed: {_join(allowed) or 'none now'}")


def _join(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl servers", description=_ABOUT)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the output_dir of a run")
    add("--add", type=int, nargs="+", default=[], metavar="N", help="servers that left before")
    add("--remove", type=int, nargs="+", default=[], metavar="N", help="servers that are to leave")
    return parser
