"""Safe pickle reader that imports nothing and calls nothing.

A pickle is a program, and `pickle.load` runs it: it can import any module and call any function. This reader disassembles the
pickle with `pickletools` and interprets only the instructions that build plain values. Where a pickle would create an object,
the reader creates an `ObjectStub` with the name and the arguments instead.
"""

import pickletools
from dataclasses import dataclass
from typing import Any, NamedTuple


class GlobalName(NamedTuple):
    """Name of a class or function in a pickle; the name is never resolved."""

    text: str


@dataclass(eq=False)  # hashable by identity, so that it can be a dictionary key
class ObjectStub:
    """Placeholder for an object that the pickle would create."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class RejectedError(Exception):
    """A file is refused: it is damaged or has content that is not allowed."""


def read_pickle(raw: bytes, allowed: frozenset[str]) -> Any:
    """Value of a pickle, with `ObjectStub` for objects and `GlobalName` for classes and functions.

    The interpreter is a stack machine with marks and a memo, as documented in `pickletools`. Instructions that are not
    implemented here, and names that are not in `allowed`, are refused.

    Args:
        raw: the pickle.
        allowed: qualified names that the pickle may contain.

    Raises:
        RejectedError: an instruction or a name is not allowed, or the pickle is damaged.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

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
                    if not all(isinstance(key, str | int | ObjectStub) for key in items[::2]):
                        # Hashing a deeply nested tuple would overflow the stack.
                        raise RejectedError("its pickle has a key that is not a string, an integer or an object")
                    dict.update(stack[-1], zip(items[::2], items[1::2], strict=True))
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "GLOBAL":
                    stack.append(_allowed_name(argument.replace(" ", "."), allowed))
                case "STACK_GLOBAL":
                    stack[-2:] = [_allowed_name(f"{stack[-2]}.{stack[-1]}", allowed)]
                case "REDUCE" | "NEWOBJ":
                    stack.append(_stub(stack.pop(), stack.pop()))
                case "BUILD":
                    state = stack.pop()
                    if not isinstance(stack[-1], ObjectStub):
                        raise RejectedError("its pickle sets the state of a value that is not an object")
                    stack[-1].state = state
                case "BINPERSID":
                    stack.append(ObjectStub("storage", stack.pop()))
                case "STOP":
                    return stack.pop()
                case _:
                    raise RejectedError(f"its pickle has the instruction {operation.name}, which is not allowed")
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise RejectedError(f"its pickle is damaged: {error}") from None
    raise RejectedError("its pickle is damaged: it has no end")


def _allowed_name(text: str, allowed: frozenset[str]) -> GlobalName:
    if text not in allowed:
        raise RejectedError(f"its pickle names {text}, which is not allowed")
    return GlobalName(text)


def _stub(arguments: tuple[Any, ...], called: Any) -> ObjectStub:
    if not (isinstance(called, GlobalName) and isinstance(arguments, tuple)):
        raise RejectedError("its pickle calls a value that is not a class or function")
    return ObjectStub(called.text, arguments)
