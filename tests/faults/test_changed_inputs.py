"""Inputs of a run that change under it: rows rewritten while it trains, a checkpoint of another run, a changed function."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.kill import job_file
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import close_pools
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.data import prepare
from weft.errors import DataError, JobError
from weft.job import Job
from weft.training.run_folder import read_run_id
from weft.training.session import Session

SMALL = {"config": {**family("llama"), "vocab_size": 300}}
LOSS = """
import torch.nn.functional as F

def loss(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
"""


def job_of(folder: Path, **tables: dict[str, Any]) -> Job:
    settings = {"model": SMALL, "train": {"steps": 6}, **tables}
    return Job.load(job_file(folder, "zero3 on 2", **settings)).model_copy(update={"out": str(folder / "run")})


def rewrite_rows(session: Session) -> None:
    """Let rank 0 rewrite the file of rows in place, in the forward of its fourth step."""
    forwards: list[int] = []

    def rewrite(*_: object) -> None:
        forwards.append(len(forwards))
        if len(forwards) == 2 * 4 and session.rank == 0:
            rows = np.load(session.job.data.path or "")
            np.save(session.job.data.path or "", rows[::-1])

    session.model.register_forward_pre_hook(rewrite)


def touch_rows(session: Session) -> None:
    if session.rank == 0:
        os.utime(session.job.data.path or "")


@pytest.mark.must("fault: The tokens of a run were replaced between two launches")
def test_rows_that_are_rewritten_while_training_end_the_run_before_they_are_saved(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with pytest.raises(Exception, match="has changed since the run was prepared"):
        train_in_the_pool(job, 2, fault=rewrite_rows)
    assert {step_of(path) for path in list_checkpoints(tmp_path / "run")} <= {2}  # if its writer had time to end
    assert not (tmp_path / "run" / "export").exists()


def test_rows_whose_content_is_the_same_may_be_written_again(tmp_path: Path) -> None:
    run, _ = train_in_the_pool(job_of(tmp_path), 2, fault=touch_rows)
    assert (run / "export").exists()


def test_a_checkpoint_of_another_run_is_named(tmp_path: Path) -> None:
    own, other = job_of(tmp_path / "own", train={"steps": 2}), job_of(tmp_path / "other", train={"steps": 4})
    run, _ = train_in_the_pool(own, 2)
    train_in_the_pool(other, 2)
    shutil.copytree(tmp_path / "other/run/step-00000004", run / "step-00000004")
    longer = own.model_copy(update={"train": other.train})
    _, printed = train_in_the_pool(longer, 2, resume="auto", accept_changes=True)
    ids = read_run_id(tmp_path / "other/run"), read_run_id(run)
    assert "step-00000004 was saved by run {}, and this is run {}".format(*ids) in printed[0]


@pytest.fixture
def new_ranks() -> Iterator[None]:
    """Ranks that are forked in this test, with its paths and its folder."""
    close_pools()
    yield
    close_pools()


@pytest.mark.usefixtures("new_ranks")
def test_a_changed_loss_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss_that_changes.py").write_text(LOSS)
    job = job_of(tmp_path, train={"steps": 6, "loss": "loss_that_changes:loss"})
    train_in_the_pool(job, 1)
    shutil.rmtree(tmp_path / "run" / "export")  # as if it had not ended
    train_in_the_pool(job, 1, resume="auto")
    (tmp_path / "loss_that_changes.py").write_text(LOSS.replace("float()", "double()"))
    with pytest.raises(JobError, match=r"the file of the function train\.loss has changed"):
        train_in_the_pool(job, 1, resume="auto")
    train_in_the_pool(job, 1, resume="auto", accept_changes=True)


def test_a_cache_folder_that_cannot_be_written_is_replaced_by_one_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sysfs refuses root, too."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    data = Job.load(write_job(tmp_path, data={"cache": "/sys/cache"})).data
    said: list[str] = []
    prepared = prepare(data, model_folder=None, log=said.append)
    own = tmp_path / "tmp" / f".weft-cache-{os.getuid()}"
    assert any("data.cache = /sys/cache cannot be written: " in line and str(own) in line for line in said), said
    assert own.stat().st_mode & 0o777 == 0o700
    assert all(str(own) in span.tokens for span in prepared.train)
    shutil.rmtree(own)
    own.mkdir(mode=0o755)  # another user may have made it
    own.chmod(0o755)
    with pytest.raises(DataError, match=r"set data\.cache to a writable folder"):
        prepare(data, model_folder=None, log=said.append)
