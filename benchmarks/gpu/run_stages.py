"""Stages of whole runs: memory beside its prediction, the loop of `weft train`, snapshots, a run that is killed and resumed."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import Bench, Rows
from systems import BLOCKS_OF_8B, LLAMA_1B, SETTINGS, TINY, job_of, random_batch, weft_trainer

from weft.checkpoint.folders import folder_of, list_checkpoints, step_of
from weft.checkpoint.manifest import Position, verify_folder
from weft.checkpoint.snapshot import Snapshots, Target
from weft.device.detect import detect
from weft.job import Checkpoint, Job, Model
from weft.plan import Memory, Parallel, Plan, Precision, resolve_plan
from weft.planner.dryrun.trace import trace_all
from weft.precision.scaling import LossScale
from weft.training.metrics import read_metrics

OPTIONS: dict[str, Plan] = {
    "zero 0": Plan(parallel=Parallel(zero=0)),
    "zero 3": Plan(parallel=Parallel(zero=3)),
    "recompute block": Plan(memory=Memory(recompute=("block",))),
    "offload block": Plan(memory=Memory(offload=("block",))),
    "split weights": Plan(precision=Precision(weights="split")),
    "states of 8 bits": Plan(precision=Precision(optimizer_state_dtype="int8")),
    "states on the host": Plan(memory=Memory(optimizer_device="host")),
}


def predict_memory(device_type: str, small: bool) -> list[int]:
    """Peak bytes of each memory option, by dry runs; in a process that uses no device."""
    config, num_rows, seq_len = (TINY["llama"], 2, 128) if small else (BLOCKS_OF_8B, 1, 4096)
    jobs = [job_of(config, plan, num_rows, seq_len) for plan in OPTIONS.values()]
    return [trace.count.peak for trace in trace_all([(job, 1, 0, device_type) for job in jobs])]


def memory(bench: Bench) -> Rows:
    """Peak memory and time of a step by memory option: predicted by a dry run and measured."""
    config, num_rows, seq_len = (TINY["llama"], 2, 128) if bench.small else (BLOCKS_OF_8B, 1, 4096)
    batch = random_batch(config["vocab_size"], num_rows, seq_len, bench.torch_device, 0, 300)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        predictions = pool.submit(predict_memory, bench.device.type, bench.small)
        for index, (title, plan) in enumerate(OPTIONS.items()):
            system = weft_trainer(config, plan, bench.torch_device)
            seconds = []
            for step in range(7):
                if step == 2:  # the first step allocates the states, the second the pools
                    bench.device.reset_peak_memory()
                begin = time.perf_counter()
                system.step([batch])
                bench.device.synchronize()
                seconds.append(time.perf_counter() - begin)
            measured = bench.device.peak_memory_bytes()
            del system
            bench.free()
            predicted = predictions.result()[index]
            yield {
                "option": title,
                "predicted, GiB": f"{predicted / 2**30:.2f}",
                "measured, GiB": f"{measured / 2**30:.2f}",
                "error": f"{predicted / measured - 1:+.1%}",
                "step, ms": f"{statistics.median(seconds[2:]) * 1e3:.0f}",
            }


def loop(bench: Bench) -> Rows:
    """`weft train` beside `train_step` in the same steps: speed, compiled regions, and waits of the host in a step.

    The callback is `WaitsClock` of loop_clock.py. The first step of a run compiles; the first two are measured steps.
    """
    rows, seq_len, steps = (2, 128, 14) if bench.small else (4, 4096, 20)
    config = {**TINY["llama"], "vocab_size": 2048} if bench.small else LLAMA_1B
    tables = {
        "model": {"config": config},
        "data": {"source": "python", "vocab_size": 2048, "seq_len": seq_len},
        "optimizer": SETTINGS.model_dump(exclude_defaults=True),
        "train": {
            "steps": steps,
            "global_batch_size": 2 * rows,
            "micro_batch_size": rows,
            "evaluate_every": 0,
            "evaluate_rows": rows,
            "callbacks": ["loop_clock:WaitsClock"],
        },
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    }  # of the callback
    for compile in ("off",) if bench.small else ("blocks", "off"):
        plan = {"parallel": {"zero": 0}, "compute": {"compile": compile}}
        with TemporaryDirectory() as folder:
            job, out = Path(folder) / "job.toml", Path(folder) / "run"
            job.write_text(Job.parse(tables | {"plan": plan}).to_toml())
            command = [sys.executable, "-m", "weft", "train", str(job), "--nproc-per-node", "1", "--out", str(out)]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            periods, measured = json.loads((out / "loop.json").read_text())
            waits = json.loads((out / "waits.json").read_text())
            regions = {row.compiled_regions for row in read_metrics(out / "metrics.jsonl")}
        tokens = 2 * rows * seq_len
        yield {
            "compile": compile,
            "tokens/s, weft train": tokens / statistics.median(period for _, period in periods),
            "tokens/s, train_step": tokens / statistics.median(inside for inside, _ in periods),
            "loop / train_step": sum(inside for inside, _ in periods) / sum(period for _, period in periods),
            "compiled regions": ", ".join(map(str, regions)),
            "waits": ", ".join(f"{count} x {line}" for line, count in waits.items()),
            "steps 1 and 2, s": ", ".join(f"{seconds:.1f}" for seconds in measured),
        }


def snapshot(bench: Bench) -> Rows:
    """Seconds for which a snapshot blocks training, and for which it is written."""
    config = TINY["llama"] if bench.small else {**BLOCKS_OF_8B, "num_hidden_layers": 2}
    plan = resolve_plan(Plan(parallel=Parallel(zero=0)), 1, native_bf16=detect().supports("bf16"))
    system = weft_trainer(config, plan, bench.torch_device)
    batch = random_batch(config["vocab_size"], 1, 128, bench.torch_device, 0)
    job = Job(model=Model(config=config), plan=plan, optimizer=SETTINGS, checkpoint=Checkpoint(every=1))
    snapshots = Snapshots(job, system.model, system.optimizer, bench.device, bench.torch_device)
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
            yield {"snapshot": index, "GiB": size / 2**30, "blocked, s": blocked, "on disk after, s": written}


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
    yield {
        "steps": steps,
        "whole run, s": seconds,
        "killed after the checkpoint of step": at,
        "losses": "equal, bit by bit" if losses[0] == losses[1] else f"differ: {losses[0][-1]} {losses[1][-1]}",
    }


def _command(out: Path, steps: int) -> list[str]:
    every = max(steps // 4, 1)
    settings = {"train.steps": steps, "checkpoint.every": every, "data.seq_len": 128, "train.evaluate_every": 0}
    pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "weft", "train", *pairs, "--out", str(out)]
