"""Registration of commands."""

from collections.abc import Callable
from inspect import getdoc
from typing import Any

import typer


def add_command(app: typer.Typer, command: Callable[..., Any], **settings: Any) -> None:
    """Register a command; its summary in the list of commands is the first paragraph of its docstring."""
    summary, _, _ = (getdoc(command) or "").partition("\n\n")
    app.command(short_help=summary, **settings)(command)
