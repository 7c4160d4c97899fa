"""Effects of the tables checkpoint, guard and eval on a run of `weft train`."""

import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from tests.evaluation.stock import write_tasks
from tests.faults.test_runs import flip_a_bit, on_step
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import RankError
from tests.lab.runs import ObservedRun, observe
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.checkpoint.manifest import read_manifest
from weft.errors import CheckpointError, RankFailure
from weft.job import Job
from weft.launch.launcher import launch
from weft.planner import train as train_module
from weft.training import work
from weft.training.metrics import read_history, read_metrics, read_task_evaluations
from weft.training.session import Session


def run(folder: Path, ranks: int = 1, fault: Any = None, probe: Any = None, **tables: Any) -> ObservedRun:
    return observe(Job.load(write_job(folder, **tables)), ranks, fault=fault, probe=probe)


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder."""
    return sorted(map(step_of, list_checkpoints(folder)))


# Checkpoints

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    """Run of six steps with a signed checkpoint after every second one, in a folder beside the run."""
    folder = tmp_path_factory.mktemp("signed")
    (folder / "key").write_text(KEY.hex())
    (folder / "key").chmod(0o600)
    checkpoint = {"every": 2, "keep": 1, "keep_hours": 1000.0, "folder": str(folder / "checkpoints")}
    return run(folder, train={"steps": 6}, checkpoint={**checkpoint, "key_file": str(folder / "key")})


@pytest.mark.effect("checkpoint.every", "checkpoints that the run reports")
def test_checkpoints_are_written_at_their_steps(signed: ObservedRun) -> None:
    lines = [line.partition(":")[0] for line in signed.printed[0].splitlines() if "in the background" in line]
    assert lines == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.effect("checkpoint.folder", "folder of the checkpoints: none is in the run folder")
@pytest.mark.effect("checkpoint.keep", "checkpoints at the end: that of step 4 is removed")
@pytest.mark.effect("checkpoint.keep_hours", "checkpoints at the end: the first one of the interval is kept")
def test_the_newest_and_the_first_checkpoint_are_kept(signed: ObservedRun) -> None:
    assert steps_in(signed.folder.parent / "checkpoints") == [2, 6]
    assert steps_in(signed.folder) == []


@pytest.mark.effect(
    "checkpoint.key_file", "manifest, which only a reader with the key takes; a run without it is refused"
)
def test_a_checkpoint_with_a_key_needs_it(signed: ObservedRun) -> None:
    folder = signed.folder.parent / "checkpoints"
    newest = list_checkpoints(folder)[0]
    assert read_manifest(newest, KEY).position.step == 6
    with pytest.raises(CheckpointError, match="it was written with a key"):
        observe(Job.load(signed.folder / "job.toml", ['checkpoint.key_file=""']), 1, resume=str(newest))


def delay_first_writer(session: Session) -> None:
    """Let the first checkpoint be written only after the update of step 3."""
    assert session.checkpoints is not None
    snapshots = session.checkpoints.snapshots
    write, may_write = snapshots._write, threading.Event()

    def write_later(*arguments: Any) -> None:
        may_write.wait(60)
        write(*arguments)

    def release() -> None:
        may_write.set()
        if snapshots.writing is not None:
            snapshots.writing.join()

    snapshots._write = write_later  # type: ignore[method-assign]
    on_step(session, 3, release)


@pytest.mark.effect("checkpoint.when_busy", "checkpoints of a run whose first checkpoint is written for two steps")
def test_a_checkpoint_is_skipped_while_another_one_is_written(tmp_path: Path) -> None:
    checkpoint = {"every": 1, "keep": 0, "when_busy": "skip"}
    found = run(tmp_path, fault=delay_first_writer, train={"steps": 3}, checkpoint=checkpoint)
    assert steps_in(found.folder) == [1, 3]
    assert "no checkpoint: the previous checkpoint is still being written; training continues" in found.printed[0]


def list_memory(session: Session) -> None:
    """List the checkpoints in host memory at each update."""
    assert session.checkpoints is not None
    snapshots, memory = session.checkpoints.snapshots, session.checkpoints.memory
    seen: list[list[int]] = []
    session.model.__dict__["seen"] = seen

    def look(*_: object) -> None:
        if snapshots.writing is not None:
            snapshots.writing.join()
        seen.append(steps_in(memory.folder) if memory else [])

    session.optimizer.inner.register_step_pre_hook(look)


def listed(session: Session) -> list[list[int]]:
    return session.model.__dict__["seen"]


@pytest.mark.effect(
    "checkpoint.memory_every", "checkpoints in the memory of the host during a run; none is on the disk"
)
def test_checkpoints_in_memory_are_written_at_their_steps(tmp_path: Path) -> None:
    found = run(tmp_path, fault=list_memory, probe=listed, train={"steps": 5}, checkpoint={"memory_every": 2})
    assert found.facts == [[[], [], [2], [2], [4]]]
    assert steps_in(found.folder) == []


# Guard


def with_recent_losses(session: Session, *losses: float) -> None:
    """Let a run start as one that has had these losses, each 32 times; spikes of the gradient norm are not known."""
    watch = {"loss": 32 * list(losses), "norm": [], "high_loss": [], "high_norm": []}
    object.__setattr__(session, "position", session.position.model_copy(update={"watch": watch}))


def spike_at_once(session: Session) -> None:
    with_recent_losses(session, 0.1, 0.1)


@pytest.mark.effect("guard.spikes", "off, warn: printed line about a spike, and no skipped step")
@pytest.mark.parametrize("action", ["off", "warn"])
def test_a_spike_is_ignored_or_printed(action: str, tmp_path: Path) -> None:
    found = run(tmp_path, fault=spike_at_once, guard={"spikes": action}, train={"steps": 1})
    assert ("step 1 is a spike: loss" in found.printed[0]) == (action == "warn")
    assert [row.skipped for row in found.metrics] == [False]


@pytest.mark.effect("guard.spikes", "skip: skipped steps")
@pytest.mark.effect("guard.max_skipped", "step at which training fails, after two skipped updates")
def test_training_fails_after_too_many_skipped_steps(tmp_path: Path) -> None:
    guard = {"spikes": "skip", "max_skipped": 2}
    with pytest.raises(RankError, match="the updates of 2 consecutive steps were skipped, the last at step 2"):
        run(tmp_path, fault=spike_at_once, guard=guard, train={"steps": 4})
    assert [row.skipped for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [True, True]


def spike_in_step_5(session: Session) -> None:
    """Multiply the logits of the fifth forward."""
    with_recent_losses(session, 5.2, 6.2)
    forwards = 0

    def multiply(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal forwards
        forwards += module.training
        return output * 100 if forwards == 5 and module.training else output

    session.model.model.norm.register_forward_hook(multiply)


@pytest.mark.effect("guard.spikes", "rollback: steps and batches after a spike")
@pytest.mark.effect("guard.rollback_steps", "checkpoint of the rollback: that of two steps before the spike")
def test_training_returns_to_a_checkpoint_before_a_spike(tmp_path: Path) -> None:
    guard, checkpoint = {"spikes": "rollback", "rollback_steps": 2}, {"every": 1, "keep": 0}
    found = run(tmp_path, fault=spike_in_step_5, guard=guard, train={"steps": 6}, checkpoint=checkpoint)
    assert "resuming after step 3" in found.printed[0]
    assert "batches 3 to 4 are skipped" in found.printed[0]
    assert [row.step for row in read_history(found.folder)[1]] == [1, 2, 3, 4, 5, 4, 5, 6]
    assert read_manifest(list_checkpoints(found.folder)[0]).position.next_batch == 6 + 2


def flip_after_step_3(session: Session) -> None:
    if session.rank == 1:
        on_step(session, 3, lambda: flip_a_bit(session))


@pytest.mark.effect(
    "guard.sdc_check_interval", "step at which unequal replicas are found: at once, not at a checkpoint"
)
def test_unequal_replicas_are_found_at_the_interval(tmp_path: Path) -> None:
    plan = {"parallel": {"zero": 0}, "precision": {"param_dtype": "fp32"}}
    tables = {"guard": {"sdc_check_interval": 1}, "checkpoint": {"every": 2}, "train": {"steps": 4}, "plan": plan}
    found = run(tmp_path, 2, fault=flip_after_step_3, **tables)
    printed = " ".join(found.printed[0].split())
    assert "replicas differ after step 3" in printed
    assert "resuming after step 2" in printed
    assert "replicas are equal after step 3: the fault was transient" in printed
    assert [row.step for row in read_history(found.folder)[1]] == [1, 2, 3, 3, 4]


STALLED_RANK = """
import os, time, zlib
from weft.launch.rank_status import HEADER, HEARTBEAT_VARIABLE, PHASE, SLOT_BYTES

status = f"{os.getpid()}\\n{time.monotonic()}\\n0\\n3\\nstep".encode()  # step 3, which does not end
with open(os.environ[HEARTBEAT_VARIABLE], "r+b") as file:
    file.seek((PHASE + 1) * SLOT_BYTES)
    file.write(HEADER.pack(1, len(status), zlib.crc32(status, 1)) + status)
time.sleep(20)
"""


@pytest.mark.effect("guard.hang_timeout_seconds", "time after which the launcher of a run ends a rank without progress")
def test_the_launcher_ends_a_rank_without_progress(tmp_path: Path) -> None:
    """The rank of the real launcher is a script that is in a step for ever."""
    (tmp_path / "rank.py").write_text(STALLED_RANK)

    def launch_script(argv: list[str], **options: Any) -> None:
        launch([sys.executable, str(tmp_path / "rank.py")], **{**options, "forkserver": None})

    job = Job.load(write_job(tmp_path, guard={"hang_timeout_seconds": 1.0}))
    with (
        mock.patch.object(work, "launch", launch_script),
        mock.patch.object(work, "early_forkserver", return_value=nullcontext()),
        pytest.raises(RankFailure, match=r"rank 0 made no progress for \d+ s in step 3") as caught,
    ):
        train_module.train(job, ranks=1, log=lambda text: None)
    assert caught.value.rule == "a job ends when no rank has made progress for 1 s"


# Tasks


def record_prompts(session: Session) -> None:
    """Record the tokens of the forwards of evaluations."""
    seen: list[list[list[int]]] = []
    session.model.__dict__["seen"] = seen

    def see(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not module.training:
            seen.append(kwargs["input_ids"].tolist())

    session.model.register_forward_pre_hook(see, with_kwargs=True)


@pytest.mark.effect("eval.tasks", "tasks in eval.jsonl")
@pytest.mark.effect("eval.every", "steps of eval.jsonl: 0, 1 and 2, not the last alone")
@pytest.mark.effect("eval.limit", "records of the task, two of seven")
@pytest.mark.effect("eval.num_fewshot", "questions in each prompt: two worked examples and the question itself")
@pytest.mark.effect("eval.batch_size", "rows in the forwards of an evaluation: three at most")
def test_tasks_are_evaluated_with_their_settings(tmp_path: Path) -> None:
    facts, *_ = write_tasks(tmp_path)
    settings = {"tasks": [facts], "every": 1, "limit": 2, "num_fewshot": 2, "batch_size": 3}
    config = {**family("llama"), "vocab_size": 300, "max_position_embeddings": 512}
    tables = {"eval": settings, "data": {"held_out": 0.0}, "model": {"config": config}}
    found = run(tmp_path, fault=record_prompts, probe=listed, **tables)
    evaluations = read_task_evaluations(found.folder / "eval.jsonl")
    assert [(each.step, list(each.tasks), each.tasks["facts"].n) for each in evaluations] == [
        (step, ["facts"], 2) for step in (0, 1, 2)
    ]
    forwards = found.facts[0]
    assert [len(rows) for rows in forwards] == [3, 3, 2] * 3  # four choices of two questions
    tokenizer = AutoTokenizer.from_pretrained(found.folder / "export")
    prompts = [tokenizer.decode(torch.tensor(row)) for rows in forwards for row in rows]
    assert {prompt.count("Question:") for prompt in prompts} == {3}
