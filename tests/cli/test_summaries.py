"""The list of commands that `weft --help` and `weft checkpoint --help` show."""

import pytest
from typer.testing import CliRunner

from weft.cli.app import app


@pytest.mark.parametrize("command", [[], ["checkpoint"]])
def test_no_summary_of_a_command_is_cut_off(command: list[str]) -> None:
    text = CliRunner().invoke(app, [*command, "--help"], terminal_width=80).output
    listed = text.split("Commands:")[1].splitlines()[1:]
    assert len(listed) >= 4
    for line in listed:
        assert line.endswith(".")
        assert "..." not in line
