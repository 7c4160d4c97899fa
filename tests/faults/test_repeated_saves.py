"""Programs that save again and again under the same name, killed at random: a complete checkpoint is there every time."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import weft
from tests.lab.families import family
from weft.checkpoint.folders import list_checkpoints, newest_checkpoint
from weft.checkpoint.manifest import verify_folder
from weft.errors import CheckpointError
from weft.integrations.accelerator import WeftAccelerator
from weft.launch.scratch import is_marked

START_SECONDS = 90.0  # limit until the first save
KILL_SECONDS = 0.4  # a kill comes at any moment of this time, which has several saves
ROWS = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**family("llama"), "vocab_size": 4000}))


def own_loop(folder: Path) -> None:
    """Checkpoints of the same step, and exports of the same name."""
    run = weft.prepare(model(), optimizer=lambda own: torch.optim.AdamW(own, lr=1e-3))
    while True:
        run.train_batch(ROWS)
        run.step()
        run.save(folder / "step-1", extra={"steps": run.steps})
        run.finish()
        run.export(folder / "export")


def is_complete_own_loop(folder: Path) -> None:
    position = verify_folder(folder / "step-00000001").position
    assert position.extra == {"steps": position.next_batch}
    assert len(load_file(folder / "export/model.safetensors")) > 10
    assert json.loads((folder / "export/config.json").read_text())["model_type"] == "llama"


def accelerate_loop(folder: Path) -> None:
    """States of the same name, with a scheduler and a file of the script's own."""
    accelerator = WeftAccelerator(cpu=True)
    own = model()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    own, optimizer, scheduler = accelerator.prepare(own, optimizer, scheduler)
    while True:
        accelerator.backward(own(**ROWS).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.save_state(str(folder / "last"))
        accelerator.training_state.finish()
        (folder / "last" / "notes.txt").write_text("mine")


def is_complete_accelerate_loop(folder: Path) -> None:
    position = verify_folder(newest_checkpoint(folder / "last" / "weft")).position
    scheduler = torch.load(folder / "last" / "scheduler.bin", weights_only=True)
    assert scheduler["last_epoch"] == position.next_batch  # both are of the same save
    torch.load(folder / "last" / "random_states_0.pkl", weights_only=False)
    assert (folder / "last" / "notes.txt").exists() or position.next_batch == 1


def trainer_loop(folder: Path) -> None:
    """Checkpoints of a Trainer that keeps one, and goes on from it."""
    arguments = {"max_steps": 10**6, "save_steps": 1, "save_total_limit": 1, "report_to": [], "disable_tqdm": True}
    options: Any = TrainingArguments(output_dir=str(folder), use_cpu=True, logging_steps=10**6, **arguments)
    rows: Any = [{name: value[0] for name, value in ROWS.items()}] * 8
    trainer = weft.turn_on(Trainer(model(), options, train_dataset=rows), weft.Plan())
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)


def is_complete_trainer_loop(folder: Path) -> None:
    complete = []
    for path in folder.glob("checkpoint-*"):
        if (path / "trainer_state.json").exists() and list_checkpoints(path / "weft"):
            with suppress(CheckpointError):  # an older one whose removal was interrupted
                step = json.loads((path / "trainer_state.json").read_text())["global_step"]
                assert verify_folder(newest_checkpoint(path / "weft")).position.next_batch == step
                complete.append(path)
    assert complete


DOORS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "weft.prepare": (own_loop, is_complete_own_loop),
    "accelerate": (accelerate_loop, is_complete_accelerate_loop),
    "Trainer": (trainer_loop, is_complete_trainer_loop),
}


def in_silence(loop: Callable[[Path], None], folder: Path) -> None:
    """Run a loop in a process of its own, without output."""
    torch.set_num_threads(1)
    for descriptor in (1, 2):
        os.dup2(os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = ["loop"]
    loop(folder)


def last_save(door: str, folder: Path) -> int:
    """Time of the last complete save, in ns; 0 without one."""
    pattern = {"weft.prepare": "export", "accelerate": "last/notes.txt", "Trainer": "checkpoint-*/trainer_state.json"}[
        door
    ]
    found = [0]
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # an older checkpoint that is being removed
            found.append(path.stat().st_mtime_ns)
    return max(found)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(2, marks=pytest.mark.must("fault: A program is killed while it saves under the same name again")),
        20,
    ],
)
def test_a_kill_during_a_repeated_save_leaves_a_complete_checkpoint(door: str, kills: int, tmp_path: Path) -> None:
    loop, check = DOORS[door]
    rng, folder = random.Random(kills), tmp_path / "saved"
    folder.mkdir()
    for _ in range(kills):
        before = last_save(door, folder)
        process = multiprocessing.get_context("fork").Process(target=in_silence, args=(loop, folder))
        process.start()
        deadline = time.monotonic() + START_SECONDS
        while last_save(door, folder) == before:
            assert process.is_alive(), folder.with_suffix(".log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(rng.random() * KILL_SECONDS)
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        check(folder)
    # Of the last kill. A process that is killed before it marks its folder leaves an empty one.
    assert len([path for path in folder.glob(".last.*.part") if path.is_dir() and is_marked(path)]) <= 1
