"""The folder of a run: what cannot be written is refused at once; runs are moved aside; only runs are removed."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.lab.jobs import write_job
from weft.cli import main
from weft.errors import JobError
from weft.job import Job
from weft.train.run_folder import check_writable, list_aside, move_aside, remove_aside


def run_in(folder: Path, text: str = "contents") -> Path:
    """A folder as a run leaves it."""
    (folder / "export").mkdir(parents=True)
    (folder / "job.toml").write_text("")
    keys = ("train", "held_out", "tokenizer", "vocab_size", "end_of_text")
    (folder / "prepared.json").write_text(json.dumps(dict.fromkeys(keys)))
    (folder / "export" / "model.safetensors").write_text(text)
    return folder


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("out", ["file", "file/run", "link", "locked/run", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_refused(out: str, tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path), [f"out={tmp_path / out}"])
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    if out.startswith("locked") and os.geteuid() == 0:
        pytest.skip("root writes anywhere")
    before = tree(tmp_path)
    with pytest.raises(JobError) as refused:
        check_writable(job, new=True)
    assert refused.value.where == f"out = {str(tmp_path / out)!r}"
    assert "--out FOLDER" in (refused.value.fix or "")
    with pytest.raises(JobError, match=r"cannot be (made|written)"):
        check_writable(
            job.model_copy(update={"out": str(tmp_path / "run"), "checkpoint": checkpoints_in(job)}), new=True
        )
    assert tree(tmp_path) == before


def checkpoints_in(job: Job) -> object:
    return job.checkpoint.model_copy(update={"folder": job.out})


@pytest.mark.parametrize("out", ["run", "a/b/run", "folder"])
def test_a_folder_that_can_be_written_is_left_as_it_is(out: str, tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path), [f"out={tmp_path / out}"])
    (tmp_path / "folder").mkdir()
    before = tree(tmp_path)
    check_writable(job, new=True)
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_only_a_new_run_needs_to_move_an_earlier_one_aside(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path), [f"out={run_in(tmp_path / 'locked' / 'run')}"])
    (tmp_path / "locked").chmod(0o500)
    check_writable(job, new=False)
    with pytest.raises(JobError, match="cannot be written"):
        check_writable(job, new=True)


def test_earlier_runs_are_numbered(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert move_aside(out) is None
    assert move_aside(run_in(out)) == tmp_path / "run.1"
    (tmp_path / "run.2").symlink_to(tmp_path / "nowhere")
    assert move_aside(run_in(out)) == tmp_path / "run.3"
    assert not out.exists()


def aside_folders(tmp_path: Path) -> Path:
    """A run, two that were moved aside, and things that only look so; the first run."""
    out = run_in(tmp_path / "run")
    run_in(tmp_path / "run.2")
    links = run_in(tmp_path / "run.10", "x" * 1000) / "export"
    (links / "folder").symlink_to(run_in(tmp_path / "elsewhere"))
    (links / "file").symlink_to(tmp_path / "elsewhere" / "job.toml")
    (tmp_path / "run.3").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run.4").mkdir()
    (tmp_path / "run.4" / "job.toml").write_text("")
    (tmp_path / "run.5").write_text("")
    (run_in(tmp_path / "run.6") / "prepared.json").write_text("{}")
    for name in ("run.02", "run.x", "run.1.backup", "runs.1", "other.1"):
        run_in(tmp_path / name)
    return out


def test_runs_moved_aside_are_listed_and_others_are_told_apart(tmp_path: Path) -> None:
    found = {folder.path.name: folder for folder in list_aside(aside_folders(tmp_path))}
    assert list(found) == ["run.2", "run.3", "run.4", "run.5", "run.6", "run.10"]
    assert [name for name, folder in found.items() if not folder.refusal] == ["run.2", "run.10"]
    assert found["run.3"].refusal == "a link"
    assert 1000 < found["run.10"].bytes < 2000
    assert list_aside(tmp_path / "nothing" / "run") == []
    for name in ("run.3", "run.4", "run.5", "run.6"):
        with pytest.raises(JobError, match="only folders of runs are removed"):
            remove_aside(found[name])


@pytest.mark.parametrize(
    ("answer", "options", "removed"), [("y\n", [], True), ("n\n", [], False), ("", ["--yes"], True)]
)
def test_weft_clean_asks_and_removes_runs_only(
    answer: str,
    options: list[str],
    removed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = aside_folders(tmp_path)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weft", "clean", "run", *options])
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    gone = [name for name in before if name.startswith(("run.2", "run.10"))] if removed else []
    assert tree(tmp_path) == [name for name in before if name not in gone]
    assert out.is_dir()
    printed = capsys.readouterr().out
    assert ("Removed 2 runs" in printed) == removed
    assert "stays: a link" in " ".join(printed.split())


def test_weft_clean_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "clean", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert "There are no runs beside" in capsys.readouterr().out


def test_the_command_refuses_a_folder_before_it_reads_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, data={"path": "/nowhere/*.txt"})
    monkeypatch.setattr(sys, "argv", ["weft", "train", str(job), "--out", str(job / "run")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    text = capsys.readouterr().err
    assert "Not a directory" in text
    assert "--out FOLDER" in text
    assert not (tmp_path / "cache").exists()
