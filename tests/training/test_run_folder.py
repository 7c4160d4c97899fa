"""Run folder: write check, locks, moving earlier runs aside, and removal of runs."""

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.jobs import write_job
from weft.cli import main
from weft.errors import JobError
from weft.job import Job
from weft.training import run_folder
from weft.training.aside_runs import list_aside, remove_aside
from weft.training.checkpoints import check_run_id
from weft.training.run_folder import (
    HeldFolders,
    check_free,
    check_writable,
    join_folders,
    make_run_id,
    read_run_id,
)


def run_in(folder: Path, text: str = "contents") -> Path:
    """Folder with the files of a run."""
    (folder / "export").mkdir(parents=True)
    (folder / "job.toml").write_text("")
    keys = ("train", "held_out", "tokenizer", "vocab_size", "end_of_text")
    (folder / "prepared.json").write_text(json.dumps(dict.fromkeys(keys)))
    (folder / "export" / "model.safetensors").write_text(text)
    return folder


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.must("fault: The output folder cannot be written")
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
    with pytest.raises(JobError, match=r"cannot be (created|written)"):
        check_writable(
            job.model_copy(update={"out": str(tmp_path / "run"), "checkpoint": checkpoints_in(job)}), new=True
        )
    assert tree(tmp_path) == before


def checkpoints_in(job: Job) -> object:
    return job.checkpoint.model_copy(update={"folder": job.out})


@pytest.mark.parametrize("out", ["run", "a/b/run", "folder"])
def test_check_of_a_writable_folder_changes_nothing(out: str, tmp_path: Path) -> None:
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


def job_in(folder: Path, out: str = "run", checkpoints: str = "") -> Job:
    return Job.load(write_job(folder), [f"out={folder / out}", f"checkpoint.folder={checkpoints}"])


def in_a_fork(hold: Callable[[], object]) -> int:
    """Process id of a fork that holds a lock until it is killed."""
    reading, writing = os.pipe()
    if not (fork := os.fork()):
        hold()
        os.write(writing, b"x")
        time.sleep(60)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1)
    os.close(reading)
    return fork


def end(fork: int) -> None:
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)


def test_earlier_runs_are_numbered(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with HeldFolders(job_in(tmp_path)) as folders:
        assert folders.move_aside() is None
        run_in(out)
        assert folders.move_aside() == tmp_path / "run.1"
        (tmp_path / "run.2").symlink_to(tmp_path / "nowhere")
        run_in(out)
        assert folders.move_aside() == tmp_path / "run.3"
        with pytest.raises(JobError, match=rf"run is in use by process {os.getpid()} on host"):
            check_free(job_in(tmp_path))
        assert [path.name for path in out.iterdir()] == [".launcher.lock", ".ranks.lock"]
    assert not out.exists()
    assert not list((tmp_path / "run.1").glob(".*"))


def test_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with HeldFolders(job_in(tmp_path, checkpoints=str(tmp_path / "a/b"))):
        pass
    assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "a/b").exists()


def test_two_jobs_share_no_checkpoint_folder(tmp_path: Path) -> None:
    shared = str(tmp_path / "checkpoints")
    with HeldFolders(job_in(tmp_path, "one", shared)):
        with pytest.raises(JobError) as refused:
            check_writable(job_in(tmp_path, "other", shared), new=True)
        assert refused.value.where == f"checkpoint.folder = {shared!r}"
        assert "set checkpoint.folder" in (refused.value.fix or "")
        with pytest.raises(JobError), HeldFolders(job_in(tmp_path, "other", shared)):
            pass
        assert not (tmp_path / "other").exists()
        check_writable(job_in(tmp_path, "other", str(tmp_path / "elsewhere")), new=True)
        check_writable(job_in(tmp_path, "one", shared), new=True, alone=False)  # another host of the run


def test_ranks_keep_the_folder_locked_after_their_launcher_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "RANK_EXIT_SECONDS", 0.1)
    job = job_in(tmp_path)
    (tmp_path / "run").mkdir()
    launcher = in_a_fork(lambda: HeldFolders(job).__enter__())
    ranks = [in_a_fork(lambda: join_folders(job, tmp_path / "run")) for _ in range(2)]
    end(launcher)
    for rank in ranks:
        with pytest.raises(JobError, match=rf"in use by ranks of a run whose launcher has ended: process {launcher} "):
            check_free(job)
        end(rank)
    check_free(job)
    with HeldFolders(job):
        pass


def test_a_run_keeps_its_identity(tmp_path: Path) -> None:
    assert read_run_id(tmp_path) == ""
    first = make_run_id(tmp_path)
    assert make_run_id(tmp_path) == read_run_id(tmp_path) == first
    (tmp_path / "other").mkdir()
    assert make_run_id(tmp_path / "other") != first
    check_run_id(tmp_path, first)
    with pytest.raises(JobError, match=f"belongs to run {first} by now, this is run abc"):
        check_run_id(tmp_path, "abc")
    check_run_id(tmp_path / "missing", "abc")  # a missing folder is accepted here, because writing to it will fail


def aside_folders(tmp_path: Path) -> Path:
    """Path of a run, next to two runs that were moved aside and to other folders with similar names."""
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


def test_only_runs_moved_aside_are_removable(tmp_path: Path) -> None:
    found = {folder.path.name: folder for folder in list_aside(aside_folders(tmp_path))}
    assert list(found) == ["run.2", "run.3", "run.4", "run.5", "run.6", "run.10"]
    assert [name for name, folder in found.items() if not folder.refusal] == ["run.2", "run.10"]
    assert found["run.3"].refusal == "a link"
    assert 1000 < found["run.10"].bytes < 2000
    assert list_aside(tmp_path / "nothing" / "run") == []
    for name in ("run.3", "run.4", "run.5", "run.6"):
        with pytest.raises(JobError, match="only folders of runs are removed"):
            remove_aside(found[name])


def test_runs_with_a_trainer_are_removable(tmp_path: Path) -> None:
    (tmp_path / "run.1").mkdir()
    job = 'out = "run"\n[model]\npath = "m"\n[data]\npath = "d"\n[trainer]\nkind = "dpo"\n[plan]\n'
    (tmp_path / "run.1" / "job.toml").write_text(job)
    (folder,) = list_aside(tmp_path / "run")
    assert folder.refusal == "not a run of Weft: it has no prepared.json"
    make_run_id(tmp_path / "run.1")
    (folder,) = list_aside(tmp_path / "run")
    assert not folder.refusal
    remove_aside(folder)
    assert not (tmp_path / "run.1").exists()


def test_locked_run_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "RANK_EXIT_SECONDS", 0.1)
    run_in(tmp_path / "run.1")
    (folder,) = list_aside(tmp_path / "run")
    rank = in_a_fork(lambda: join_folders(job_in(tmp_path, "run.1"), tmp_path / "run.1"))
    with pytest.raises(JobError, match="in use by ranks of a run"):
        remove_aside(folder)
    assert (tmp_path / "run.1" / "job.toml").exists()
    end(rank)
    remove_aside(folder)
    assert not (tmp_path / "run.1").exists()


@pytest.mark.must("fault: `run.json` or `prepared.json` is damaged")
@pytest.mark.parametrize("text", ["7", "[" * 100_000, "9" * 5000, "[[]]", '{"train": 1}'])
def test_folder_with_other_tables_is_not_a_run(tmp_path: Path, text: str) -> None:
    (run_in(tmp_path / "run.1") / "prepared.json").write_text(text)
    (folder,) = list_aside(tmp_path / "run")
    assert folder.refusal == "not a run of Weft: its prepared.json has other content"


@pytest.mark.must("command: clean")
@pytest.mark.parametrize(
    ("answer", "options", "removed"), [("y\n", [], True), ("n\n", [], False), ("", ["--yes"], True)]
)
def test_weft_clean_asks_and_removes_only_runs(
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
    assert "kept: a link" in " ".join(printed.split())


def test_weft_clean_without_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "clean", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert "There are no earlier runs of" in capsys.readouterr().out


@pytest.mark.must("fault: The output folder cannot be written")
def test_command_refuses_a_folder_before_it_reads_data(
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


@pytest.mark.parametrize("name", ["job.toml", "export"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_the_user_is_refused_before_its_files_are_moved_or_replaced(
    name: str, resume: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    for folder in (mine, tmp_path / "jobs"):
        folder.mkdir()
    job = write_job(tmp_path / "jobs")
    (mine / name).mkdir() if name == "export" else (mine / name).write_text(job.read_text())
    (mine / "thesis.txt").write_text("mine")
    options = ["--resume", "auto"] * resume
    monkeypatch.setattr(sys, "argv", ["weft", "train", str(job), "--out", str(mine), *options])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert f"{mine} has {name}, and is no run folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs", "mine"]
    assert sorted(path.name for path in mine.iterdir()) == sorted([name, "thesis.txt"])
