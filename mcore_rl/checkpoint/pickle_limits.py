"""Limits on pickles of a checkpoint, checked before they are loaded.

An unpickler hashes the keys of dicts. A tuple that has another one twice, which has another one
twice, takes a few bytes a level to write, and twice the time of the level below to hash or to
print. One nested deep enough ends the process: a tuple hashes its values on the stack.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from typing import Any

_MAX_DEPTH = 100
_MIN_NODES = 1000  # hashed in any pickle
_MAX_NODES = 1 << 20  # of loaded values, each as often as it is named: optimizers list parameters
# Opcodes of plain data, by what they leave on the stack. pickle.dump writes these since Python 3.8
# (protocols 4 and 5), torch.save the last two of them (protocol 2).
_LEAVES = (
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "GLOBAL SHORT_BINSTRING"
)
_CONTAINERS = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def check_pickle(data: bytes, opcodes: Collection[str] | None = None) -> None:
    """Check that loading hashes little more than the bytes of a pickle explain.

    The pickle is run with containers alone, which are neither hashed nor compared.

    Args:
        opcodes: Names of the opcodes that it may have. None: those that torch.save writes, and
            data may follow its end.

    Raises:
        ValueError: It hashes more, or values nested too deep; or it is damaged, or has another
            opcode.
        LookupError: It takes values that are not there.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    num_left, position = _MIN_NODES + 16 * len(data), 0
    leaves = frozenset(_LEAVES.split())
    allowed = None if opcodes is None else frozenset(opcodes)
    for opcode, argument, place in pickletools.genops(data):
        name, position = opcode.name, place or 0
        if allowed is not None and name not in allowed:
            raise ValueError(f"opcode {name} at byte {position}")
        if name in leaves:
            stack.append(None)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(_pop_mark(stack, marks)))
        elif name in _TUPLES:
            stack.append(tuple([stack.pop() for _ in range(_TUPLES[name])][::-1]))
        elif name in _CONTAINERS:
            stack.append([])
        elif name in ("APPEND", "APPENDS"):
            values = [stack.pop()] if name == "APPEND" else _pop_mark(stack, marks)
            _get_container(stack).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = _pop_two(stack) if name == "SETITEM" else _pop_mark(stack, marks)
            num_left -= sum(_count_nodes(key, num_left) for key in values[::2] if key)
            _get_container(stack).extend(values)
        elif name in ("REDUCE", "NEWOBJ"):  # may make a set, a dict or a tuple of its arguments
            values = [value for value in _pop_two(stack) if value]
            num_left -= _count_nodes(values, num_left)
            stack.append(values)
        elif name == "BUILD":  # may add the keys of its state to an object
            num_left -= _count_nodes(stack.pop(), num_left)
        elif name == "BINPERSID":
            num_left -= _count_nodes(stack.pop(), num_left)
            stack.append(None)
        elif name == "STACK_GLOBAL":
            _pop_two(stack)
            stack.append(None)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"opcode {name} at byte {position}")
    if opcodes is not None and position != len(data) - 1:
        raise ValueError("it has data after its end")


def check_nesting(value: Any) -> None:
    """Raise ValueError if containers nest too deep, or have too many values.

    A value counts as often as it is named: those who copy, print or merge it take that long.
    """
    num_left, level = _MAX_NODES, [value]
    for _ in range(_MAX_DEPTH):
        containers = [v for v in level if isinstance(v, dict | list | tuple | set)]
        num_left -= sum(map(len, containers))
        if num_left < 0:
            raise ValueError(f"it has more than {_MAX_NODES} values")
        level = [v for c in containers for v in (c.values() if isinstance(c, dict) else c)]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")


def _count_nodes(value: Any, most: int) -> int:
    """Count the values inside a value, each as often as it is named.

    Raises:
        ValueError: There are more than `most`, or they are nested too deep.
    """
    if not value:
        return 1
    num, level = 1, [value]
    for _ in range(_MAX_DEPTH):
        containers = [v for v in level if v]
        num += sum(map(len, containers))
        if num > most:
            raise ValueError("it hashes more values than its bytes can have")
        level = [v for c in containers for v in c]
        if not level:
            return num
    raise ValueError(f"it hashes values nested more than {_MAX_DEPTH} deep")


def _pop_mark(stack: list[Any], marks: list[int]) -> list[Any]:
    start = marks.pop()
    values = stack[start:]
    del stack[start:]
    return values


def _pop_two(stack: list[Any]) -> list[Any]:
    second = stack.pop()
    return [stack.pop(), second]


def _get_container(stack: list[Any]) -> list[Any]:
    container = stack[-1]
    if not isinstance(container, list):
        raise ValueError("it adds values to something else than a container")
    return container
