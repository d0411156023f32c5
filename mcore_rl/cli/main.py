"""The `mcore-rl` command: one subcommand per job."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.process_cleanup import EXIT_STOPPED, RunStopped
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.observability.garbage import leave_garbage_at_exit
from mcore_rl.observability.start import begin

COMMANDS = {
    "rl": "reinforcement learning: mcore-rl rl recipe=quickstart [key=value ...]",
    "sft": "supervised training: mcore-rl sft model.path=DIR data.train_file=FILE ...",
    "dpo": "training on preference pairs: mcore-rl dpo model.path=DIR data.train_file=FILE ...",
    "rm": "a reward model from preference pairs: mcore-rl rm model.path=DIR ...",
    "eval": "pass@k and more on data sets: mcore-rl eval model.path=DIR data.sets.NAME=FILE ...",
    "chat": "talk to a checkpoint, or to a run's last one: mcore-rl chat DIR",
    "samples": "what a run has sampled, token by token: mcore-rl samples RUN [--list]",
    "servers": "which servers generate for a run: mcore-rl servers RUN [--remove 1]",
    "data": "files to train on: mcore-rl data gsm8k --input FILE ... --output FILE",
    "convert": "checkpoints of either kind: mcore-rl convert hf-to-mcore --model DIR ...",
    "bench": "how fast something is: mcore-rl bench reshard [--json], mcore-rl bench async",
    "plan": "what a weight sync moves: mcore-rl plan reshard --model DIR --train tp=2 ...",
    "verify": "whether the engines agree: mcore-rl verify parity --model DIR --layout tp=2 ...",
    "doctor": "whether the nodes have what a run needs: mcore-rl doctor [--json]",
    "completion": 'words that the Tab key completes: eval "$(mcore-rl completion bash)"',
}
OPTIONS = {
    "--help": "this; mcore-rl COMMAND --help says more",
    "--version": "of mcore-rl and of the packages that results depend on, and the lane",
}
# What signals that the scope of a run turns into exits are called.
_ENDED = {128 + signal.SIGTERM: "terminated", 128 + signal.SIGHUP: "hung up"}


def main() -> int:
    begin()
    leave_garbage_at_exit()
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _show(_usage())
    if arguments[0] in ("-V", "--version"):
        from mcore_rl.observability.versions import lane, versions

        return _show("\n".join(f"{n} {v}" for n, v in {**versions(), "lane": lane()}.items()))
    if arguments[0] not in COMMANDS:
        return _refuse(arguments[0])
    return _run(arguments[0], arguments[1:])


def _usage() -> str:
    from mcore_rl.cli.options import wrap_descriptions

    rows = wrap_descriptions({**COMMANDS, **OPTIONS}, indent=2)
    return "\n".join(["usage: mcore-rl COMMAND ...", *rows])


def _show(text: str) -> int:
    from mcore_rl.cli.options import show

    show(text)
    return 0


def _refuse(word: str) -> int:
    from mcore_rl.cli.options import closest

    kind, known = ("option", OPTIONS) if word.startswith("-") else ("command", COMMANDS)
    close = closest(word, known)
    if not close and "=" in word:
        close = [f"mcore-rl rl {word}"]
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    print(f"mcore-rl: unknown {kind} {word!r}{hint}\n{_usage()}", file=sys.stderr)
    return 2


def _run(name: str, arguments: list[str]) -> int:
    """The exit status: 2 for bad input, 1 for a run that had to stop, 128 + n for signal n.

    75 for a run that a signal has ended and that can go on.
    """
    try:
        command: Callable[[list[str]], int | None]
        command = importlib.import_module(f"mcore_rl.cli.{name}").main
        return command(arguments) or 0
    except ConfigError as error:
        return _say(name, str(error), 2)
    except RunFailed as error:
        return _say(name, str(error), 1)
    except RunStopped as error:
        return _say(name, str(error), EXIT_STOPPED)
    except OSError as error:
        if error.filename is None or error.strerror is None:  # no file of the user's: a defect
            raise
        return _say(name, f"{os.fsdecode(error.filename)!r}: {error.strerror}", 2)
    except KeyboardInterrupt as error:
        return _say(name, str(error) or "interrupted", 128 + signal.SIGINT)
    except SystemExit as error:
        if error.code not in _ENDED:
            raise
        return _say(name, _ENDED[error.code], error.code)


def _say(name: str, message: str, status: int) -> int:
    with suppress(OSError):  # a terminal that has hung up
        print(f"mcore-rl {name}: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
