"""Names, texts and links that somebody else has planted: escapes are printed as text, and links are not followed."""

import os
from pathlib import Path

import pytest

from tests.lab.commands import weft
from tests.lab.jobs import write_job
from weft.errors import JobError, printable
from weft.files import open_file, replace_file
from weft.training.metrics import read_metrics

ESCAPE = "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e"
LINKED = (
    "metrics.jsonl",
    "attempts.jsonl",
    "evaluations.jsonl",
    "run.json",
    "run_id",
    "prepared.json",
    "report.html",
    "tensorboard",
    "logs/rank-0.error",
    "logs/rank-1.out",
    "logs/rank-1.err",
    "logs/launcher.log",
)


def test_escapes_of_names_and_texts_are_printed_as_text(tmp_path: Path) -> None:
    name = f"job{ESCAPE}.toml"
    (tmp_path / "run" / f"step-{ESCAPE}").mkdir(parents=True)
    (tmp_path / "run" / f"step-{ESCAPE}" / "manifest.json").write_text(f"{ESCAPE}\n")
    (tmp_path / name).write_text(f'[train]\nsteps = "{ESCAPE[-1]}"\n["{"a" * 9}\\u001b[2J"]\n')
    printed = [
        weft("train", tmp_path / name),
        weft("train", tmp_path / f"nosuch{ESCAPE}.toml"),
        weft("checkpoint", "ls", tmp_path / "run"),
        weft("checkpoint", "verify", tmp_path / f"nosuch{ESCAPE}"),
    ]
    for done in printed:
        text = done.stdout + done.stderr
        assert not set(text) & {"\x1b", "\x07", "\r", "\x9b", "\u202e"}, ascii(text)
    assert "\\x1b[2J" in printed[1].stderr
    assert printable("line\n\ttext é 漢 \x1b") == "line\n\ttext é 漢 \\x1b"
    assert str(JobError("a\x1b", where="b\x1b", rule="c\x1b", fix="d\x1b")).count("\\x1b") == 4


@pytest.mark.must("fault: Names and texts of others have terminal escapes; a run folder has links")
def test_links_in_a_run_folder_are_not_followed(tmp_path: Path) -> None:
    job, out = write_job(tmp_path), tmp_path / "run"
    for name in LINKED:
        target = tmp_path / "mine" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        target.mkdir() if name == "tensorboard" else target.write_text("mine")
        (out / name).symlink_to(target)
    done = weft("train", job, "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    for name in LINKED:
        target = tmp_path / "mine" / name
        assert not list(target.iterdir()) if target.is_dir() else target.read_text() == "mine", name
    assert "metrics.jsonl cannot be written: Too many levels of symbolic links" in done.stdout
    for name in ("run.json", "run_id", "prepared.json", "report.html", "logs/rank-1.out", "logs/rank-1.err"):
        assert not (out / name).is_symlink(), name
    (out / "metrics.jsonl").unlink()
    assert weft("train", job, "--nproc-per-node", "2").returncode == 0
    assert len(read_metrics(out / "metrics.jsonl")) == 2


def test_a_file_is_replaced_or_opened_but_no_link_and_no_device_is_written(tmp_path: Path) -> None:
    mine, name = tmp_path / "mine", tmp_path / "name"
    mine.write_text("mine")
    name.symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"):
        open_file(name, os.O_WRONLY)
    replace_file(name, "new")
    assert (mine.read_text(), name.read_text(), name.is_symlink()) == ("mine", "new", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "name"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        open_file(tmp_path / "pipe", os.O_WRONLY)
    with pytest.raises(OSError, match="no regular file"):
        open_file(tmp_path / "pipe", os.O_RDWR)
