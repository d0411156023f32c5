"""A reward that runs the program in a response against tests, in the sandbox."""

from __future__ import annotations

import functools
import json
import re
import secrets
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.schema import SandboxSettings
from mcore_rl.rewards.base import gives, in_process, reads_answer, register_reward, shown
from mcore_rl.sandbox.sandbox import Sandbox

# A line that opens or closes a fenced block: what is before it, the fence, and what follows.
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,}|)(.*)", re.DOTALL)
_PYTHON = re.compile(r"\{?\.?(?:python[\d.]*|py3?)(?![\w+#-])", re.IGNORECASE)
# Runs the program, then each test in its names; tells the key of each that raises nothing. What
# they print goes to stderr, and their stdin is empty.
RUN_ASSERTS = """
import json, os, sys, types

def run(code, tests, keys, out):
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    module = sys.modules["answer"] = types.ModuleType("answer")  # dataclasses look for it there
    names = vars(module)
    exec(compile(code, "answer.py", "exec"), names)
    for number, (test, key) in enumerate(zip(tests, keys)):
        try:
            exec(compile(test, f"test {number}", "exec"), names)
        except Exception as error:
            print(f"test {number}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            print(key, file=out, flush=True)

run(**json.load(sys.stdin), out=os.fdopen(os.dup(1), "w"))
"""


@dataclass(frozen=True)
class CodeSettings(SandboxSettings):
    """Settings of `reward.name=code`; limits are of one test, or of all asserts."""

    cpu_s: float = 5.0
    wall_s: float = 10.0
    all_or_nothing: bool = False  # 1 if all tests pass, else 0; false: the share that pass
    timeout_s: float = 60.0  # for all tests of one response; one that takes longer earns nothing


def _check_tests(answer: object, settings: CodeSettings) -> None:
    read_tests(answer)


@register_reward("code")
@reads_answer(_check_tests)
@gives("passed", "answered", "unchecked")
@in_process(unchecked={"reward": 0.0, "passed": 0.0, "answered": 1.0, "unchecked": 1.0})
def code(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: CodeSettings
) -> dict[str, float]:
    """The share of tests that the program in the response passes, or all or nothing.

    The field `answer` is a JSON object, or its text: {"inputs": [...], "outputs": [...]}, what the
    program reads from stdin and has to write to stdout, where blanks at ends of lines and empty
    lines at the end do not count; or {"asserts": [...]}, statements that are run after it. After a
    test that reaches a limit of the sandbox the others count as failed. `passed` is the share,
    `answered` is 1.0 where there is a block, `unchecked` where all took longer than timeout_s.

    Raises:
        ValueError: the tests cannot be read.
        SandboxError: this machine has no sandbox.
    """
    tests = read_tests(fields.get("answer"))
    program = last_program(text)
    if program is None:
        return {"reward": 0.0, "passed": 0.0, "answered": 0.0, "unchecked": 0.0}
    sandbox = _sandbox(settings)
    if "asserts" in tests:
        passed = _num_asserts(sandbox, program, tests["asserts"]) / len(tests["asserts"])
    else:
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        passed = _num_pairs(sandbox, program, pairs, settings.all_or_nothing) / len(pairs)
    reward = float(passed == 1) if settings.all_or_nothing else passed
    return {"reward": reward, "passed": passed, "answered": 1.0, "unchecked": 0.0}


def last_program(text: str) -> str | None:
    """Return the last complete block of Python; without one, the last that names no language.

    Indentation that its fence has, or all of its lines, is taken off.
    """
    blocks = list(_fenced_blocks(text))
    python = [program for language, program in blocks if _PYTHON.match(language)]
    programs = python or [program for language, program in blocks if not language]
    return programs[-1] if programs else None


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of each complete fenced block.

    As CommonMark has them, but: text after a blank may follow the fence that closes a block, and
    one with a language closes the open block and begins another, which models do.
    """
    fence, language, lines = "", "", list[str]()  # of the open block; an empty fence: there is none
    indent, margin = 0, ""
    for line in re.split("\r\n?|\n", text):
        blanks, marks, info = _FENCE.match(line).groups()  # type: ignore[union-attr]
        depth = len(blanks.expandtabs(4))
        begins = bool(marks and info.strip()) and info[0] not in " \t"
        if fence and marks.startswith(fence) and depth < indent + 4:
            yield language, _dedent(lines)
            fence, opens = "", begins
        else:
            opens = bool(marks) and not fence
        if opens and not (marks[0] == "`" and "`" in info):
            fence, language, lines, indent, margin = marks, info.strip(), [], depth, blanks
        elif fence:
            lines.append(line.removeprefix(margin))


def _dedent(lines: list[str]) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return textwrap.dedent(text) if text.lstrip("\n")[:1] in (" ", "\t") else text


@functools.cache
def _sandbox(settings: CodeSettings) -> Sandbox:
    return Sandbox(settings)


def read_tests(answer: object) -> Mapping[str, Sequence[str]]:
    """What the field `answer` has to be, as in `code`; raises ValueError."""
    try:
        tests = json.loads(answer) if isinstance(answer, str) else answer
    except ValueError:
        tests = None
    columns = (["asserts"], ["inputs", "outputs"])
    if isinstance(tests, Mapping):  # a column of structs has all keys in each row
        tests = {name: value for name, value in tests.items() if value is not None}
    if isinstance(tests, Mapping) and sorted(tests) in columns:
        lists = list(tests.values())
        are_texts = all(isinstance(one, list) and all(map(_is_text, one)) for one in lists)
        if are_texts and lists[0] and len({len(one) for one in lists}) == 1:
            return tests
    raise ValueError(
        f"the field 'answer' (data.answer_column) is {shown(answer)}; code needs an "
        'object {"inputs": [...], "outputs": [...]} or {"asserts": [...]} with lists of texts, '
        "equally long, not empty"
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _num_asserts(sandbox: Sandbox, program: str, tests: Sequence[str]) -> int:
    """How many pass, in one call."""
    keys = [secrets.token_hex(16) for _ in tests]
    told = {"code": program, "tests": tests, "keys": keys}
    result = sandbox.run(RUN_ASSERTS, stdin=json.dumps(told))
    return len(set(keys) & set(result.stdout.split()))


def _num_pairs(
    sandbox: Sandbox, program: str, pairs: Sequence[tuple[str, str]], stops_early: bool
) -> int:
    """How many give the right output, each in a call of its own."""
    passed = 0
    for given, wanted in pairs:
        result = sandbox.run(program, stdin=given)
        is_right = result.status == "ok" and output_lines(result.stdout) == output_lines(wanted)
        passed += is_right
        if result.status not in ("ok", "error") or (stops_early and not is_right):
            break
    return passed


def output_lines(text: str) -> list[str]:
    """What is compared: without blanks at ends of lines and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
