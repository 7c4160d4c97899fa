"""Resumed jobs with a trainer: bit-equal at every step, nothing after the last step, changed inputs refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.kill import Command
from tests.lab.commands import start_weft
from tests.lab.pool import RankError, run_ranks
from tests.posttraining.conftest import PAIRS, ROWS
from tests.posttraining.resumes import CASES, STEPS, job_of, resume_everywhere, weights_of
from tests.posttraining.test_run import train_on_rank
from weft.errors import JobError
from weft.plan import Parallel, Plan
from weft.posttraining.job import TrainerJob
from weft.posttraining.rank import find_checkpoint
from weft.posttraining.run import TrainerWork
from weft.training.work import launch_work


@pytest.mark.slow("four runs on two ranks, with generation in some")
@pytest.mark.parametrize("case", CASES)
def test_a_job_resumed_after_any_step_is_bit_equal(case: str, small_model: Path, tmp_path: Path) -> None:
    assert resume_everywhere(case, small_model, tmp_path) == dict.fromkeys(range(1, STEPS), "")


Change = Callable[..., TrainerJob]


@pytest.fixture(scope="module")
def finished(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Change]:
    """Folder of a finished run, and a function that makes its job with other options, rows and output folder."""
    folder = tmp_path_factory.mktemp("finished")
    rows, others = folder / "rows.jsonl", folder / "others.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS]
    others.write_text("".join(json.dumps(row) + "\n" for row in swapped))

    def change(out: str, *, has_other_rows: bool = False, **options: Any) -> TrainerJob:
        job = job_of("dpo", small_model, others if has_other_rows else rows, folder / out)
        trainer = job.trainer.model_copy(update={"options": {**job.trainer.options, "max_steps": 2, **options}})
        return job.model_copy(update={"trainer": trainer})

    run_ranks(2, train_on_rank, change("run"), None, timeout=120)
    return folder, change


@pytest.mark.slow("a command of two ranks")
def test_a_finished_run_trains_nothing_more_and_changed_settings_are_printed(finished: tuple[Path, Change]) -> None:
    folder, change = finished
    (folder / "again.toml").write_text(change("again", beta=0.5).to_toml())
    last = folder / "run/checkpoint-2"
    with Command(start_weft("train", folder / "again.toml", "--nproc-per-node", 2, "--resume", last)) as command:
        assert command.wait() == 0, command.printed()
    printed = [line.text for line in command.lines]
    assert "changed     trainer.options.beta = 0.5; the checkpoint was made with 0.1" in printed
    assert f"resume      {last} is of step 2 of 2: nothing is left to train" in printed
    weights, expected = weights_of(folder / "again"), weights_of(folder / "run")
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert json.loads((folder / "again/trainer_state.json").read_text())["global_step"] == 2


def test_a_restart_resumes_from_its_newest_checkpoint_else_from_that_of_its_start(
    finished: tuple[Path, Change],
) -> None:
    folder, _ = finished
    assert find_checkpoint(folder / "run", ["auto", "earlier"]) == str(folder / "run/checkpoint-2")
    assert find_checkpoint(folder / "not begun", ["auto", "earlier"]) == "earlier"
    assert find_checkpoint(folder / "not begun", ["auto"]) == find_checkpoint(folder / "run", []) == ""


def test_a_resume_without_a_checkpoint_starts_at_the_first_step(finished: tuple[Path, Change]) -> None:
    folder, change = finished
    run_ranks(2, train_on_rank, change("new", max_steps=1), "auto", timeout=120)
    assert json.loads((folder / "new/trainer_state.json").read_text())["global_step"] == 1


@pytest.mark.must("refusal: jobs with a trainer of TRL", case="rows")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"has_other_rows": True}, "the contents of data.path have changed", id="rows"),
        ({"learning_rate": 1e-4}, r"learning_rate = 0.0001; the checkpoint was made with 0.003\n.*\n.*no effect"),
        ({"weight_decay": 0.1}, "weight_decay = 0.1; the checkpoint was made with 0.0"),
        ({"seed": 2}, "seed = 2; the checkpoint was made with 1"),
        ({"max_length": 32}, "max_length = 32; the checkpoint was made with 64"),
    ],
)
def test_changes_that_cannot_take_effect_are_refused_before_ranks_start(
    changes: dict[str, Any], said: str, finished: tuple[Path, Change]
) -> None:
    folder, change = finished
    with pytest.raises(JobError, match=said):
        launch_work(TrainerWork(change("refused", **changes)), ranks=2, resume=str(folder / "run/checkpoint-1"))
    assert not (folder / "refused/job.toml").exists()


def test_other_rows_of_a_step_are_refused_on_all_ranks(finished: tuple[Path, Change]) -> None:
    folder, change = finished
    job = change("batch", per_device_train_batch_size=2)
    with pytest.raises(RankError, match="rows of a step: 4; the checkpoint was made with 8"):
        run_ranks(2, train_on_rank, job, str(folder / "run/checkpoint-1"), timeout=120)


def test_completions_of_other_data_ranks_and_damaged_ones_are_refused(small_model: Path, tmp_path: Path) -> None:
    """Between two updates on the same completions, which are those of each data rank."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS["grpo"]))
    job = job_of("grpo, num_iterations 2", small_model, rows, tmp_path / "run")
    options = {**job.trainer.options, "max_steps": 1}
    job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"options": options})})
    run_ranks(2, train_on_rank, job, None, timeout=120)
    checkpoint = tmp_path / "run/checkpoint-1"
    trainer = job.trainer.model_copy(update={"options": {**options, "per_device_train_batch_size": 8}})
    other = job.model_copy(
        update={"trainer": trainer, "plan": Plan(parallel=Parallel(tp=2)), "out": str(tmp_path / "tp")}
    )
    with pytest.raises(RankError, match="data ranks: 1; the checkpoint was made with 2"):
        run_ranks(2, train_on_rank, other, str(checkpoint), timeout=120)
    completions = checkpoint / "weft-trainer/completions-00001.safetensors"
    completions.write_bytes(completions.read_bytes()[:-1] + b"\1")
    with pytest.raises(RankError, match=r"completions-00001\.safetensors cannot be used"):
        run_ranks(
            2, train_on_rank, job.model_copy(update={"out": str(tmp_path / "again")}), str(checkpoint), timeout=120
        )
