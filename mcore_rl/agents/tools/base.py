"""Tools: functions that a model can call, with the schemas that it is shown."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import math
import re
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    TypeGuard,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from jsonschema import Draft202012Validator

from mcore_rl.agents.chat_template.codec import replace_surrogates
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.image_files import convert_to_rgb
from mcore_rl.data.images import IMAGE

if TYPE_CHECKING:
    from PIL.Image import Image

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of OpenAI's functions
CLOSE_S = 10.0  # for a tool or an environment to clean up after a trajectory
_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}


class ToolError(RuntimeError):
    """Raised by a tool; its message is the answer to the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model can call, with the schema that the model is shown."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of type object
    function: Callable[..., Any]  # called with the arguments by name; may be async
    timeout_s: float | None = None  # None: that of the ToolSet; math.inf: none

    def schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    text: str  # for the model
    is_error: bool = False
    images: tuple[bytes, ...] = ()  # files, each "<image>" in `text`


class StatefulTool(Protocol):
    """Tools of one trajectory that share state: a class with methods marked by @tool.

    Its ToolSet calls `setup` first and `close` in the end, however the trajectory ends. A class
    that knows its tools only after `setup` has them as `tools`, a sequence of Tool.
    """

    async def setup(self) -> None: ...

    async def close(self) -> None: ...


@overload
def tool(function: Callable[..., Any]) -> Callable[..., Any]: ...
@overload
def tool(
    *, timeout_s: float | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def tool(function: Callable[..., Any] | None = None, *, timeout_s: float | None = None) -> Any:
    """Mark a function or method as a tool; it can still be called.

    The schema comes from its annotations (int, float, str, bool, list, dict, list[...],
    dict[str, ...], Literal of texts or whole numbers, any of them or None), defaults and docstring.
    Descriptions are the docstring up to "Args:", and the lines `name: ...` after that.

    Raises:
        ConfigError: There is no docstring, or a parameter without or with another annotation.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.tool = make_tool(function, timeout_s)  # type: ignore[attr-defined]
        return function

    return mark if function is None else mark(function)


def make_tool(function: Callable[..., Any], timeout_s: float | None = None) -> Tool:
    """Make a Tool of a function; raise ConfigError as `tool`."""
    name = function.__name__
    text, documented = _parse_docstring(function)
    if not text:
        raise ConfigError(f"tool {name}: it has no docstring, which is what the model is told")
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        where = f"tool {name}: the parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where} is {parameter.kind.description}; allowed: by name")
        if parameter.name not in hints:
            raise ConfigError(f"{where} has no annotation")
        schema = _make_schema(hints[parameter.name], where)
        if parameter.name in documented:
            schema["description"] = documented[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return Tool(name, text, parameters, function, timeout_s)


class ToolSet:
    """The tools of one trajectory: `async with ToolSet(...)` sets them up and closes them."""

    def __init__(
        self, sources: Iterable[object], timeout_s: float = 30.0, max_chars: int = 20_000
    ) -> None:
        """Create the sources that are classes.

        Args:
            sources: Tools, functions or objects with @tool, and classes or partials of them, which
                are called to make one.
            timeout_s: Limit of a call, unless the tool has its own.
            max_chars: Limit of an answer; the middle of a longer one is left out.
        """
        self._sources = [
            source() if isinstance(source, type | partial) else source for source in sources
        ]
        self._timeout_s, self._max_chars = timeout_s, max_chars
        self._tools: dict[str, Tool] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ToolSet:
        """Set the tools up; raise ConfigError if two have one name, or a source is no tool."""
        async with AsyncExitStack() as stack:
            for source in self._sources:
                if hasattr(source, "close"):
                    close = cast(StatefulTool, source).close
                    name = f"the tool {type(source).__name__}"
                    stack.push_async_callback(close_or_report, name, close)
                if hasattr(source, "setup"):
                    await source.setup()
                for listed in _list_tools(source):
                    self._add(listed)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self._tools

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of OpenAI's API and chat templates."""
        return [tool.schema() for tool in self._tools.values()]

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> ToolAnswer:
        """Call a tool. Errors of the call or the tool are answers to the model, never raised.

        Args:
            arguments: An object, or its JSON.
        """
        called = self._tools.get(name)
        if called is None:
            return self.refuse(f"there is no tool {name!r}; there are: {', '.join(self._tools)}")
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            errors = sorted(Draft202012Validator(called.parameters).iter_errors(given), key=str)
        except (RecursionError, ValueError) as error:
            return self.refuse(f"the arguments are no JSON: {error}")
        if errors:
            return self.refuse(
                "; ".join(f"{'.'.join(map(str, e.path)) or name}: {e.message}" for e in errors)
            )
        limit_s = self._timeout_s if called.timeout_s is None else called.timeout_s
        timeout = asyncio.timeout(None if limit_s == math.inf else limit_s)
        try:
            async with timeout:
                result = await _call_function(called.function, given)
        except ToolError as error:
            return self.refuse(str(error))
        except TimeoutError as error:
            late = f"{name} took longer than {limit_s:g} s"
            return self.refuse(late if timeout.expired() else f"TimeoutError: {error}")
        except Exception as error:  # noqa: BLE001 (of a user's function)
            return self.refuse(f"{type(error).__name__}: {error}")
        return self._build_answer(result)

    def _build_answer(self, result: object) -> ToolAnswer:
        """Return the answer of a result: images of PIL, alone or in a list, stay images."""
        parts = list(result) if isinstance(result, list | tuple) else [result]
        if not any(map(_is_image, parts)):
            text = result if isinstance(result, str) else json.dumps(result, default=str)
            return ToolAnswer(self._cut(text))
        texts = [
            IMAGE if _is_image(p) else p if isinstance(p, str) else json.dumps(p, default=str)
            for p in parts
        ]
        images = tuple(_encode_png(part) for part in parts if _is_image(part))
        text = "\n".join(t if t == IMAGE else self._cut(t.replace(IMAGE, "")) for t in texts)
        return ToolAnswer(text, images=images)

    def _add(self, tool: Tool) -> None:
        if not NAME.fullmatch(tool.name):
            raise ConfigError(f"tool {tool.name!r}; allowed as a name: {NAME.pattern}")
        if tool.name in self._tools:
            raise ConfigError(f"two tools have the name {tool.name!r}")
        self._tools[tool.name] = tool

    def refuse(self, text: str) -> ToolAnswer:
        """Return an answer with an error."""
        return ToolAnswer(self._cut(f"Error: {text}"), is_error=True)

    def _cut(self, text: str) -> str:
        """Return a text that a tokenizer takes, with at most max_chars characters."""
        text = replace_surrogates(text)
        if len(text) <= self._max_chars:
            return text
        half = self._max_chars // 2
        left_out = len(text) - 2 * half
        return f"{text[:half]}\n[{left_out} characters left out]\n{text[len(text) - half :]}"


def _is_image(value: object) -> TypeGuard[Image]:
    """Return whether a value is an image of PIL, which is not imported for that."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _encode_png(image: Image) -> bytes:
    """Return the PNG file of an image of PIL, which may be of a mode that PNG has not."""
    file = io.BytesIO()
    convert_to_rgb(image).save(file, "PNG")
    return file.getvalue()


def _list_tools(source: object) -> list[Tool]:
    if isinstance(source, Tool):
        return [source]
    if isinstance(marked_tool := getattr(source, "tool", None), Tool):
        return [marked_tool]
    if (listed := getattr(source, "tools", None)) is not None:
        return list(listed)
    members = [member for _, member in inspect.getmembers(source, inspect.ismethod)]
    marked = [(method, method.tool) for method in members if hasattr(method, "tool")]
    if not marked:
        raise ConfigError(f"{source!r} is no tool; allowed: a function or a class with @tool")
    return [
        Tool(tool.name, tool.description, tool.parameters, method, tool.timeout_s)
        for method, tool in marked
    ]


async def _call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> object:
    """Call a function; if it is not async, in a thread, which a timeout does not end."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def set_result(result: object, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(**arguments)
        except Exception as raised:  # noqa: BLE001 (raised where it is awaited)
            error = raised
        except BaseException as raised:  # noqa: BLE001 (sys.exit ends no server)
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(set_result, result, error)

    threading.Thread(target=run, daemon=True).start()
    result = await future
    return await result if isinstance(result, Awaitable) else result


async def close_or_report(name: str, close: Callable[[], Awaitable[None]]) -> None:
    """Await `close`; print an error if it raises or takes longer than CLOSE_S."""
    timeout = asyncio.timeout(CLOSE_S)
    try:
        async with timeout:
            await close()
    except Exception as error:  # noqa: BLE001 (of a user's function)
        late = f"has not closed in {CLOSE_S:g} s"
        fault = f"raised {type(error).__name__} when it was closed: {error}"
        print(f"{name} {late if timeout.expired() else fault}")


def _parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and those of its parameters."""
    text = inspect.getdoc(function) or ""
    text, *rest = re.split(r"^(?:Args|Returns|Raises):\s*$", text, flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    name = ""
    for line in rest[0].splitlines() if rest else []:
        if match := re.match(r" {1,4}(\w+)(?: \(.*?\))?: (.*)", line):
            name, arguments[match[1]] = match[1], match[2].strip()
        elif name and line.strip():
            arguments[name] += f" {line.strip()}"
    return " ".join(text.split()), arguments


def _make_schema(kind: Any, where: str) -> dict[str, Any]:
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if origin is list:
        return {"type": "array"} | ({"items": _make_schema(inside[0], where)} if inside else {})
    if origin is dict and (not inside or inside[0] is str):
        values = {"additionalProperties": _make_schema(inside[1], where)} if inside else {}
        return {"type": "object"} | values
    if origin is Literal and {type(value) for value in inside} in ({int}, {str}):
        return {"type": _SCALARS[type(inside[0])], "enum": list(inside)}
    if origin in (Union, types.UnionType) and types.NoneType in inside and len(inside) == 2:
        [other] = [kind for kind in inside if kind is not types.NoneType]
        return {"anyOf": [_make_schema(other, where), {"type": "null"}]}
    raise ConfigError(
        f"{where} is annotated as {kind!r}; allowed: int, float, str, bool, list, dict, list[...], "
        "dict[str, ...], Literal of texts or whole numbers, and any of them or None"
    )
