"""Two commands and one folder: the second is refused before it touches anything, the first ends as if it had been alone."""

from pathlib import Path

import pytest

from tests.faults.kill import differences, job_file, run_alone, weft_train
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.manifest import read_manifest
from weft.train.run_folder import read_run_id

LAYOUT = "zero3 on 2"
STEPS = {"steps": 40}


@pytest.mark.slow("whole commands, one beside another")
def test_a_second_command_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    whole = run_alone(tmp_path, LAYOUT, train=STEPS)
    job, out = job_file(tmp_path, LAYOUT, train=STEPS), tmp_path / 'the "first" run'
    with weft_train(job, LAYOUT, out) as first:
        first.rank_at(1, 4)
        for options in ((), ("--resume", "auto"), ("--set", "optimizer.lr=0.5")):
            with weft_train(job, LAYOUT, out, *options) as second:
                assert second.wait() == 2
            assert second.errors()[1].startswith(f"{out} is in use by process {first.process.pid} on host ")
        assert first.wait() == 0, first.printed()
    assert differences(whole, out) == []
    assert not list(tmp_path.glob("the*.1"))
    run_id = read_run_id(out)
    assert [read_manifest(folder).run for folder in list_checkpoints(out)] == [run_id] * 2

    job = job_file(tmp_path, LAYOUT, train={"steps": 44}, optimizer={"lr": 0.02})
    with weft_train(job, LAYOUT, out, "--resume", "auto") as other:
        assert other.wait() == 2
    assert other.errors()[1] == "optimizer.lr = 0.02, it was 0.01"
    with weft_train(job, LAYOUT, out, "--resume", "auto", "--accept-changes") as other:
        assert other.wait() == 0, other.printed()
    assert read_manifest(list_checkpoints(out)[0]).run == run_id == read_run_id(out)


def test_a_run_whose_folder_another_one_has_taken_stops(tmp_path: Path) -> None:
    """No lock holds where somebody renames folders; the identity does."""
    job, out = job_file(tmp_path, LAYOUT, train={"steps": 100_000}), tmp_path / "run"
    with weft_train(job, LAYOUT, out) as first:
        first.rank_at(1, 4)
        (out / "run_id").write_text("another")
        assert first.wait() == 2, first.printed()
    assert any("belongs to run another by now" in line for line in first.errors())
