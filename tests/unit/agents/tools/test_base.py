"""@tool and ToolSet: schemas are written by hand here, and so is what a model is told."""

import asyncio
import threading
import time
from typing import Literal, Optional

import pytest

from mcore_rl.agents.tools.base import Tool, ToolAnswer, ToolError, ToolSet, tool
from mcore_rl.config.errors import ConfigError


@tool
def lookup(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    close_to: Optional[float] = None,  # noqa: UP045 (the other way to write it)
    tags: list[str] | None = None,
    more: dict[str, int] | None = None,
    exact: bool = False,
) -> str:
    """Return the weather
    in a city.

    Args:
        city: its name,
            in English
        days (int): how many
    """
    return f"{city} {days} {unit} {close_to} {tags} {more} {exact}"


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "its name, in English"},
        "days": {"type": "integer", "description": "how many", "default": 1},
        "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        "close_to": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        "tags": {
            "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
            "default": None,
        },
        "more": {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "integer"}},
                {"type": "null"},
            ],
            "default": None,
        },
        "exact": {"type": "boolean", "default": False},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def test_the_schema_of_a_function():
    assert lookup.tool.schema() == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Return the weather in a city.",
            "parameters": PARAMETERS,
        },
    }
    assert lookup("Oslo") == "Oslo 1 C None None None False"


def no_docstring(a: int): ...


def no_annotation(a):
    """x"""


def own_class(a: Tool):
    """x"""


def mixed(a: int | str):
    """x"""


def mixed_literal(a: Literal["a", 1]):
    """x"""


def number_keys(a: dict[int, str]):
    """x"""


def any_number(*a: int):
    """x"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "tool no_docstring: it has no docstring"),
        (no_annotation, "tool no_annotation: the parameter a has no annotation"),
        (own_class, "the parameter a is annotated as .*Tool.*allowed: int, float"),
        (mixed, "the parameter a is annotated as"),
        (mixed_literal, "the parameter a is annotated as"),
        (number_keys, "the parameter a is annotated as"),
        (any_number, "the parameter a is variadic positional; allowed: by name"),
    ],
)
def test_functions_that_are_no_tools(function, message):
    with pytest.raises(ConfigError, match=message):
        tool(function)


def call_tool(sources: list[object], name: str, arguments: object, **settings: float) -> ToolAnswer:
    async def run() -> ToolAnswer:
        async with ToolSet(sources, **settings) as tools:
            return await tools.call(name, arguments)

    return asyncio.run(run())


@tool
async def wait(seconds: float) -> dict[str, float]:
    """Wait."""
    await asyncio.sleep(seconds)
    return {"waited": seconds}


@tool
def hang() -> str:
    """Block its thread."""
    time.sleep(3)
    return ""


@tool
def fail(how: str) -> str:
    """Fail."""
    if how == "exit":
        raise SystemExit(3)
    raise {"tool": ToolError, "time": TimeoutError, "key": KeyError}[how]("mine")


@tool
def long() -> str:
    """Return a long text."""
    return "a" * 600 + "b" * 600


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("lookup", '{"city": "Oslo", "days": 2}', "Oslo 2 C None None None False"),
        ("wait", {"seconds": 0}, '{"waited": 0}'),
        (
            "hidden",
            {},
            "Error: there is no tool 'hidden'; there are: lookup, wait, hang, fail, long",
        ),
        ("lookup", "{city}", "Error: the arguments are no JSON: Expecting property name"),
        ("lookup", "[" * 100_000, "Error: the arguments are no JSON: "),
        ("lookup", "[1]", "Error: lookup: [1] is not of type 'object'"),
        ("lookup", "{}", "Error: lookup: 'city' is a required property"),
        ("lookup", {"city": 3}, "Error: city: 3 is not of type 'string'"),
        ("lookup", {"city": "a", "days": True}, "Error: days: True is not of type 'integer'"),
        ("lookup", {"city": "a", "unit": "K"}, "Error: unit: 'K' is not one of ['C', 'F']"),
        ("lookup", {"city": "a", "tags": ["x", 1]}, "Error: tags: ['x', 1] is not valid under any"),
        ("lookup", {"city": "a", "b": 1}, "Error: lookup: Additional properties are not allowed"),
        ("wait", {"seconds": 60}, "Error: wait took longer than 0.3 s"),
        ("hang", {}, "Error: hang took longer than 0.3 s"),
        ("fail", {"how": "tool"}, "Error: mine"),
        ("fail", {"how": "time"}, "Error: TimeoutError: mine"),
        ("fail", {"how": "key"}, "Error: KeyError: 'mine'"),
        ("fail", {"how": "exit"}, "Error: RuntimeError: SystemExit: 3"),
        ("long", {}, f"{'a' * 100}\n[1000 characters left out]\n{'b' * 100}"),
    ],
)
def test_answers_of_calls(name, arguments, text):
    sources = [lookup, wait, hang, fail, long]
    answer = call_tool(sources, name, arguments, timeout_s=0.3, max_chars=200)
    assert answer.text.startswith(text)
    assert answer.is_error == text.startswith("Error")


class Counter:
    """One for each trajectory."""

    events: list[str] = []  # noqa: RUF012 (of all)

    def __init__(self) -> None:
        self.count = 0

    async def setup(self) -> None:
        self.events.append("setup")

    @tool
    async def count_up(self, by: int) -> int:
        """Count."""
        self.count += by
        return self.count

    async def close(self) -> None:
        self.events.append(f"closed at {self.count}")


@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
def test_state_of_a_trajectory_is_its_own_and_closed_however_it_ends(how):
    Counter.events.clear()

    async def trajectory(by: int) -> None:
        async with ToolSet([Counter, lookup]) as tools:
            for _ in range(3):
                await tools.call("count_up", {"by": by})
            if how == "raises":
                raise KeyError("x")
            await asyncio.sleep(0 if how == "returns" else 60)

    async def run() -> list[object]:
        tasks = [asyncio.create_task(trajectory(by)) for by in (1, 2)]
        if how == "is cancelled":
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    objects = asyncio.run(run())
    kinds = {"returns": type(None), "raises": KeyError, "is cancelled": asyncio.CancelledError}
    assert [type(instance) for instance in objects] == [kinds[how]] * 2
    assert sorted(Counter.events) == ["closed at 3", "closed at 6", "setup", "setup"]


def test_a_setup_that_fails_closes_what_was_set_up():
    class Broken(Counter):
        async def setup(self) -> None:
            raise OSError("no")

    Counter.events.clear()
    with pytest.raises(OSError, match="no"):
        call_tool([Counter, Broken], "count_up", {"by": 1})
    assert Counter.events == ["setup", "closed at 0", "closed at 0"]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([lookup, lookup], "two tools have the name 'lookup'"),
        ([print], "<built-in function print> is no tool"),
        ([Tool("a b", "x", {"type": "object"}, print)], "tool 'a b'; allowed as a name"),
    ],
)
def test_sources_that_make_no_set(sources, message):
    with pytest.raises(ConfigError, match=message):
        call_tool(sources, "lookup", {})


def test_a_thread_that_is_late_does_not_hold_up_the_end():
    start = time.monotonic()
    call_tool([hang], "hang", {}, timeout_s=0.1)
    assert time.monotonic() - start < 2
    assert threading.active_count() < 50
