"""Non-finite values: weights are refused by name, and the number of consecutive skipped steps is limited."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.faults.kill import job_file
from tests.lab.families import family
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.errors import CheckpointError, NumericError
from weft.job import Job, Model
from weft.training.metrics import read_metrics
from weft.training.session import Session

LAYOUT = "zero3 on 2"


def job_of(folder: Path, **tables: dict[str, object]) -> Job:
    return Job.load(job_file(folder, LAYOUT, **tables)).model_copy(update={"out": str(folder / "run")})


def spoil_gradients(session: Session) -> None:
    session.model.get_output_embeddings().register_forward_hook(lambda module, arguments, logits: logits * math.nan)


@pytest.mark.must("fault: A weight is not finite when training begins")
def test_nonfinite_weights_are_named(tmp_path: Path) -> None:
    settings = {**family("llama"), "vocab_size": 300}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = float("nan")
    model.save_pretrained(tmp_path / "model")
    job = job_of(tmp_path).model_copy(update={"model": Model(path=str(tmp_path / "model"))})
    with pytest.raises(Exception, match=r"model\.layers\.1\.mlp\.up_proj\.weight is not finite") as caught:
        train_in_the_pool(job, 2)
    assert CheckpointError.__name__ in repr(caught.value) or isinstance(caught.value, CheckpointError)


@pytest.mark.must("fault: The updates of 20 steps in a row are skipped (`guard.max_skipped`)")
def test_too_many_skipped_steps_end_with_a_checkpoint(tmp_path: Path) -> None:
    job = job_of(tmp_path, guard={"max_skipped": 3}, checkpoint={"every": 0})
    with pytest.raises(
        Exception, match="the updates of 3 consecutive steps were skipped, the last at step 3"
    ) as caught:
        train_in_the_pool(job, 2, fault=spoil_gradients)
    assert NumericError.__name__ in repr(caught.value) or isinstance(caught.value, NumericError)
    assert [step_of(folder) for folder in list_checkpoints(tmp_path / "run")] == [3]


def spoil_first_step(session: Session) -> None:
    forwards: list[int] = []

    def spoil(module: object, arguments: object, logits: torch.Tensor) -> torch.Tensor:
        forwards.append(len(forwards))
        return logits * math.nan if len(forwards) == 1 else logits

    session.model.get_output_embeddings().register_forward_hook(spoil)


def test_a_skipped_first_step_does_not_count_for_memory_and_messages(tmp_path: Path) -> None:
    job = job_of(tmp_path, train={"steps": 4}, checkpoint={"every": 0})
    train_in_the_pool(job, 2, fault=spoil_first_step)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row.skipped for row in rows] == [True, False, False, False]
    assert [row.peak is not None for row in rows] == [False, False, True, False]  # the first with optimizer state
    assert rows[2].peak["optimizer"] > 0
    assert rows[1].comm_bytes == rows[3].comm_bytes
