"""Reading a pickle without running it.

A pickle is a program, and `pickle.load` runs it: it may import any module and call any function. Here its instructions are
taken apart by `pickletools`, of the standard library, and followed by a machine that knows only those that build plain values.
It imports nothing and calls nothing: what a pickle asks to be made stays a name with its arguments.
"""

import pickletools
from dataclasses import dataclass
from typing import Any, NamedTuple


class Name(NamedTuple):
    """A class or function that a pickle names; it is never looked up."""

    text: str


@dataclass(eq=False)  # compared by identity, so that it may be a key
class Made:
    """An object that a pickle asks to be made; it is never made."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class Refused(Exception):
    """Why a pickle is not read."""


def read_pickle(raw: bytes, allowed: frozenset[str]) -> Any:
    """The value that a pickle describes, with `Made` and `Name` in the place of objects, classes and functions.

    A machine with a stack, marks on it, and a memo, as `pickletools` documents it; instructions that are not needed here,
    and every name that is not allowed, are refused.

    Args:
        raw: the pickle.
        allowed: full names that it may contain.

    Raises:
        Refused: an instruction or a name is not allowed, or the pickle is damaged.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def name(text: str) -> Name:
        if text not in allowed:
            raise Refused(f"it names {text}")
        return Name(text)

    def make(arguments: tuple[Any, ...], made: Any) -> Made:
        if not (isinstance(made, Name) and isinstance(arguments, tuple)):
            raise Refused("it calls what is no name")
        return Made(made.text, arguments)

    try:
        argument: Any
        for operation, argument, _ in pickletools.genops(raw):
            match operation.name:
                case "PROTO" | "FRAME":
                    pass
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(operation.name == "NEWTRUE")
                case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                    stack.append(argument)
                case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                    stack.append({"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}[operation.name]())
                case "MARK":
                    marks.append(len(stack))
                case "TUPLE":
                    stack.append(tuple(since_mark()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    count = int(operation.name[-1])
                    stack[-count:] = [tuple(stack[-count:])]
                case "APPEND":
                    item = stack.pop()
                    list.append(stack[-1], item)
                case "APPENDS":
                    items = since_mark()
                    list.extend(stack[-1], items)
                case "SETITEM" | "SETITEMS":
                    items = [stack.pop(-2), stack.pop()] if operation.name == "SETITEM" else since_mark()
                    if not all(isinstance(key, str | int | Made) for key in items[::2]):
                        raise Refused("a key of it is no text, number or object")  # hashing a deep tuple has no limit
                    dict.update(stack[-1], zip(items[::2], items[1::2], strict=True))
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "GLOBAL":
                    stack.append(name(argument.replace(" ", ".")))
                case "STACK_GLOBAL":
                    stack[-2:] = [name(f"{stack[-2]}.{stack[-1]}")]
                case "REDUCE" | "NEWOBJ":
                    stack.append(make(stack.pop(), stack.pop()))
                case "BUILD":
                    state = stack.pop()
                    if not isinstance(stack[-1], Made):
                        raise Refused("it sets the state of what is no object")
                    stack[-1].state = state
                case "BINPERSID":
                    stack.append(Made("storage", stack.pop()))
                case "STOP":
                    return stack.pop()
                case _:
                    raise Refused(f"it has the instruction {operation.name}")
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"it is damaged: {error}") from None
    raise Refused("it is damaged: it has no end")
