"""Pickles read as data: what a pickle names is never imported and never called.

A pickle is a program, so a checkpoint from elsewhere could run anything. Here every class that it
names becomes a Node, which keeps what it is given and does nothing. (A file made for it can still
end the process, with a key nested too deep for the stack. It cannot run anything.)
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Mapping
from typing import Any

# What pickle.dump writes since Python 3.8 (protocols 4 and 5) for plain data and dataclasses.
# Without the PUT opcodes, with which a few bytes can ask for gigabytes of memo.
_PLAIN = re.findall(
    r"\w+",
    """PROTO FRAME STOP MEMOIZE BINGET LONG_BINGET MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2
    BINFLOAT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM
    SETITEMS STACK_GLOBAL REDUCE NEWOBJ BUILD""",
)
# bytes of the count that they start with
_COUNTED = {"SHORT_BINUNICODE": 1, "BINUNICODE": 4, "LONG1": 1}
_CODES = {op.name: ord(op.code) for op in pickletools.opcodes}
_ARGUMENT_BYTES = {
    ord(op.code): op.arg.n if op.arg else 0 for op in pickletools.opcodes if op.name in _PLAIN
}
_COUNT_BYTES = {_CODES[name]: size for name, size in _COUNTED.items()}
_STOP = _CODES["STOP"]


class Node:
    """An object of a pickle: what its class was called with, and its state."""

    kind = ""  # the name of the class
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    # Also what keeps a pickle from setting attributes of a class: the class is no instance.
    def __setstate__(self, state: Any) -> None:
        self.state = state


class ForeignName(ValueError):
    """A pickle names what is not allowed; the message is the name."""


def read(data: bytes, allowed: Mapping[tuple[str, str], Any]) -> Any:
    """The tree that a pickle describes.

    Args:
        data: of protocol 4 or 5.
        allowed: (module, name) of all that it may name -> what stands for it, or None for a Node
            of that kind.

    Raises:
        ForeignName: it names something else; nothing was made of it.
        ValueError: it is no such pickle.
    """
    _check_opcodes(data)
    try:
        return _Inert(data, allowed).load()
    except ForeignName:
        raise
    except (  # what a damaged program ends with
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        LookupError,
        OverflowError,
        TypeError,
    ) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Inert(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._kinds: dict[tuple[str, str], type[Node]] = {}  # this pickle's own: none outlives it

    def find_class(self, module: str, name: str) -> Any:
        found = module, name
        if found not in self._allowed:
            raise ForeignName(f"{module}.{name}")
        if self._allowed[found] is not None:
            return self._allowed[found]
        return self._kinds.setdefault(found, type(name, (Node,), {"kind": name}))


def _check_opcodes(data: bytes) -> None:
    """Raise ValueError unless these are opcodes of plain data, whole, from the start to STOP."""
    at = 0
    while at < len(data):
        code = data[at]
        size = _ARGUMENT_BYTES.get(code)
        if size is None:
            count_bytes = _COUNT_BYTES.get(code)
            if count_bytes is None:
                raise ValueError(f"opcode {code:#04x} at byte {at}")
            size = count_bytes + int.from_bytes(data[at + 1 : at + 1 + count_bytes], "little")
        at += 1 + size
        if code == _STOP:
            break
    else:
        raise ValueError("it ends early")
    if at != len(data):
        raise ValueError(f"it goes on after its end at byte {at}")
