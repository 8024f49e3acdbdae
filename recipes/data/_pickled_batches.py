"""Reader of CIFAR's official python batches, which are pickles, without executing them.

A pickle is a program: `pickle.load` calls whatever it names. Here it is only inspected, instruction by instruction
(`pickletools.genops` of the standard library): constants, lists, dicts and tuples are assembled; the three names by
which these files describe an array become a record, which nothing calls; any other name or instruction is rejected.
Nothing is imported, called or given attributes. A `pickle.Unpickler` whose `find_class` accepts no class is not a
substitute: it hashes every key, and tuples nested a million deep crash the process.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS_AND_TEXTS = ("BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE")
_ARRAY, _CLASS, _DTYPE = "numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"
_MOST = 100
"""Lists, dicts, tuples and calls of a file; the official ones have about ten. So none is nested deeper than that."""
_CONTAINERS = {"EMPTY_LIST", "EMPTY_DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_BYTES = ("u1", "|u1", "uint8")


@dataclass
class _Name:
    """A name of another module."""

    name: str


@dataclass
class _Call:
    """A recorded call: the function's name, its arguments, and the state of its result."""

    name: str
    arguments: Any
    state: Any = None


def read_pickled_batch(content: bytes) -> dict[str, Any]:
    """Return the dict in a batch file; byte arrays become (n, values) uint8, Python 2 strings are read as latin-1.

    Raises:
        ValueError: the file is damaged, or has names, instructions or arrays that are not in the official files.
    """
    try:
        found = _built(content)
        if not isinstance(found, dict):
            raise ValueError(f"holds a {type(found).__name__}; expected a dict")
        return {key: _array(value) if isinstance(value, _Call) else value for key, value in found.items()}
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a well-formed pickle ({type(error).__name__}: {error})") from error


def _built(content: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    made = 0
    for opcode, argument, position in pickletools.genops(content):
        name = opcode.name
        made += name in _CONTAINERS
        if made > _MOST:
            raise ValueError(
                f"more than {_MOST} lists, dicts and tuples at byte {position}; the official files have ten"
            )
        if name in _NUMBERS_AND_TEXTS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]  # type: ignore[index]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])  # type: ignore[index]
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else since_mark()
            list.extend(stack[-1], items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
            if not all(isinstance(key, str) for key in items[::2]):  # hashing nested tuples is unbounded
                raise TypeError("a key that is not text")
            dict.update(stack[-1], zip(items[::2], items[1::2], strict=True))
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in _TUPLES:
            items = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name == "GLOBAL":
            if argument not in (_ARRAY, _CLASS, _DTYPE):
                raise ValueError(
                    f"names {str(argument).replace(' ', '.')[:100]!r} at byte {position}, which the official "
                    "files do not: do not unpickle it"
                )
            stack.append(_Name(str(argument)))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_Call(stack.pop().name, arguments))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], _Call):
                raise TypeError("a state for something that is not an array")
            stack[-1].state = state
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"instruction {name} at byte {position}, which the official files do not have")
    return stack.pop()


def _array(call: _Call) -> np.ndarray:
    """Return the array that a pickle describes, if it is one of bytes."""
    if call.name != _ARRAY:
        raise ValueError(f"holds a {call.name}; expected an array")
    _, shape, dtype, by_columns, content = call.state
    if not isinstance(shape, tuple) or len(shape) > 4 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("an array whose shape is not a tuple of up to four sizes")
    kind = dtype.arguments[0]
    if not isinstance(kind, str):
        raise ValueError("an array whose dtype is not text")
    if dtype.name != _DTYPE or kind not in _BYTES:
        raise ValueError(f"an array of dtype {kind[:20]!r}; expected uint8")
    if not isinstance(content, str) or math.prod(shape) != len(content):
        values = len(content) if isinstance(content, str) else "no"
        raise ValueError(f"an array of shape {shape} from {type(content).__name__} of {values} values")
    return np.frombuffer(content.encode("latin-1"), np.uint8).reshape(shape, order="F" if by_columns else "C")
