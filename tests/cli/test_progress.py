"""A command that takes longer than two seconds tells on stderr that it is running."""

import time

import pytest
import typer
from typer.models import CommandInfo

from tests.lab.commands import completed, start_function
from weft.cli import progress
from weft.cli.app import app
from weft.cli.checkpoint import checkpoint
from weft.cli.command import add_command
from weft.cli.launch import launch

STEP = 0.05
RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def wait() -> None:
    """Wait."""
    time.sleep(30 * STEP)
    print("result")


def run(monkeypatch: pytest.MonkeyPatch, reports_steps: bool = False) -> tuple[str, list[str]]:
    """Stdout and the lines of stderr of a command that takes thirty times as long as the first line."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", STEP)
    program = typer.Typer()
    add_command(program, wait, reports_steps=reports_steps)
    done = completed(start_function(["weft"], program))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()


def test_lines_come_after_each_doubling_and_do_not_disturb_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    output, lines = run(monkeypatch)
    assert output == "result\n"
    assert 2 <= len(lines) <= 5  # after 1, 2, 4, 8 and 16 steps
    assert lines == [line for line in lines if line.startswith("weft: wait: running (")]


def test_command_that_reports_its_steps_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run(monkeypatch, reports_steps=True)[1]) == 1


def test_rank_of_another_launcher_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert run(monkeypatch)[1] == []


@pytest.mark.parametrize("program", [app, checkpoint, launch])
def test_all_commands_report(program: typer.Typer) -> None:
    commands: list[CommandInfo] = program.registered_commands
    assert commands
    for command in commands:
        assert command.callback
        assert command.callback.__code__.co_qualname == "add_command.<locals>.run", command.callback.__name__
