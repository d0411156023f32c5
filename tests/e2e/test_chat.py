"""mcore-rl chat in a terminal and behind a pipe, with a model whose answers are known.

Its attention and experts give nothing, and the head of each token is the embedding of the token
that comes before it: after a line break it says TEXT, one byte a token.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mcore_rl.examples.tasks import last_digit
from tests.e2e.processes import session
from tests.nightly import nightly
from tests.pages import select_commands

MCORE_RL = str(Path(sys.executable).with_name("mcore-rl"))
TEXT = "né €5!"  # of nine different bytes
CONTEXT = 32768
OPTIONS = (
    "--max-context", str(CONTEXT), "--max-tokens", str(CONTEXT), "--kv-cache-bytes", str(128 << 20)
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """`brief` says TEXT once, `endless` says it until it is ended; `run` has a `brief` last."""
    folder = tmp_path_factory.mktemp("models")
    last_digit._write_model(folder / "brief", 0)
    shutil.copytree(folder / "brief", folder / "endless")
    for name in ("brief", "endless"):
        _teach(folder / name, is_endless=name == "endless")
    shutil.copytree(folder / "endless", folder / "run" / "hf" / "step_000002")
    shutil.copytree(folder / "brief", folder / "run" / "hf" / "step_000010")
    return {name: folder / name for name in ("brief", "endless", "run")}


def _teach(folder: Path, *, is_endless: bool) -> None:
    tokenizer, file = AutoTokenizer.from_pretrained(folder), folder / "model.safetensors"
    [start] = tokenizer.encode("\n")
    ids = [next(i for i in range(384) if _byte_of(tokenizer, i) == b) for b in TEXT.encode()]
    last = ids[0] if is_endless else tokenizer.eos_token_id
    after = dict(zip([start, *ids], [*ids, last], strict=True))
    weights = load_file(file)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    torch.manual_seed(0)
    embedding = torch.randn_like(weights["model.embed_tokens.weight"])
    head = torch.zeros_like(embedding)
    for token, following in after.items():
        head[following] += embedding[token]
    save_file(
        weights | {"model.embed_tokens.weight": embedding, "lm_head.weight": head},
        file,
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    longer = config | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(longer))


def _byte_of(tokenizer, token: int) -> int | None:
    """Return the byte of a token that is one byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = {name: byte for byte, name in bytes_to_unicode().items()}
    return names.get(tokenizer.convert_ids_to_tokens(token))


def piped(model: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    line = [MCORE_RL, "chat", str(model), *OPTIONS, *options]
    return subprocess.run(line, input=text, capture_output=True, text=True, timeout=300)


[ON_THE_PAGE] = select_commands("chat")


def test_the_command_of_the_page_answers_lines_of_a_pipe_by_the_last_checkpoint(models, tmp_path):
    run = tmp_path / "outputs" / "quickstart"
    run.parent.mkdir()
    run.symlink_to(models["run"])
    line = [MCORE_RL, *ON_THE_PAGE.text.split()[1:], "--kv-cache-bytes", str(64 << 20)]
    done = subprocess.run(
        [*line, "--system", "Be."], input="one\n\n/reset\n/nope\ntwo\n/exit\nthree\n",
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [lines[0], lines[1].partition(":")[0], *lines[2:]] == [
        TEXT, "/nope is no command", TEXT,
    ]  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly  # the tests above and below have answers that end, and one that is ended
def test_an_answer_ends_where_its_tokens_do(models):
    # Of 20 bytes: two times TEXT, which has 9 of them, and the first character and a half.
    done = piped(models["endless"], "one\n", "--max-tokens", "20", "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, f"{TEXT}{TEXT}n ... (cut off)\n")


class Terminal:
    """A program in tmux."""

    def __init__(self, folder: Path, *command: str) -> None:
        self._tmux = ["tmux", "-u", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        environment = os.environ | {"LC_ALL": "C.UTF-8"}
        size = ("-x", "100", "-y", "30")
        wrapper = ("bash", "-c", '"$@"; echo "it ended with $?"', "bash")  # tmux may miss an end
        line = [*self._tmux, "new-session", "-d", *size, *wrapper, *command, ";"]
        subprocess.run([*line, "set", "remain-on-exit", "on"], check=True, env=environment)
        self.pid = int(self.ask("display-message", "-p", "#{pane_pid}"))

    def ask(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], check=True, capture_output=True, text=True)
        return done.stdout

    @property
    def screen(self) -> str:
        return self.ask("capture-pane", "-p", "-J", "-S", "-")

    def type(self, *keys: str) -> None:
        self.ask("send-keys", *keys)

    def enter(self, line: str) -> None:
        """Type a line, again if it came while the line editor was starting."""
        limit = time.monotonic() + 120
        while not self.screen.rstrip().endswith(f"> {line}"):
            assert time.monotonic() < limit, self.screen
            self.type("C-u", line)
            time.sleep(0.5)
        self.type("Enter")

    def wait_for(self, happened: Callable[[str], bool], what: str) -> str:
        limit = time.monotonic() + 120
        while not happened(screen := self.screen):
            assert time.monotonic() < limit, f"waited 120 s for {what}; the screen:\n{screen}"
            time.sleep(0.1)
        return screen

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True)


@pytest.fixture
def open_terminal(tmp_path) -> Iterator[Callable[..., Terminal]]:
    if not shutil.which("tmux"):
        pytest.skip("no tmux: Debian has it in tmux")
    terminals: list[Terminal] = []

    def start(*command: str) -> Terminal:
        terminals.append(Terminal(tmp_path, *command))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


@pytest.mark.parametrize("tp", ["1", nightly("2")])
def test_ctrl_c_in_a_terminal_ends_the_answer_and_not_the_program(models, open_terminal, tp):
    # With tp=2 the engine is in processes of its own, which Ctrl-C reaches, too.
    terminal = open_terminal(MCORE_RL, "chat", str(models["endless"]), *OPTIONS, "--tp", tp)
    screen = terminal.wait_for(lambda s: s.rstrip().endswith("\n>"), "the prompt")
    assert "/exit or Ctrl-D ends" in screen
    for number in (1, 2):  # the second one with the first answer before it
        terminal.enter("hello")
        terminal.wait_for(lambda s: s.rpartition(" ...\n")[2].count(TEXT) > 2, "an answer")
        terminal.type("C-c")
        ended = terminal.wait_for(lambda s: s.rstrip().endswith("\n>"), "the next prompt")
        assert ended.count(" ...\n") == number, ended
        assert "\ufffd" not in ended
    time.sleep(1)  # what is typed while the line editor starts is lost, as on any terminal
    terminal.type("lost")
    terminal.wait_for(lambda s: s.rstrip().endswith("> lost"), "the line")
    terminal.type("C-c")
    terminal.wait_for(lambda s: s.rstrip().endswith("\n>"), "the line to be dropped")
    started = [process for process in session(terminal.pid) if process.pid != terminal.pid]
    terminal.type("C-d")
    assert "it ended with 0" in terminal.wait_for(lambda s: "it ended with" in s, "the end")
    assert psutil.wait_procs(started, 10)[1] == []
