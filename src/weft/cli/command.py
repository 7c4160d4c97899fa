"""Registration of commands."""

from collections.abc import Callable
from functools import wraps
from inspect import getdoc
from typing import Any

import typer

from weft.cli.progress import report_waiting


def add_command(app: typer.Typer, command: Callable[..., Any], *, reports_steps: bool = False, **settings: Any) -> None:
    """Register a command; its summary in the list of commands is the first paragraph of its docstring.

    Args:
        app: program or group of commands.
        command: function of the command.
        reports_steps: True for a command that reports its steps itself, after its imports.
        settings: settings of typer.
    """
    summary, _, _ = (getdoc(command) or "").partition("\n\n")

    @wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        with report_waiting(command.__name__, once=reports_steps):
            return command(*args, **options)

    app.command(short_help=summary, **settings)(run)
