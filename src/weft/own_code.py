"""Python code that a job names: functions of the user as "package.module:function", the numbers that they return, packages to
import, and extras of Weft."""

import difflib
import hashlib
import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.errors import DataError, JobError

LARGEST = 3.4028234663852886e38
"""Largest number of float32, the dtype of losses, rewards and rates."""
SHOWN = 80  # characters of a value of the user that an error shows


def load_function(name: str, where: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        name: "package.module:function".
        where: key of the job, for the message.

    Raises:
        JobError: the module or the function does not exist, or the module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    module = load_module(module_name, f"{where} = {name}")
    function = getattr(module, attribute, None)
    if not callable(function):
        near = difflib.get_close_matches(attribute, [key for key in vars(module) if not key.startswith("_")], 1)
        raise JobError(
            f"{module_name} has no function {attribute}",
            where=f"{where} = {name}",
            rule='a function is named as "package.module:function"',
            fix=f"did you mean {module_name}:{near[0]}?" if near else f"define it in {module.__file__}",
        )
    return function


def finite_number(value: Any, case: str, name: str, key: str, rule: str = "a number is finite in float32") -> float:
    """Number that a function of the user has returned.

    Args:
        value: number of Python or NumPy, or a tensor or an array with one element.
        case: row or step for which the function was called, for the message.
        name: name of the function.
        key: key or argument that names the function.
        rule: rule of the message.

    Raises:
        DataError: it is no number, or none that is finite in float32.
    """
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several elements
        number = math.nan
    if not abs(number) <= LARGEST:
        raise DataError(
            f"{name} returns {shorten(value)} for {case}",
            where=key,
            rule=rule,
            fix="mend the function",
        )
    return number


def finite_numbers(values: Any, cases: Sequence[str], name: str, key: str) -> list[float | None]:
    """Numbers that a function of the user has returned, one for each row; None where it has none.

    Args:
        values: list or any other iterable of the values that `finite_number` takes, or an array or tensor of one dim.
        cases: row of each value, for the message.
        name: name of the function.
        key: key or argument that names the function.

    Raises:
        DataError: there is another number of values, or one is neither None nor a finite number.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    is_list = isinstance(values, Iterable) and not isinstance(values, str | bytes | dict)
    found = list(values) if is_list else []
    if not is_list or len(found) != len(cases):
        raise DataError(
            f"{name} returns {f'{len(found)} values' if is_list else shorten(values)} for {len(cases)} rows",
            where=key,
            rule="it returns a list of numbers, one for each row",
            fix="mend the function",
        )
    rule = "each value is a number that is finite in float32, or None for a row without one"
    return [
        None if value is None else finite_number(value, case, name, key, rule)
        for value, case in zip(found, cases, strict=True)
    ]


def failure_of(error: Exception, name: str, key: str) -> DataError:
    """Error for an exception of a function of the user, with the line that raised it.

    Args:
        error: exception, caught around the call.
        name: name of the function.
        key: key or argument that names the function.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    return DataError(
        f"{name} failed: {type(error).__name__}: {error}",
        where=f"{key}, {last.filename}:{last.lineno}",
        rule="a function of yours returns a value for each row",
        fix="mend the function",
    )


def shorten(value: Any) -> str:
    """Value of the user as an error shows it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def import_extra(name: str, extra: str, where: str, rule: str) -> Any:
    """Import a module of an extra of Weft.

    Args:
        name: full name of the module.
        extra: name of the extra.
        where: key of the job that needs it, for the message.
        rule: what it is needed for, for the message.

    Raises:
        JobError: the module cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JobError(
            f"{name.partition('.')[0]} cannot be imported: {error}",
            where=where,
            rule=rule,
            fix=f'pip install "weft-train[{extra}]"',
        ) from None


def load_module(name: str, where: str) -> ModuleType:
    """Import a module; modules of the current folder are found, as with `python -m`.

    Args:
        name: full name of the module.
        where: key and value of the job, for the message.

    Raises:
        JobError: the module does not exist or cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise JobError(
            f"{name} cannot be imported: {type(error).__name__}: {error}",
            where=where + ("" if is_missing else f", {last.filename}:{last.lineno}"),
            rule="a module of yours is found from the current folder, or is installed",
            fix="start in the folder of the module, or install its package" if is_missing else "mend the module",
        ) from None


def digest_module(name: str, where: str) -> str:
    """Digest of the file of a function's module; "" for a module without one.

    Args:
        name: "package.module:function".
        where: key of the job, for the message.

    Raises:
        JobError: as of `load_module`.
    """
    file = load_module(name.partition(":")[0], f"{where} = {name}").__file__
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:  # in an archive, for example
        return ""


def package_version() -> str:
    """Version of Weft; "not installed" if it runs from a source folder on PYTHONPATH."""
    try:
        return version("weft-train")
    except PackageNotFoundError:
        return "not installed"
