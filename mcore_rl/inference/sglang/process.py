"""A server of SGLang as a child process: its command line, its key, and its end.

It listens on 127.0.0.1 and takes only calls with a key of this run. SGLang's connections between
its own processes (ZeroMQ, torch's store) are neither authenticated nor encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from mcore_rl.inference.sglang.client import SGLangClient

_HOST = "127.0.0.1"
_POLL_S = 0.5
_TERMINATE_S = 10.0  # between SIGTERM and SIGKILL
# Ends the child with the process that has started it; SGLang's own processes end with the child
# (kill_itself_when_parent_died). PR_SET_PDEATHSIG is 1, SIGKILL 9.
_LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that starts SGLang has died")
os.execv(sys.argv[2], sys.argv[2:])
"""


def build_command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return server arguments as words.

    >>> build_command_line({"tp_size": 2, "enable_mixed_chunk": True, "cuda_graph_bs": [1, 2]})
    ['--tp-size', '2', '--enable-mixed-chunk', '--cuda-graph-bs', '1', '2']
    """
    words = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"--{option}", *map(str, values)]
    return words


class SGLangProcess:
    """A child process with a server.

    Args:
        python: Interpreter; "" for that of this process.
        arguments: Arguments of `sglang.launch_server`, without address and key.
    """

    def __init__(self, python: str, arguments: Mapping[str, Any]) -> None:
        self.key = secrets.token_urlsafe(32)
        with socket.create_server((_HOST, 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://{_HOST}:{port}"
        python = python or sys.executable
        # Command lines are readable by all users. SGLang reads further arguments from a file
        # (server_args.py:683, utils/server_args_config_parser.py:155).
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-")
        path = Path(self._folder.name, "key.yaml")
        path.write_text(json.dumps({"api-key": self.key}))
        # The last of two equal options counts, abbreviated ones included.
        options = {**arguments, "config": str(path), "host": _HOST, "port": port}
        words = [python, "-m", "sglang.launch_server", *build_command_line(options)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def exit_status(self) -> int | None:
        """Status of the process; None while it runs."""
        return self._process.poll()

    async def wait_until_healthy(self, client: SGLangClient) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: the process has ended.
        """
        while not await client.check_health():
            if self.exit_status is not None:
                raise RuntimeError(
                    f"SGLang does not start: it has ended with status {self.exit_status}; its "
                    "stderr says why"
                )
            await asyncio.sleep(_POLL_S)
        self._folder.cleanup()

    def close(self) -> None:
        """End the process and its descendants."""
        children = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self._process.pid).children(recursive=True)
        if self.exit_status is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
