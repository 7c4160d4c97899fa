"""Python code that a job names: functions of the user as "package.module:function", packages to import, and extras of Weft."""

import difflib
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.errors import JobError


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
