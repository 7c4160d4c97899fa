"""Kill random processes of real runs; each run must end with the bits of an undisturbed run, and leave no process behind.

Victims are ranks, also while they save; the fork server; and the launcher with its watchdog, also while it writes the report.
After the death of its launcher a run is resumed by a second command; after other deaths it continues by itself.

    python -m tests.faults.kill --trials 100 [--kills 5] [--seed 0] [--minutes 40]   # five kills per run, alternating layouts
    python -m tests.faults.kill --every 15 --steps 300 [--layout "zero3 on 2"]       # one run with a kill every 15 seconds

Prints a line for each fault, and a table; exits with 1 if a run did not continue correctly.
"""

import argparse
import glob
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.lab.commands import ForkedCommand, start_weft
from tests.lab.families import family
from tests.lab.jobs import write_job
from weft.checkpoint.folders import list_checkpoints, part_of
from weft.job import Job
from weft.launch.forkserver import PROCESS_NAME
from weft.launch.rank_status import RankStatus, read_status
from weft.launch.scratch import PREFIX, SHARED_MEMORY
from weft.launch.watchdog import process_state
from weft.training.metrics import read_metrics

MODEL = {**family("qwen3_moe"), "vocab_size": 300}  # supports every axis
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3 on 4": (4, {"zero": 3}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 3}),
    "pp2 x dp2": (4, {"pp": 2, "zero": 3}),
    "ep2 x dp2": (4, {"ep": 2, "dp_replicate": 2, "zero": 3}),
    "zero3 on 2": (2, {"zero": 3}),
}
FOUR_RANKS = tuple(name for name, (ranks, _) in LAYOUTS.items() if ranks == 4)
POLL_SECONDS = 0.003
STEPS, EVERY = 8, 2  # of a run with one kill: optimizer steps, and steps between two checkpoints
MORE_STEPS = 6  # for each further kill
STEP_SECONDS = 0.1  # approximate; a kill happens at any moment of a step
MOST_STEP_SECONDS = 1.0  # on a busy machine
NAMING_SECONDS = 1.0  # limit from the death of a rank to the line that names it
START_SECONDS = 120.0  # limit for the start of ranks, and for a run of some seconds
WRITING = "a checkpoint is being written"
NAMED = re.compile(r"weft: rank (\d+) on \S+ was killed by SIGKILL; (?:\w+ at )?step (\d+)")
RESTART = re.compile(r"attempt \d+ starts \d+ ranks in .+ restart \d of 3")
WORKING = re.compile(r"weft: \w+: .+ \(\d+ s\)")
PROGRESS = re.compile(
    r"step[ -]\d|held-out|expected: "
)  # late output of rank 0: steps, checkpoints, evaluations, speed


def job_file(folder: Path, layout: str, **tables: dict[str, Any]) -> Path:
    """Write a tiny job of a layout into a folder; it has tokens, so that no tokenizer and no sample take time."""
    folder.mkdir(parents=True, exist_ok=True)
    first, stride = np.arange(96).reshape(-1, 1), 1 + np.arange(96).reshape(-1, 1) % 7
    np.save(folder / "tokens.npy", ((first + stride * np.arange(33)) % 300).astype(np.uint16))
    settings: dict[str, dict[str, Any]] = {
        "model": {"config": MODEL},
        "data": {"source": "tokens", "path": str(folder / "tokens.npy"), "held_out": 0.1},
        "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1},
        "plan": {"parallel": LAYOUTS[layout][1], "precision": {"param_dtype": "fp32"}},
        "optimizer": {"lr": 1e-2, "eps": 1e-3},
        "checkpoint": {"every": EVERY},
    }
    for name, table in tables.items():
        settings[name] = {**settings.get(name, {}), **table}
    return write_job(folder, **settings)


class Line(NamedTuple):
    """Line of output: time, True for stderr, and text."""

    seconds: float
    error: bool
    text: str


class Rank(NamedTuple):
    """Rank of a running job."""

    pid: int
    heartbeat: Path

    def status(self) -> RankStatus:
        """Last status of the rank; empty if its attempt is over."""
        try:
            return read_status(self.heartbeat)
        except FileNotFoundError:
            return RankStatus()


def ranks_of(launcher: int) -> dict[int, Rank]:
    """Living ranks of a launcher by rank: child processes with a rank's name and a heartbeat file.

    Tests poll this, so it reads only the processes that have heartbeats, not all of /proc.
    """
    ranks = {}
    for path in glob.glob(f"{SHARED_MEMORY}/{PREFIX}*/[0-9]*"):  # folders of other runs may vanish at any moment
        rank = Rank(Rank(0, Path(path)).status().pid, Path(path))
        if process_of(rank.pid) == (launcher, f"weft-rank-{rank.heartbeat.name}"):
            ranks[int(rank.heartbeat.name)] = rank
    return ranks


def forkserver_of(launcher: int) -> int:
    """Process id of a launcher's fork server."""
    (found,) = [pid for pid, parent, name in processes() if parent == launcher and name == PROCESS_NAME]
    return found


def leftovers_of(out: Path) -> list[str]:
    """Owner files of a run's folders in shared memory."""
    owners = [Path(path) for path in glob.glob(f"{SHARED_MEMORY}/{PREFIX}*/run.json")]
    return [str(path) for path in owners if json.loads(path.read_text())["file"].startswith(f"{out.resolve()}/")]


def processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent and name of every process."""
    for path in Path("/proc").glob("[0-9]*"):
        if found := process_of(int(path.name)):
            yield int(path.name), *found


def process_of(pid: int) -> tuple[int, str] | None:
    """Parent and name of a process; None if it has ended."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    return int(after.split()[1]), before.partition("(")[2]


class Command:
    """Running launcher, whose output is read while a test waits; a context manager that kills its processes at the end."""

    def __init__(self, command: ForkedCommand | list[str]):
        """Record the output of a command.

        Args:
            command: running command, or arguments of a command to start in a new process.
        """
        self.lines: list[Line] = []
        self.process: ForkedCommand | subprocess.Popen[bytes]
        if isinstance(command, ForkedCommand):
            self.process, self._files = command, (command.stdout, command.stderr)
        else:
            self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
            # Tests that run in the background of a shell ignore SIGINT, and so would the command.
            handled = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            self.process = subprocess.Popen(command, stdout=self._files[0], stderr=self._files[1], preexec_fn=handled)
        self._read = [0, 0]

    def read(self) -> None:
        """Add complete new lines of output to `lines`, with the time of this call; none that say that a command is running."""
        for index, file in enumerate(self._files):
            start = self._read[index]
            data = os.pread(file.fileno(), max(0, os.fstat(file.fileno()).st_size - start), start)
            complete = data[: data.rfind(b"\n") + 1]
            self._read[index] += len(complete)
            now = time.monotonic()
            self.lines += [
                Line(now, bool(index), text.rstrip())
                for text in complete.decode(errors="replace").splitlines()
                if not (index and WORKING.fullmatch(text.rstrip()))
            ]

    def until(self, done: Callable[[], Any], what: str) -> Any:
        """Wait for a true value of `done` and return it; AssertionError with all output at a timeout or the end of the run."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            ended = self.process.poll() is not None
            self.read()
            if found := done():
                return found
            assert not ended, f"the run ended before {what}\n{self.printed()}"
            assert time.monotonic() < deadline, f"{what}: not within {START_SECONDS:g} s\n{self.printed()}"
            time.sleep(POLL_SECONDS)

    def rank_at(self, rank: int, step: int) -> Rank:
        """Wait until a rank has reached a step; return the rank."""
        found = self.until(lambda: ranks_of(self.process.pid).get(rank), f"rank {rank} started")
        self.until(lambda: (found.status().step or 0) >= step, f"rank {rank} reached step {step}")
        return found

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Wait for the exit code, and read all output."""
        deadline = time.monotonic() + seconds
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            self.read()
            time.sleep(POLL_SECONDS)
        self.read()
        assert code is not None, f"not ended within {seconds:g} s\n{self.printed()}"
        return code

    def errors(self) -> list[str]:
        """Lines of stderr until now."""
        self.read()
        return [line.text for line in self.lines if line.error]

    def printed(self) -> str:
        """All output, for the message of a failed assertion."""
        return "\n".join(f"{line.seconds:10.3f} {'!' if line.error else ' '} {line.text}" for line in self.lines)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            for child in ranks_of(self.process.pid).values():
                os.kill(child.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()


def weft_train(job: Path, layout: str, out: Path, *options: str, installed: bool = False) -> Command:
    """Start `weft train` on a job, in a fork of this process or as the installed command."""
    arguments = ["train", str(job), "--nproc-per-node", str(LAYOUTS[layout][0]), "--out", str(out), *options]
    return Command([str(Path(sys.executable).parent / "weft"), *arguments] if installed else start_weft(*arguments))


def run_alone(folder: Path, layout: str, **tables: dict[str, Any]) -> Path:
    """Run a layout without faults; return its run folder."""
    job, out = job_file(folder / layout, layout, **tables), folder / layout / "reference"
    seconds = START_SECONDS + MOST_STEP_SECONDS * Job.load(job).train.steps
    with weft_train(job, layout, out) as command:
        assert command.wait(seconds) == 0, command.printed()
    return out


def differences(reference: Path, run: Path) -> list[str]:
    """Bitwise differences of two runs of one layout: every step, the last checkpoint, the export."""
    found = []
    expected, rows = (
        [(row.step, row.loss, row.grad_norm, row.learning_rate) for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (reference, run)
    )
    if expected != rows:
        steps = [step for step, *_ in sorted(set(expected) ^ set(rows))]
        found.append(f"step {steps[0]} and {len(steps) - 1} more lines of metrics")
    last = list_checkpoints(reference)[0].name
    files = [*(reference / last).glob("*.safetensors"), *(reference / "export").glob("*.safetensors")]
    assert len(files) > 1
    for path in files:
        name = path.relative_to(reference)
        if not (run / name).exists() or path.read_bytes() != (run / name).read_bytes():
            found.append(str(name))
    return found


RANK, SAVING, FORKSERVER, LAUNCHER = "rank", "saving rank", "fork server", "launcher"
RANKS = {RANK: 7, SAVING: 3}  # victim -> relative frequency
VICTIMS = {**RANKS, FORKSERVER: 2, LAUNCHER: 2}
REPORT = "launcher writing its report"  # replaces the last kill of every REPORTS-th run
REPORTS = 3
WRITING_REPORT = "counting baselines"


@dataclass
class Trial:
    """Kill of a process, and its consequences."""

    layout: str
    victim: str
    rank: int | None
    """None for a launcher, whose death nobody can report."""
    moment: str
    naming_seconds: float | None
    problems: list[str]


def steps_of(kills: int) -> int:
    """Steps of a run with a number of kills."""
    return STEPS + MORE_STEPS * (kills - 1)


def trials(
    folder: Path, layout: str, reference: Path, rng: random.Random, kills: int = 1, victims: Mapping[str, int] = RANKS
) -> list[Trial]:
    """Kill random processes at random moments of a run, one after the other, and check how the run continues and ends.

    No rank is killed twice in a row, because the run would continue without it, in another layout.

    Args:
        folder: folder for the job and the run.
        layout: key of LAYOUTS.
        reference: run folder of an undisturbed run of the same job.
        rng: source of all randomness.
        kills: number of kills.
        victims: relative frequency by kind of victim; REPORT, if present, is the last kill.
    """
    out, steps, done = folder / "run", steps_of(kills), list[Trial]()
    job, restarts = job_file(folder, layout, train={"steps": steps}), ("--max-restarts", "3")
    with ExitStack() as stack:
        command = stack.enter_context(weft_train(job, layout, out, *restarts))
        for index in range(kills):
            (victim,) = rng.choices(sorted(victims), [victims[name] for name in sorted(victims)])
            if index == kills - 1 and REPORT in victims:
                victim = REPORT
            first_step = MORE_STEPS * index
            if victim in (LAUNCHER, REPORT):
                done.append(kill_launcher(command, layout, victim, first_step, rng))
                command = stack.enter_context(weft_train(job, layout, out, "--resume", "auto", *restarts))
            else:
                ranks = {*range(LAYOUTS[layout][0])} - {trial.rank for trial in done[-1:]}
                done.append(kill_one(command, layout, victim, rng.choice(sorted(ranks)), first_step, out, rng))
        exit_code = command.wait()
    found = [f"exit code {exit_code}"] if exit_code else differences(reference, out)
    found += [f"{path} was not removed" for path in (*out.glob(".step-*"), *leftovers_of(out))]
    for trial in done:
        trial.problems += found
    return done


def kill_launcher(command: Command, layout: str, victim: str, first_step: int, rng: random.Random) -> Trial:
    """Kill a launcher at a random moment after a step, or while it writes the report; check that no process outlives it."""
    if victim == REPORT:
        command.until(lambda: any(WRITING_REPORT in line.text for line in command.lines), WRITING_REPORT)
        processes, moment = [], "after the last step"
    else:
        step = first_step + rng.randrange(1, STEPS)
        ranks = [command.rank_at(rank, step) for rank in range(LAYOUTS[layout][0])]
        processes = [*(rank.pid for rank in ranks), forkserver_of(command.process.pid)]
        moment = f"step {step}"
    time.sleep(rng.uniform(0, STEP_SECONDS))
    command.process.kill()
    command.process.wait()
    end = time.monotonic() + NAMING_SECONDS
    while living := [pid for pid in processes if process_state(pid) not in ("", "Z")]:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return Trial(layout, victim, None, moment, None, [f"process {pid} is still alive" for pid in living])


def kill_one(
    command: Command, layout: str, kind: str, rank: int, first_step: int, out: Path, rng: random.Random
) -> Trial:
    """Kill a rank at a random moment after a step, and wait for the announcement of the next attempt."""
    writing = kind == SAVING
    # A saving rank needs at least two checkpoints that are not written yet.
    step = first_step + rng.randrange(1, STEPS - EVERY if writing else STEPS)
    delay = rng.uniform(0, STEP_SECONDS)
    victim = command.rank_at(rank, step)
    if writing:
        drafts = [part_of(out, saved) for saved in range(EVERY, first_step + STEPS + 1, EVERY)]
        command.until(lambda: any(path.exists() for path in drafts), WRITING)
        delay /= 10
    time.sleep(delay)
    if kind == FORKSERVER:  # needed only for the next attempt
        os.kill(forkserver_of(command.process.pid), signal.SIGKILL)
    before = victim.status()
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    after = victim.status()

    def new_lines() -> list[Line]:
        return [line for line in command.lines if line.seconds > killed]

    command.until(lambda: any(RESTART.search(line.text) for line in new_lines()), "the next attempt is announced")
    complaints = [line for line in new_lines() if line.error or not PROGRESS.match(line.text)]
    named, steps = NAMED.match(complaints[0].text), {before.step or 0, after.step or before.step or 0}
    seconds = complaints[0].seconds - killed
    checks = {
        f"the first error line: {complaints[0].text}": named and int(named[1]) == rank and int(named[2]) in steps,
        "named too late": seconds < NAMING_SECONDS,
    }
    moment = f"{before.phase}{' ' if before.phase == 'step' else ' at step '}{before.step}"
    moment += f", {WRITING}" if writing else ""
    return Trial(layout, kind, rank, moment, seconds, [text for text, good in checks.items() if not good])


def many_runs(folder: Path, count: int, kills: int, minutes: float, rng: random.Random) -> bool:
    """Run trials in all layouts in turn, with several kills per run; return True if all succeeded."""
    references: dict[str, Path] = {}
    done: list[Trial] = []
    begin = time.monotonic()
    for index in range(-(-count // kills)):
        if time.monotonic() - begin > 60 * minutes:
            print(f"stopping after {minutes:g} minutes, with {len(done)} of {count} trials")
            break
        layout, run_folder, start = FOUR_RANKS[index % len(FOUR_RANKS)], folder / f"run-{index}", time.monotonic()
        if layout not in references:
            references[layout] = run_alone(folder, layout, train={"steps": steps_of(kills)})
        victims = {**VICTIMS, REPORT: 0} if index % REPORTS == 0 else VICTIMS
        found = trials(run_folder, layout, references[layout], rng, kills, victims)
        for result in found:
            done.append(result)
            who = result.victim if result.rank is None else f"{result.victim}, rank {result.rank}"
            named = "" if result.naming_seconds is None else f" named in {result.naming_seconds:.2f} s,"
            print(
                f"{len(done):3}  {layout:11} {who} killed in {result.moment}:{named} "
                f"{'; '.join(result.problems) or 'bit-equal'}"
            )
        print(f"run {index + 1}: {time.monotonic() - start:.0f} s", flush=True)
        if not any(result.problems for result in found):
            shutil.rmtree(run_folder)
    table = Table("layout or victim", "trials", "bit-equal", "median naming time", "longest")
    for group in (*FOUR_RANKS, *VICTIMS, REPORT, "all"):
        results = [result for result in done if group in (result.layout, result.victim, "all")]
        if results:
            seconds = [result.naming_seconds for result in results if result.naming_seconds is not None]
            times = [f"{statistics.median(seconds):.2f} s", f"{max(seconds):.2f} s"] if seconds else ["", ""]
            good = sum(not result.problems for result in results)
            table.add_row(group, str(len(results)), str(good), *times)
    Console().print(table)
    return all(not result.problems for result in done)


def one_run(folder: Path, layout: str, steps: int, every: float, rng: random.Random) -> bool:
    """Run with a rank killed at an interval, never the same twice in a row; True if it ends like a run without kills."""
    tables = {"train": {"steps": steps}, "checkpoint": {"every": 10}}
    reference = run_alone(folder, layout, **tables)
    faults, last, begin = 0, -1, time.monotonic()
    fault = begin
    with weft_train(job_file(folder, layout, **tables), layout, folder / "run", "--max-restarts", "20") as command:
        while command.process.poll() is None:
            if time.monotonic() - fault > every and (
                ranks := {rank: found for rank, found in ranks_of(command.process.pid).items() if rank != last}
            ):
                last = rng.choice(sorted(ranks))
                message = f"{time.monotonic() - begin:6.1f} s  rank {last} killed at step {ranks[last].status().step}"
                os.kill(ranks[last].pid, signal.SIGKILL)
                faults, fault = faults + 1, time.monotonic()
                print(message, flush=True)
            time.sleep(0.05)
        exit_code = command.wait()
    wall = time.monotonic() - begin
    if exit_code:
        print(command.printed())
        return False
    rows, problems = read_metrics(folder / "run/metrics.jsonl"), differences(reference, folder / "run")
    goodput = sum(row.step_seconds for row in rows) / wall
    calm = read_metrics(reference / "metrics.jsonl")
    print(
        f"{faults} faults, {len(rows)} steps in {wall:.0f} s, goodput {goodput:.0%} (time of completed steps / wall time)"
    )
    print(f"final loss {rows[-1].loss!r}, without faults {calm[-1].loss!r}: {'; '.join(problems) or 'bit-equal'}")
    return not problems and faults > 0


def main() -> None:
    """Run the trials of the command line in a temporary folder, which is kept after a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="total number of kills")
    parser.add_argument("--kills", type=int, default=5, help="kills per run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no new run after this time")
    parser.add_argument("--every", type=float, help="instead: one run with a kill at this interval in seconds")
    parser.add_argument("--steps", type=int, default=600, help="steps of the run with --every")
    parser.add_argument("--layout", choices=LAYOUTS, default=FOUR_RANKS[0], help="layout of the run with --every")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, folder = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="weft-kill-"))
    if options.every:
        good = one_run(folder, options.layout, options.steps, options.every, rng)
    else:
        good = many_runs(folder, options.trials, options.kills, options.minutes, rng)
    if good:
        shutil.rmtree(folder)
    else:
        print(f"files of failed runs are in {folder}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
