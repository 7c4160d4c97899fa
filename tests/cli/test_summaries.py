"""List of commands in `weft --help` and `weft checkpoint --help`."""

import pytest
from typer.testing import CliRunner

from weft.cli.app import app


@pytest.mark.parametrize("command", [[], ["checkpoint"]])
def test_summaries_are_not_truncated(command: list[str]) -> None:
    text = CliRunner().invoke(app, [*command, "--help"], terminal_width=80).output
    listed = text.split("Commands:")[1].splitlines()[1:]
    assert len(listed) >= 4
    for line in listed:
        assert line.endswith(".")
        assert "..." not in line
