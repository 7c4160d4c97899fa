"""Keys and options of version 0.1: each is refused, and the error names its new name."""

import sys
from pathlib import Path

import pytest

from tests.lab.jobs import write_job
from weft.cli import main
from weft.errors import JobError
from weft.job import Job, keys
from weft.names import RENAMED

OPTIONS = {old: new for old, new in RENAMED.items() if old.startswith("--")}
KEYS = {old: new for old, new in RENAMED.items() if not old.startswith("--")}
COMMANDS = {
    "--ranks": "train",
    "--ranks-a": "compare",
    "--ranks-b": "compare",
    "--hosts": "plan",
    "--host": "train",
    "--meet": "topology",
    "--world": "dryrun",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_old_option_names_the_new_one(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", COMMANDS[option], str(write_job(tmp_path)), option, "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"{option} is now {OPTIONS[option]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--nprocs", "write --nproc-per-node"),
        ("--num_processes", "write --nproc-per-node"),
        ("--learning-rate", "write --set with optimizer.lr"),
    ],
)
def test_an_option_of_another_framework_is_answered_with_that_of_weft(
    option: str, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "train", str(write_job(tmp_path)), option, "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"instead of {option}, {answer}" in capsys.readouterr().err


def test_an_option_of_another_command_is_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "export", "a", "b", "--nproc-per-node", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "No such option: --nproc-per-node" in capsys.readouterr().err


@pytest.mark.parametrize("key", KEYS)
def test_an_old_key_names_the_new_one(key: str) -> None:
    assert KEYS[key] in keys()
    with pytest.raises(JobError) as caught:
        Job.parse({}, [f"{key}=1"])
    assert caught.value.what == f"unknown key {key}"
    assert caught.value.fix == f"{key} is now {KEYS[key]}"
