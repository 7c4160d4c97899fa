"""Stages of whole runs: memory options beside their predictions, snapshots, and a run that is killed and resumed."""

import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import Bench, Rows
from systems import BLOCKS_OF_8B, SETTINGS, TINY, job_of, random_batch, weft_trainer

from weft.checkpoint.folders import folder_of, list_checkpoints, step_of
from weft.checkpoint.manifest import Position, verify_folder
from weft.checkpoint.snapshot import Snapshots, Target
from weft.device.detect import detect
from weft.job import Checkpoint, Job, Model
from weft.plan import Memory, Parallel, Plan, Precision, resolve_plan
from weft.planner.dryrun.trace import trace
from weft.precision.scaling import LossScale
from weft.training.metrics import read_metrics

OPTIONS: dict[str, Plan] = {
    "zero 3": Plan(),
    "zero 0": Plan(parallel=Parallel(zero=0)),
    "split weights": Plan(precision=Precision(weights="split")),
    "states of 8 bits": Plan(precision=Precision(optimizer_state_dtype="int8")),
    "recompute block": Plan(memory=Memory(recompute=("block",))),
    "offload block": Plan(memory=Memory(offload=("block",))),
    "states on the host": Plan(memory=Memory(optimizer_device="host")),
}


def predict_memory(device_type: str, small: bool) -> dict[str, int]:
    """Peak bytes by memory option, by dry runs; before this process uses the device."""
    config, num_rows, seq_len = (TINY["llama"], 2, 128) if small else (BLOCKS_OF_8B, 1, 4096)
    peaks = {}
    for title, plan in OPTIONS.items():
        try:
            peaks[title] = trace(job_of(config, plan, num_rows, seq_len), 1, [0], device_type)[0].count.peak
        except Exception as error:  # the other options are still predicted
            print(f"{title}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            peaks[title] = 0
    return peaks


def memory(bench: Bench) -> Rows:
    """Peak memory and time of a step by memory option: predicted by a dry run and measured."""
    config, num_rows, seq_len = (TINY["llama"], 2, 128) if bench.small else (BLOCKS_OF_8B, 1, 4096)
    batch = random_batch(config["vocab_size"], num_rows, seq_len, bench.torch_device, 0, 300)
    rows: Rows = []
    for title, plan in OPTIONS.items():
        predicted = bench.predicted_bytes[title]
        system = weft_trainer(config, plan, bench.torch_device)
        seconds = []
        for index in range(7):
            if index == 2:  # the first step allocates the states, the second the pools
                bench.device.reset_peak_memory()
            begin = time.perf_counter()
            system.step([batch])
            bench.device.synchronize()
            seconds.append(time.perf_counter() - begin)
        measured = bench.device.peak_memory_bytes()
        del system
        bench.free()
        rows.append(
            {
                "option": title,
                "predicted, GiB": f"{predicted / 2**30:.2f}",
                "measured, GiB": f"{measured / 2**30:.2f}",
                "error": f"{predicted / measured - 1:+.1%}",
                "step, ms": f"{statistics.median(seconds[2:]) * 1e3:.0f}",
            }
        )
    return rows


def snapshot(bench: Bench) -> Rows:
    """Seconds for which a snapshot blocks training, and for which it is written."""
    config = TINY["llama"] if bench.small else {**BLOCKS_OF_8B, "num_hidden_layers": 2}
    plan = resolve_plan(Plan(parallel=Parallel(zero=0)), 1, native_bf16=detect().supports("bf16"))
    system = weft_trainer(config, plan, bench.torch_device)
    batch = random_batch(config["vocab_size"], 1, 128, bench.torch_device, 0)
    job = Job(model=Model(config=config), plan=plan, optimizer=SETTINGS, checkpoint=Checkpoint(every=1))
    snapshots = Snapshots(job, system.model, system.optimizer, bench.device, bench.torch_device)
    rows: Rows = []
    with TemporaryDirectory() as folder:
        for index in range(2):  # the first one allocates the buffer
            system.step([batch])
            bench.device.synchronize()
            begin = time.perf_counter()
            target = Target(Path(folder), True, keep=1, keep_hours=0)
            snapshots.take(Position(step=index, next_batch=index, loss_scale=LossScale()), target)
            system.step([batch])
            bench.device.synchronize()
            blocked = time.perf_counter() - begin
            snapshots.finish()
            written = time.perf_counter() - begin
            print("\n".join(snapshots.take_messages()), flush=True)
            size = verify_folder(folder_of(Path(folder), index)).bytes
            rows.append({"snapshot": index, "GiB": size / 2**30, "blocked, s": blocked, "on disk after, s": written})
    return rows


def killed_run(bench: Bench) -> Rows:
    """Losses of `weft train` that is killed in the middle and resumed, beside a run that is not."""
    steps = 6 if bench.small else 40
    with TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        begin = time.perf_counter()
        subprocess.run(_command(whole, steps), check=True, capture_output=True)
        seconds = time.perf_counter() - begin
        silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(_command(killed, steps), **silent)
        while process.poll() is None and not list_checkpoints(killed):
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        at = max(map(step_of, list_checkpoints(killed)))
        subprocess.run([*_command(killed, steps), "--resume", "auto"], check=True, capture_output=True)
        losses: list[Any] = [[row.loss for row in read_metrics(run / "metrics.jsonl")] for run in (whole, killed)]
    return [
        {
            "steps": steps,
            "whole run, s": seconds,
            "killed after the checkpoint of step": at,
            "losses": "equal, bit by bit" if losses[0] == losses[1] else f"differ: {losses[0][-1]} {losses[1][-1]}",
        }
    ]


def _command(out: Path, steps: int) -> list[str]:
    every = max(steps // 4, 1)
    settings = {"train.steps": steps, "checkpoint.every": every, "data.seq_len": 128, "train.evaluate_every": 0}
    pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-c", "from weft.cli import main; main()", "train", *pairs, "--out", str(out)]
