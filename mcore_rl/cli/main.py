"""The `mcore-rl` command: one subcommand per job."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.packages import EXTRAS, describe_missing
from mcore_rl.controller.process_cleanup import EXIT_STOPPED, RunStopped
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.observability.process import (
    exempt_imports_from_gc,
    record_start,
    skip_gc_at_exit,
)

if TYPE_CHECKING:
    from mcore_rl.cli.options import Parser

COMMANDS = {
    "rl": "reinforcement learning: mcore-rl rl recipe=quickstart [key=value ...]",
    "sft": "supervised training: mcore-rl sft model.path=DIR data.train_file=FILE ...",
    "dpo": "training on preference pairs: mcore-rl dpo model.path=DIR data.train_file=FILE ...",
    "rm": "a reward model from preference pairs: mcore-rl rm model.path=DIR ...",
    "eval": "pass@k and more on data sets: mcore-rl eval model.path=DIR data.sets.NAME=FILE ...",
    "chat": "talk to a checkpoint, or to a run's last one: mcore-rl chat DIR",
    "samples": "what a run has sampled, token by token: mcore-rl samples RUN [--list]",
    "report": "plots and samples of runs as one page: mcore-rl report RUN [RUN ...] [--live]",
    "servers": "which servers generate for a run: mcore-rl servers RUN [--remove 1]",
    "data": "files to train on: mcore-rl data gsm8k --input FILE ... --output FILE",
    "convert": "checkpoints of either kind: mcore-rl convert hf-to-mcore --model DIR ...",
    "convert-config": "a recipe from a run of verl or TRL: mcore-rl convert-config verl FILE",
    "bench": "run microbenchmarks: mcore-rl bench reshard, mcore-rl bench data-plane",
    "plan": "whether a run fits, its time and traffic: mcore-rl plan memory recipe=NAME ...",
    "verify": "whether the engines agree: mcore-rl verify parity --model DIR --layout tp=2 ...",
    "doctor": "check the nodes of a run: mcore-rl doctor [--json]",
    "completion": 'words that the Tab key completes: eval "$(mcore-rl completion bash)"',
}
OPTIONS = {
    "--help": "this; mcore-rl COMMAND --help says more",
    "--version": "of mcore-rl and of the packages that results depend on, and the extra",
}
JOBS = ("rl", "sft", "dpo", "rm", "eval")
# Names of the signals that the scope of a run turns into exits.
_SIGNALS = {128 + signal.SIGTERM: "terminated", 128 + signal.SIGHUP: "hung up"}


class Command(Protocol):
    """`mcore-rl NAME`."""

    def main(self, arguments: list[str], /) -> int | None: ...

    def build_parser(self) -> Parser: ...


def main() -> int:
    record_start()
    skip_gc_at_exit()
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _show(_format_usage())
    if arguments[0] in ("-V", "--version"):
        from mcore_rl.observability.process import detect_installed_extra, list_versions

        versions = {**list_versions(), "extra": detect_installed_extra()}
        return _show("\n".join(f"{name} {version}" for name, version in versions.items()))
    if arguments[0] not in COMMANDS:
        return _refuse(arguments[0])
    return run_command(arguments[0], arguments[1:])


def _format_usage() -> str:
    from mcore_rl.cli.options import wrap_descriptions

    rows = wrap_descriptions({**COMMANDS, **OPTIONS}, indent=2)
    return "\n".join(["usage: mcore-rl COMMAND ...", *rows])


def _show(text: str) -> int:
    from mcore_rl.cli.options import print_text

    print_text(text)
    return 0


def _refuse(word: str) -> int:
    from mcore_rl.config.checks import find_closest

    kind, known = ("option", OPTIONS) if word.startswith("-") else ("command", COMMANDS)
    close = find_closest(word, known)
    if not close and "=" in word:
        close = [f"mcore-rl rl {word}"]
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    print(f"mcore-rl: unknown {kind} {word!r}{hint}\n{_format_usage()}", file=sys.stderr)
    return 2


def load_command(name: str) -> Command:
    """Return the job, or the module of this folder, that is a command."""
    if name in JOBS:
        from mcore_rl.cli.job import JOB_COMMANDS

        return JOB_COMMANDS[name]
    module: Any = importlib.import_module(f"mcore_rl.cli.{name.replace('-', '_')}")
    command: Command = module
    return command


def run_command(name: str, arguments: list[str]) -> int:
    """Run a command and return the exit status.

    It is 2 for bad input, 1 for a run that had to stop, 75 for one that a signal has ended and that
    can be resumed, else 128 + n for signal n.
    """
    try:
        with exempt_imports_from_gc():
            command = load_command(name)
        return command.main(arguments) or 0
    except ConfigError as error:
        return _report(name, str(error), 2)
    except RunFailed as error:
        return _report(name, str(error), 1)
    except RunStopped as error:
        return _report(name, str(error), EXIT_STOPPED)
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in EXTRAS:
            raise
        return _report(name, describe_missing(package), 2)
    except OSError as error:
        if error.filename is None or error.strerror is None:  # no file of the user's: a defect
            raise
        return _report(name, f"{os.fsdecode(error.filename)!r}: {error.strerror}", 2)
    except KeyboardInterrupt as error:
        return _report(name, str(error) or "interrupted", 128 + signal.SIGINT)
    except SystemExit as error:
        if error.code not in _SIGNALS:
            raise
        return _report(name, _SIGNALS[error.code], error.code)


def _report(name: str, message: str, status: int) -> int:
    with suppress(OSError):  # a terminal that has hung up
        print(f"mcore-rl {name}: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
