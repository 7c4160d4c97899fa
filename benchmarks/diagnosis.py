"""Confusion matrix of `weft doctor RUN`: real runs on emulated hosts, in which something becomes slow, or nothing does.

    python benchmarks/diagnosis.py [--plants 20] [--healthy 20] [--seed 0] [--steps 200] [--kinds link rank data] [--keep DIR]

Hosts are network namespaces on this machine with one rank each, two to four of them (needs root and iproute2). In the middle of
a run

- link: the interface of one host is limited, in both directions (tc tbf), so that the bytes of a step take 0.8 to 1.6 x as
  long as a healthy step: less than a tenth of its rate. A plant must cost what the diagnosis accuses, 15 % of a step, also on
  a machine whose steps are long;
- rank: one rank is stopped and continued many times a second (SIGSTOP, SIGCONT), so that it runs half of the time or less;
- data: the rows of one rank are read slowly.

Rank, host, step and strength are drawn at random. A diagnosis is right if it names the kind and the host. The exit code is 1 if
more than one plant in twenty is not named right, or a healthy run is accused.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tests.lab.hosts import INTERFACE, Host, hosts, limit_rate
from tests.lab.jobs import write_job

from weft.data import Prepared, Rows, prepare
from weft.device.detect import detect
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.observe.diagnosis import diagnose
from weft.plan import resolve_plan
from weft.training.loop import train
from weft.training.metrics import read_metrics
from weft.training.run_folder import make_run_id
from weft.training.session import open_session

RATE = 1_000_000_000  # bits per second of a healthy link
KINDS = ("link", "rank", "data")
TRIGGER = "slow-rows"  # file in a run folder with the seconds that each row of a rank takes
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300}
ROWS_EACH, TOKENS = 4, 64  # rows of a step and rank, tokens of a row


@dataclass(frozen=True)
class Run:
    """One run of the benchmark."""

    hosts: int
    kind: str
    """"healthy", or what becomes slow."""
    victim: int = 0
    """Index of the host that becomes slow."""
    step: int = 0
    """Step from which it is slow."""
    strength: float = 0.0
    """link: healthy steps in which the bytes of one step are sent; rank: share of the time in which it runs; data: steps in
    which the rows of one are read."""


class SlowRows(Rows):
    """Rows that are read slowly once a file exists."""

    def __init__(self, rows: Rows, trigger: Path):
        self.__dict__.update(rows.__dict__)
        self.trigger = trigger

    def __getitem__(self, position: int) -> Any:
        if self.trigger.exists():
            time.sleep(float(self.trigger.read_text()))
        return super().__getitem__(position)


def draw(chosen: argparse.Namespace) -> list[Run]:
    """Draw the runs; those with the same number of hosts are consecutive."""
    dice = random.Random(chosen.seed)
    runs = [Run(dice.choice(chosen.hosts), "healthy") for _ in range(chosen.healthy)]
    for index in range(chosen.plants):
        count, kind = dice.choice(chosen.hosts), chosen.kinds[index % len(chosen.kinds)]
        strength = {"link": dice.uniform(0.8, 1.6), "rank": dice.uniform(0.3, 0.5), "data": dice.uniform(1.8, 3)}
        step = dice.randrange(int(0.35 * chosen.steps), int(0.6 * chosen.steps))
        runs.append(Run(count, kind, dice.randrange(count), step, strength[kind]))
    dice.shuffle(runs)
    return sorted(runs, key=lambda run: run.hosts)


def rank_main(folders: list[str]) -> None:
    """Train in each folder, one after the other, on the rank of this host."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for index, name in enumerate(folders):
        out = Path(name)
        # `write_run` has another job.toml in the folder for a moment, before it prepares the data.
        while not ((out / "prepared.json").exists() and (out / "job.toml").exists()):
            time.sleep(0.02)
        os.environ["MASTER_PORT"] = str(29400 + index)
        job, prepared = Job.load(out / "job.toml"), Prepared.from_json((out / "prepared.json").read_text())
        session = open_session(job, prepared, out)
        session = replace(session, train_rows=SlowRows(session.train_rows, out / f"{TRIGGER}-{rank}"))
        (out / f"pid-{rank}").write_text(str(os.getpid()))
        train(session, out, Heartbeat.open(), time.time())
        dist.barrier()
        (out / f"ended-{rank}").touch()
        dist.destroy_process_group()
    os._exit(0)


def write_run(out: Path, count: int, steps: int) -> None:
    """Write the files of a run that its ranks wait for."""
    out.mkdir(parents=True)
    train_table = {"steps": steps, "global_batch_size": ROWS_EACH * count, "micro_batch_size": ROWS_EACH}
    config = Job.load(write_job(out, data={"seq_len": TOKENS, "cache": str(out.parent / "cache")})).model.config
    (out / "job.toml").unlink()
    with tempfile.TemporaryDirectory() as folder:
        tables: dict[str, Any] = {"model": {"config": {**(config or {}), **SHAPE}}, "train": train_table}
        tables["data"] = {"seq_len": TOKENS, "cache": str(out.parent / "cache"), "path": str(out / "text")}
        job = Job.load(write_job(Path(folder), **tables, plan={"precision": {"param_dtype": "fp32"}}))
    prepared = prepare(job.data, model_folder=None, log=lambda text: None)
    job = job.model_copy(
        update={"plan": resolve_plan(job.plan, count, native_bf16=detect().supports("bf16")), "out": str(out)}
    )
    make_run_id(out)
    (out / "prepared.json").write_text(prepared.to_json())
    (out / "job.draft").write_text(job.to_toml())
    (out / "job.draft").rename(out / "job.toml")


def reached(out: Path) -> int:
    """Last step that the run has recorded."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextmanager
def slow(run: Run, emulated: list[Host], out: Path) -> Iterator[None]:
    """Make the victim slow while the context is open."""
    host, ended = emulated[run.victim], threading.Event()
    before = read_metrics(out / "metrics.jsonl")[2:]
    healthy = statistics.median(row.step_seconds for row in before)
    if run.kind == "link":
        rate = 8 * before[-1].comm_bytes / (run.strength * healthy)
        ends = (host.namespace, INTERFACE), (host.bridge, host.port)
        for end in ends:
            limit_rate(*end, int(rate))
        yield
        for end in ends:
            limit_rate(*end, RATE)
    elif run.kind == "data":
        draft = out / "draft"
        draft.write_text(str(run.strength * healthy / ROWS_EACH))
        draft.rename(out / f"{TRIGGER}-{run.victim}")
        yield
    else:
        pid = int((out / f"pid-{run.victim}").read_text())
        thread = threading.Thread(target=duty_cycle, args=(pid, run.strength, ended))
        thread.start()
        yield
        ended.set()
        thread.join()


def duty_cycle(pid: int, share: float, ended: threading.Event) -> None:
    """Let a process run for a share of the time, in periods of 40 ms."""
    period = 0.04
    while not ended.wait(period * share):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(period * (1 - share))
        os.kill(pid, signal.SIGCONT)


def until(condition: Callable[[], bool], processes: list[subprocess.Popen[Any]], logs: list[Path]) -> None:
    """Wait for a condition while all ranks are alive."""
    while not condition():
        for process, log in zip(processes, logs, strict=True):
            if process.poll():
                sys.exit(f"a rank ended with {process.returncode}: {log.read_text()[-2000:]}")
        time.sleep(0.02)


def run_all(runs: list[Run], folder: Path, steps: int) -> Iterator[tuple[Run, Path]]:
    """Run the runs with one number of hosts; yield each one when it has ended."""
    count = runs[0].hosts
    outs = [folder / f"run-{count}-{index}" for index in range(len(runs))]
    with hosts(count, RATE) as emulated:
        processes, logs = [], [folder / f"log-{count}-{rank}" for rank in range(count)]
        for rank, host in enumerate(emulated):
            variables = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "MASTER_ADDR": emulated[0].address}
            variables |= {
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": 1,
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            environment = os.environ | {key: str(value) for key, value in variables.items()}
            command = [sys.executable, __file__, "--ranks-of", *map(str, outs)]
            with logs[rank].open("w") as log:
                processes.append(host.start(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for run, out in zip(runs, outs, strict=True):
            write_run(out, count, steps)
            last = out / f"ended-{count - 1}"
            if run.kind != "healthy":
                until(lambda out=out, step=run.step: reached(out) >= step, processes, logs)  # type: ignore[misc]
            with slow(run, emulated, out) if run.kind != "healthy" else nullcontext():
                until(lambda out=out: reached(out) >= steps, processes, logs)  # type: ignore[misc]
            until(last.exists, processes, logs)
            yield run, out


def judge(run: Run, out: Path) -> tuple[str, bool, str]:
    """Kind that the diagnosis names, whether it is right, and its text."""
    found = diagnose(out)
    if found.verdict is None:
        return "healthy", run.kind == "healthy", found.headline
    named = found.verdict.kind
    right = named == run.kind and run.victim in found.verdict.hosts
    return named if right or named != run.kind else f"{named} (wrong host)", right, found.headline


def main() -> None:
    parser = argparse.ArgumentParser(description="Confusion matrix of weft doctor RUN.")
    parser.add_argument("--plants", type=int, default=20)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--keep", type=Path, help="folder in which the run folders stay")
    parser.add_argument("--ranks-of", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.ranks_of:
        return rank_main(chosen.ranks_of)
    matrix: Counter[tuple[str, str]] = Counter()
    wrong, began = Counter[bool](), time.monotonic()
    runs = draw(chosen)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for count in sorted({run.hosts for run in runs}):
            for run, out in run_all([run for run in runs if run.hosts == count], folder, chosen.steps):
                (out / "plant.json").write_text(json.dumps(asdict(run)))
                named, right, headline = judge(run, out)
                matrix[run.kind, named] += 1
                wrong[run.kind == "healthy"] += not right
                print(f"{'right' if right else 'WRONG'}  {run}\n       {headline}", flush=True)
    names = list(dict.fromkeys([*KINDS, "healthy", *(named for _, named in matrix)]))
    table = Table(
        "slow", *names, title=f"runs by what was slow (rows) and what was named; {time.monotonic() - began:.0f} s"
    )
    for kind in [*KINDS, "healthy"]:
        table.add_row(kind, *(str(matrix[kind, name] or "") for name in names))
    Console(width=140).print(table)
    sys.exit(wrong[True] > 0 or wrong[False] > chosen.plants // 20)


if __name__ == "__main__":
    main()
