"""Two commands on one folder: the second is refused before it changes anything, and the first is not affected."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.faults.kill import job_file, weft_train
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.manifest import read_manifest, verify_folder, write_manifest
from weft.training.metrics import read_metrics
from weft.training.run_folder import read_run_id

LAYOUT = "zero3 on 2"
STEPS = {"steps": 8}
KEY = bytes(range(32))


@pytest.mark.must("fault: A second command names the folder of a running job")
@pytest.mark.must("fault: The tokens of a run were replaced between two launches")
def test_a_second_command_and_a_changed_resume_are_refused_without_effect_on_the_first(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY.hex())
    key_file.chmod(0o600)
    settings = {"key_file": str(key_file)}
    job, out = job_file(tmp_path, LAYOUT, train=STEPS, checkpoint=settings), tmp_path / 'the "first" run'
    with weft_train(job, LAYOUT, out) as first:
        rank = first.rank_at(1, 4).pid
        os.kill(rank, signal.SIGSTOP)  # the run lasts as long as the other commands
        for options in ((), ("--resume", "auto"), ("--set", "optimizer.lr=0.5")):
            with weft_train(job, LAYOUT, out, *options) as second:
                assert second.wait() == 2
            assert second.errors()[1].startswith(f"{out} is in use by process {first.process.pid} on host ")
        os.kill(rank, signal.SIGCONT)
        assert first.wait() == 0, first.printed()
    assert [row.step for row in read_metrics(out / "metrics.jsonl")] == list(range(1, 9))
    assert not list(tmp_path.glob("the*.1"))
    run_id = read_run_id(out)
    assert [verify_folder(folder, KEY).run for folder in list_checkpoints(out)] == [run_id] * 2

    job = job_file(tmp_path, LAYOUT, train={"steps": 12}, optimizer={"lr": 0.02}, checkpoint=settings)
    with weft_train(job, LAYOUT, out, "--resume", "auto") as other:
        assert other.wait() == 2
    assert other.errors()[1] == "optimizer.lr = 0.02, it was 0.01"
    np.save(tmp_path / "tokens.npy", np.load(tmp_path / "tokens.npy")[::-1])  # the same name, size and vocabulary
    with weft_train(job, LAYOUT, out, "--resume", "auto", "--set", "optimizer.lr=0.01") as other:
        assert other.wait() == 2
    assert f"the tokens of data.path = '{tmp_path}/tokens.npy' differ from the tokens that" in other.errors()[1]
    before = read_manifest(list_checkpoints(out)[0], KEY)
    planted = shutil.copytree(
        list_checkpoints(out)[0], out / "step-00000009"
    )  # checkpoint of another run with correct digests
    manifest = before.model_copy(update={"position": before.position.model_copy(update={"step": 9})})
    write_manifest(manifest, planted)
    with weft_train(job, LAYOUT, out, "--resume", "auto", "--accept-changes") as other:
        assert other.wait() == 0, other.printed()
    assert "step-00000009 is skipped" in other.printed()
    assert "resuming after step 8" in other.printed()
    after = read_manifest(list_checkpoints(out)[0], KEY)
    assert after.run == before.run == run_id == read_run_id(out)
    assert after.position.step == 12
    assert after.data != before.data


def test_a_run_stops_when_its_folder_has_another_identity(tmp_path: Path) -> None:
    """A lock does not protect against renamed folders; the run identity does."""
    job, out = job_file(tmp_path, LAYOUT, train={"steps": 100_000}), tmp_path / "run"
    with weft_train(job, LAYOUT, out) as first:
        first.rank_at(1, 4)
        (out / "run_id").write_text("another")
        assert first.wait() == 2, first.printed()
    assert any("belongs to run another by now" in line for line in first.errors())
