"""The reward `code`: runs the program in a response against tests, in the sandbox."""

from __future__ import annotations

import functools
import json
import re
import secrets
import textwrap
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.limits import PositiveFloat
from mcore_rl.config.schema import SandboxSettings
from mcore_rl.rewards.registry import (
    gives,
    reads_answer,
    register_reward,
    run_in_process,
    shorten_repr,
)
from mcore_rl.sandbox.sandbox import Sandbox

# A line that opens or closes a fenced block: blanks, the fence, and the info string.
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,}|)(.*)", re.DOTALL)
_PYTHON = re.compile(r"\{?\.?(?:python[\d.]*|py3?)(?![\w+#-])", re.IGNORECASE)
# What models write otherwise than CommonMark. Possessive: no line keeps an event loop waiting.
_ONE_LINE = re.compile(rf"(?<!`)(`{{3,}}+)({_PYTHON.pattern})[ \t]++([^`]+)\1(?!`)", re.IGNORECASE)
_BEFORE_FENCE = re.compile(
    r".*[^`\s][ \t]*(`{3,}+)((?:\{?\.?[a-z][\w.+#-]*\}?)?[ \t]*)", re.IGNORECASE
)
_AFTER_FENCE = re.compile(r"[ \t]*(?:</\w+>|[.,;:!])?[ \t]*")
_MARKERS = re.compile(r"([ \t]*+(?:(?:>|[-*+]|\d{1,9}[.)])[ \t]*+)*+)(?=`{3}|~{3})")  # list, quote
_STATEMENT = re.compile(
    r"(?:def|class|import|from|for|while|if|with|async|return|print|try)(?![\w=.-])|@\w|"
    r"[A-Za-z_]\w* = "
)
_TYPING = frozenset(name for name in typing.__all__ if name[0].isupper())
# Runs the program, then each test in its namespace, and prints the key of each that does not raise,
# or that itself exits with status 0. Their prints go to stderr, and their stdin is empty.
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
        except BaseException as error:
            if not is_own_exit(error):
                print(f"test {number}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
        print(key, file=out, flush=True)

def is_own_exit(error):
    files, frame = [], error.__traceback__
    while frame is not None:
        files.append(frame.tb_frame.f_code.co_filename)
        frame = frame.tb_next
    return isinstance(error, SystemExit) and not error.code and "answer.py" not in files

run(**json.load(sys.stdin), out=os.fdopen(os.dup(1), "w"))
"""


@dataclass(frozen=True)
class CodeSettings(SandboxSettings):
    """Settings of `reward.name=code`; limits are per test, or for all asserts together."""

    cpu_s: PositiveFloat = 5.0
    wall_s: PositiveFloat = 10.0
    all_or_nothing: bool = False  # 1 if all tests pass, else 0; false: the share that pass
    timeout_s: float = 60.0  # for all tests of a response; a longer one earns nothing


def _check_tests(answer: object, settings: CodeSettings) -> None:
    """Raise ValueError for tests that no program can pass."""
    tests = read_tests(answer)
    for test in tests.get("asserts", ()):
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(test, "test", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the test {shorten_repr(test)} is no Python: {error}") from error
    limit = settings.output_kb << 10
    if longest := [o for o in tests.get("outputs", ()) if len(o.encode()) > limit]:
        raise ValueError(
            f"an expected output has {len(longest[0].encode())} bytes; allowed: up to {limit} "
            "(output_kb)"
        )


@register_reward("code")
@reads_answer(_check_tests)
@gives("passed", "answered", "unchecked")
@run_in_process(unchecked={"reward": 0.0, "passed": 0.0, "answered": 1.0, "unchecked": 1.0})
def code(
    text: str, fields: Mapping[str, Any], finish_reason: str, settings: CodeSettings
) -> dict[str, float]:
    """Run the program in the response: the share of tests that pass, or all or nothing.

    The field `answer` is a JSON object, or its text: {"inputs": [...], "outputs": [...]}, stdin and
    the expected stdout of each test, without blanks at ends of lines and empty lines at the end; or
    {"asserts": [...]}, statements to run after the program. After a test that reaches a limit of
    the sandbox the rest counts as failed. `passed` is the share of tests that pass, `answered` is
    1.0 if there is a program, `unchecked` is 1.0 if the tests took longer than timeout_s.

    Raises:
        ValueError: the tests cannot be read.
        SandboxError: this machine has no sandbox.
    """
    tests = read_tests(fields.get("answer"))
    program = find_last_program(text)
    if program is None:
        return {"reward": 0.0, "passed": 0.0, "answered": 0.0, "unchecked": 0.0}
    sandbox, program = _get_sandbox(settings), import_typing(program)
    if "asserts" in tests:
        passed = _count_asserts(sandbox, program, tests["asserts"]) / len(tests["asserts"])
    else:
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        passed = _count_pairs(sandbox, program, pairs, settings.all_or_nothing) / len(pairs)
    reward = float(passed == 1) if settings.all_or_nothing else passed
    return {"reward": reward, "passed": passed, "answered": 1.0, "unchecked": 0.0}


def find_last_program(text: str) -> str | None:
    """Return the last complete block of Python; without one, the last that names no language.

    The indentation of the fence, marks of a list or a quote around it, and the common indentation
    of the lines are removed.
    """
    blocks = list(_iterate_blocks(text))
    python = [program for language, program in blocks if _PYTHON.match(language)]
    programs = python or [program for language, program in blocks if not language]
    return programs[-1] if programs else None


def import_typing(program: str) -> str:
    """Import the names of typing that a program uses, such as List; its own imports come later."""
    names = sorted(_TYPING & {*re.findall(r"\b[A-Z]\w*", program)})
    if not names:
        return program
    future = list(re.finditer(r"^from __future__ import [^(\n]*\n", program, re.MULTILINE))
    start = future[-1].end() if future else 0
    return f"{program[:start]}from typing import {', '.join(names)}\n{program[start:]}"


@dataclass(slots=True)
class _Block:
    """An open fenced block."""

    fence: str
    language: str
    indent: int  # columns before the fence
    margin: str  # blanks to remove from each line
    num_quotes: int  # marks > before the fence
    lines: list[str]


def _iterate_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of each complete fenced block.

    As in CommonMark, with exceptions for what models write: text may stand before the opening
    fence and, after a blank, behind the closing one; code may begin on the line of the opening
    fence, and end on that of the closing one; and a fence with a language closes the open block and
    begins another.
    """
    block: _Block | None = None
    for line in re.split("\r\n?|\n", text):
        if block is None:
            for match in _ONE_LINE.finditer(line):
                yield match[2], f"{match[3].strip()}\n"
            block = _open_block(_ONE_LINE.sub("", line))
            continue
        if block.num_quotes:
            line = re.sub(rf"[ \t]*(?:> ?){{1,{block.num_quotes}}}", "", line, count=1)
        blanks, marks, info = _FENCE.match(line).groups()  # type: ignore[union-attr]
        code, fence, after = line.partition(block.fence)
        if marks.startswith(block.fence) and len(blanks.expandtabs(4)) < block.indent + 4:
            yield block.language, _dedent(block.lines)
            block = _open_block(line if re.match(r"[A-Za-z{]", info) else info)
        elif code.strip() and fence and _AFTER_FENCE.fullmatch(after):
            yield block.language, _dedent([*block.lines, code.removeprefix(block.margin).rstrip()])
            block = None
        else:
            block.lines.append(line.removeprefix(block.margin))


def _open_block(line: str) -> _Block | None:
    """Return the block that a line opens; None if it opens none."""
    markers, marks, info, margin = _MARKERS.match(line), "", "", ""
    if markers:
        marks, info = _FENCE.match(line, markers.end()).groups()[1:]  # type: ignore[union-attr]
        margin = "" if markers[1].strip() else markers[1]
    if not marks or (marks[0] == "`" and "`" in info):
        before, markers = _BEFORE_FENCE.fullmatch(line), None
        if before is None or not line.count(before[1]) % 2:
            return None
        (marks, info), margin = before.groups(), ""
    prefix = markers[1] if markers else ""
    indent, num_quotes = len(prefix.expandtabs(4)), prefix.count(">")
    block = _Block(marks, info.strip(), indent, margin, num_quotes, [])
    language = _PYTHON.match(block.language)
    if language and _STATEMENT.match(code := block.language[language.end() :].lstrip()):
        block.lines.append(code)
    return block


def _dedent(lines: list[str]) -> str:
    """Join lines, without their common indentation if the first that is not empty is indented."""
    text = "".join(f"{line}\n" for line in lines)
    return textwrap.dedent(text) if text.lstrip("\n")[:1] in (" ", "\t") else text


@functools.cache
def _get_sandbox(settings: CodeSettings) -> Sandbox:
    return Sandbox(settings)


def read_tests(answer: object) -> Mapping[str, Sequence[str]]:
    """Read the field `answer`, as described in `code`; ValueError if it is invalid."""
    try:
        tests = json.loads(answer) if isinstance(answer, str) else answer
        if isinstance(answer, str):
            json.dumps(tests, ensure_ascii=False).encode()  # no half of a surrogate pair
    except ValueError:
        tests = None
    columns = (["asserts"], ["inputs", "outputs"])
    if isinstance(tests, Mapping):  # in a column of structs each row has all keys
        tests = {name: value for name, value in tests.items() if value is not None}
    if isinstance(tests, Mapping) and sorted(tests) in columns:
        lists = list(tests.values())
        are_texts = all(
            isinstance(texts, list) and all(isinstance(text, str) for text in texts)
            for texts in lists
        )
        if are_texts and lists[0] and len({len(texts) for texts in lists}) == 1:
            return tests
    raise ValueError(
        f"the field 'answer' (data.answer_column) is {shorten_repr(answer)}; code needs an "
        'object {"inputs": [...], "outputs": [...]} or {"asserts": [...]} with lists of texts, '
        "equally long, not empty, of whole characters"
    )


def _count_asserts(sandbox: Sandbox, program: str, tests: Sequence[str]) -> int:
    """Count the tests that pass, in one call."""
    keys = [secrets.token_hex(16) for _ in tests]
    arguments = {"code": program, "tests": tests, "keys": keys}
    result = sandbox.run(RUN_ASSERTS, stdin=json.dumps(arguments))
    return len(set(keys) & set(result.stdout.split()))


def _count_pairs(
    sandbox: Sandbox, program: str, pairs: Sequence[tuple[str, str]], stops_early: bool
) -> int:
    """Count the tests with the right output, each in a separate call."""
    passed = 0
    for given, expected in pairs:
        result = sandbox.run(program, stdin=given)
        is_right = result.status == "ok" and split_output(result.stdout) == split_output(expected)
        passed += is_right
        if result.status not in ("ok", "error") or (stops_early and not is_right):
            break
    return passed


def split_output(text: str) -> list[str]:
    """Split an output into lines, without blanks at their ends and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
