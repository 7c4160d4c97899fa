"""Real runs whose processes are killed at random: each ends with the bits of one that was left alone, and leaves nothing alive.

Victims are ranks, also while they save, the process that starts ranks, and the launcher, with its guardian, also while it
writes the report. After the death of its launcher a run is resumed by a second command, else it goes on by itself.

    python -m tests.faults.kill --trials 100 [--kills 5] [--seed 0] [--minutes 40]      # five kills a run, layouts in turn
    python -m tests.faults.kill --every 15 --steps 300 [--layout "zero3 on 2"]       # one run, a kill 15 seconds after the last

Prints a line for each fault, and a table; exits with 1 if a run did not go on as promised.
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.lab.families import family
from tests.lab.jobs import write_job
from weft.checkpoint.folders import list_checkpoints, part_of
from weft.cluster.guardian import process_state
from weft.cluster.nursery import PROCESS_NAME
from weft.cluster.pulse import PulseRecord, read_pulse
from weft.cluster.scratch import PREFIX, SHARED_MEMORY
from weft.job import Job
from weft.train.metrics import read_metrics

MODEL = {**family("qwen3_moe"), "vocab_size": 300}  # for every axis
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3 on 4": (4, {"zero": 3}),
    "tp2 x dp2": (4, {"tp": 2}),
    "pp2 x dp2": (4, {"pp": 2}),
    "ep2 x dp2": (4, {"ep": 2, "dp_replicate": 2}),
    "zero3 on 2": (2, {"zero": 3}),
}
FOUR_RANKS = tuple(name for name, (ranks, _) in LAYOUTS.items() if ranks == 4)
STEPS, EVERY = 8, 2  # of a run with one kill: optimizer steps, and those between two checkpoints
MORE_STEPS = 6  # for each other kill
STEP_SECONDS = 0.1  # about; a kill comes at any moment of a step
MOST_STEP_SECONDS = 1.0  # on a machine that has other things to do
NAMING_SECONDS = 1.0  # promised, from the death of a rank to the line that names it
START_SECONDS = 120.0  # that ranks may take to begin; a run of some seconds hangs after as many
WRITING = "a checkpoint is being written"
NAMED = re.compile(r"weft: rank (\d+) on \S+ was killed by SIGKILL; (?:\w+ at )?step (\d+)")
RESTART = re.compile(r"attempt \d+ starts \d+ ranks in .+ restart \d of 3")
PROGRESS = re.compile(r"step[ -]\d|held-out")  # what rank 0 may still say of a step, a checkpoint or an evaluation


def job_file(folder: Path, layout: str, **tables: dict[str, Any]) -> Path:
    """A tiny job of a layout in a folder. Its tokens are given, so that no tokenizer and no sample take time."""
    folder.mkdir(parents=True, exist_ok=True)
    first, stride = np.arange(96).reshape(-1, 1), 1 + np.arange(96).reshape(-1, 1) % 7
    np.save(folder / "tokens.npy", ((first + stride * np.arange(33)) % 300).astype(np.uint16))
    settings: dict[str, dict[str, Any]] = {
        "model": {"config": MODEL},
        "data": {"source": "tokens", "path": str(folder / "tokens.npy"), "held_out": 0.1},
        "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 1},
        "plan": {"parallel": LAYOUTS[layout][1], "precision": {"forward": "fp32"}},
        "optimizer": {"lr": 1e-2, "eps": 1e-3},
        "checkpoint": {"every": EVERY},
    }
    for name, table in tables.items():
        settings[name] = {**settings.get(name, {}), **table}
    return write_job(folder, **settings)


class Line(NamedTuple):
    """What a command printed, when, and whether as an error."""

    seconds: float
    error: bool
    text: str


class Rank(NamedTuple):
    """A rank of a run under way."""

    pid: int
    pulse: Path

    def record(self) -> PulseRecord:
        """What it last said; nothing where its attempt is over."""
        try:
            return read_pulse(self.pulse)
        except FileNotFoundError:
            return PulseRecord()


def ranks_of(launcher: int) -> dict[int, Rank]:
    """The ranks that live now and have a pulse, by number: children of a launcher that are called so."""
    children = {pid: name for pid, parent, name in processes() if parent == launcher}
    pulses = [
        Path(path) for path in glob.glob(f"{SHARED_MEMORY}/{PREFIX}*/[0-9]*")
    ]  # folders of other runs may go at any moment
    ranks = [Rank(Rank(0, path).record().pid, path) for path in pulses]
    return {int(rank.pulse.name): rank for rank in ranks if children.get(rank.pid) == f"weft-rank-{rank.pulse.name}"}


def nursery_of(launcher: int) -> int:
    """The process that starts ranks for a launcher."""
    (found,) = [pid for pid, parent, name in processes() if parent == launcher and name == PROCESS_NAME]
    return found


def leftovers_of(out: Path) -> list[str]:
    """Folders in shared memory that belong to a run."""
    owners = [Path(path) for path in glob.glob(f"{SHARED_MEMORY}/{PREFIX}*/run.json")]
    return [str(path) for path in owners if json.loads(path.read_text())["file"].startswith(f"{out.resolve()}/")]


def processes() -> Iterator[tuple[int, int, str]]:
    """Number, parent and name of every process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        yield int(path.parent.name), int(after.split()[1]), before.partition("(")[2]


class Command:
    """A launcher under way. Two threads note each line as it comes. A context manager: nothing outlives it."""

    def __init__(self, arguments: list[str]):
        self.lines: list[Line] = []
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tests that run in the background of a shell ignore SIGINT, and so would the command.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        streams = (self.process.stdout, False), (self.process.stderr, True)
        self.readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self.readers:
            reader.start()

    def _read(self, stream: IO[str], error: bool) -> None:
        for text in stream:
            self.lines.append(Line(time.monotonic(), error, text.rstrip()))

    def until(self, done: Callable[[], Any], what: str) -> Any:
        """Wait until something holds, and return it; an AssertionError with all output if it does not come to that."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := done()):
            assert self.process.poll() is None, f"the run ended before {what}\n{self.printed()}"
            assert time.monotonic() < deadline, f"{what}: not within {START_SECONDS:g} s\n{self.printed()}"
            time.sleep(0.003)
        return found

    def rank_at(self, rank: int, step: int) -> Rank:
        """A rank, as soon as it has come to a step."""
        found = self.until(lambda: ranks_of(self.process.pid).get(rank), f"rank {rank} started")
        self.until(lambda: (found.record().step or 0) >= step, f"rank {rank} came to step {step}")
        return found

    def wait(self, seconds: float = START_SECONDS) -> int:
        """The exit code, when everything that was printed has been read."""
        self.process.wait(seconds)
        for reader in self.readers:
            reader.join(START_SECONDS)
        return self.process.returncode

    def errors(self) -> list[str]:
        """What came on stderr."""
        return [line.text for line in self.lines if line.error]

    def printed(self) -> str:
        """All output, for the message of a test that fails."""
        return "\n".join(f"{line.seconds:10.3f} {'!' if line.error else ' '} {line.text}" for line in self.lines)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            for child in ranks_of(self.process.pid).values():
                os.kill(child.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()


def weft_train(job: Path, layout: str, out: Path, *options: str) -> Command:
    """Start `weft train` on a job."""
    weft, ranks = str(Path(sys.executable).parent / "weft"), str(LAYOUTS[layout][0])
    return Command([weft, "train", str(job), "--ranks", ranks, "--out", str(out), *options])


def run_alone(folder: Path, layout: str, **tables: dict[str, Any]) -> Path:
    """The run folder of a layout that nobody disturbs."""
    job, out = job_file(folder / layout, layout, **tables), folder / layout / "whole"
    seconds = START_SECONDS + MOST_STEP_SECONDS * Job.load(job).train.steps
    with weft_train(job, layout, out) as command:
        assert command.wait(seconds) == 0, command.printed()
    return out


def differences(whole: Path, parts: Path) -> list[str]:
    """What of two runs of one layout is not bit by bit the same: every step, the last checkpoint, the export."""
    found = []
    one, other = (
        [(row.step, row.loss, row.grad_norm, row.learning_rate) for row in read_metrics(run / "metrics.jsonl")]
        for run in (whole, parts)
    )
    if one != other:
        steps = [step for step, *_ in sorted(set(one) ^ set(other))]
        found.append(f"step {steps[0]} and {len(steps) - 1} more lines of metrics")
    last = list_checkpoints(whole)[0].name
    files = [*(whole / last).glob("*.safetensors"), *(whole / "export").glob("*.safetensors")]
    assert len(files) > 1
    for path in files:
        name = path.relative_to(whole)
        if not (parts / name).exists() or path.read_bytes() != (parts / name).read_bytes():
            found.append(str(name))
    return found


RANK, SAVING, NURSERY, LAUNCHER = "rank", "saving rank", "starter of ranks", "launcher"
RANKS = {RANK: 7, SAVING: 3}  # and how often
VICTIMS = {**RANKS, NURSERY: 2, LAUNCHER: 2}
REPORT = "launcher at its report"  # in place of the last kill, in one run of REPORTS
REPORTS = 3
WRITING_REPORT = "counting baselines"


@dataclass
class Trial:
    """A kill, and what came of it."""

    layout: str
    victim: str
    rank: int | None
    """None for a launcher: it has no number, and nobody is left to name it."""
    moment: str
    naming_seconds: float | None
    problems: list[str]


def steps_of(kills: int) -> int:
    """Steps of a run with so many kills."""
    return STEPS + MORE_STEPS * (kills - 1)


def trials(
    folder: Path, layout: str, whole: Path, chance: random.Random, kills: int = 1, victims: Mapping[str, int] = RANKS
) -> list[Trial]:
    """Kill random processes at random moments of a run, one after the other, and look how it goes on and ends.

    No rank is killed twice in a row: the run would leave it out, and go on with another layout.

    Args:
        folder: for the job and the run.
        layout: one of LAYOUTS.
        whole: an undisturbed run of the same job.
        chance: decides all that is random.
        victims: what is killed, and how often; with REPORT among them that comes last.
    """
    out, steps, done = folder / "run", steps_of(kills), list[Trial]()
    job, restarts = job_file(folder, layout, train={"steps": steps}), ("--max-restarts", "3")
    with ExitStack() as stack:
        command = stack.enter_context(weft_train(job, layout, out, *restarts))
        for number in range(kills):
            (victim,) = chance.choices(sorted(victims), [victims[name] for name in sorted(victims)])
            if number == kills - 1 and REPORT in victims:
                victim = REPORT
            first_step = MORE_STEPS * number
            if victim in (LAUNCHER, REPORT):
                done.append(kill_launcher(command, layout, victim, first_step, chance))
                command = stack.enter_context(weft_train(job, layout, out, "--resume", "auto", *restarts))
            else:
                ranks = {*range(LAYOUTS[layout][0])} - {trial.rank for trial in done[-1:]}
                done.append(kill_one(command, layout, victim, chance.choice(sorted(ranks)), first_step, out, chance))
        exit_code = command.wait()
    found = [f"exit code {exit_code}"] if exit_code else differences(whole, out)
    found += [f"{path} is left" for path in (*out.glob(".step-*"), *leftovers_of(out))]
    for trial in done:
        trial.problems += found
    return done


def kill_launcher(command: Command, layout: str, victim: str, first_step: int, chance: random.Random) -> Trial:
    """Kill a launcher at a random moment behind a step, or while it writes the report; whether nothing outlives it."""
    if victim == REPORT:
        command.until(lambda: any(WRITING_REPORT in line.text for line in command.lines), WRITING_REPORT)
        processes, moment = [], "after the last step"
    else:
        step = first_step + chance.randrange(1, STEPS)
        ranks = [command.rank_at(rank, step) for rank in range(LAYOUTS[layout][0])]
        processes = [*(rank.pid for rank in ranks), nursery_of(command.process.pid)]
        moment = f"step {step}"
    time.sleep(chance.uniform(0, STEP_SECONDS))
    command.process.kill()
    command.process.wait()
    end = time.monotonic() + NAMING_SECONDS
    while living := [pid for pid in processes if process_state(pid) not in ("", "Z")]:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return Trial(layout, victim, None, moment, None, [f"process {pid} lives on" for pid in living])


def kill_one(
    command: Command, layout: str, kind: str, rank: int, first_step: int, out: Path, chance: random.Random
) -> Trial:
    """Kill a rank at a random moment behind a step, and wait for the announcement of the next attempt."""
    writing = kind == SAVING
    # While writing: at least two checkpoints are still to be written
    step = first_step + chance.randrange(1, STEPS - EVERY if writing else STEPS)
    delay = chance.uniform(0, STEP_SECONDS)
    victim = command.rank_at(rank, step)
    if writing:
        drafts = [part_of(out, saved) for saved in range(EVERY, first_step + STEPS + 1, EVERY)]
        command.until(lambda: any(path.exists() for path in drafts), WRITING)
        delay /= 10
    time.sleep(delay)
    if kind == NURSERY:  # it is needed again for the next attempt only
        os.kill(nursery_of(command.process.pid), signal.SIGKILL)
    before = victim.record()
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    after = victim.record()

    def said() -> list[Line]:
        return [line for line in command.lines if line.seconds > killed]

    command.until(lambda: any(RESTART.search(line.text) for line in said()), "the next attempt is announced")
    complaints = [line for line in said() if line.error or not PROGRESS.match(line.text)]
    named, steps = NAMED.match(complaints[0].text), {before.step or 0, after.step or before.step or 0}
    seconds = complaints[0].seconds - killed
    checks = {
        f"the first that was said: {complaints[0].text}": named and int(named[1]) == rank and int(named[2]) in steps,
        "named too late": seconds < NAMING_SECONDS,
    }
    moment = f"{before.phase}{' ' if before.phase == 'step' else ' at step '}{before.step}"
    moment += f", {WRITING}" if writing else ""
    return Trial(layout, kind, rank, moment, seconds, [text for text, good in checks.items() if not good])


def many_runs(folder: Path, count: int, kills: int, minutes: float, chance: random.Random) -> bool:
    """Trials of all layouts in turn, so many in a run; whether all went well."""
    wholes: dict[str, Path] = {}
    done: list[Trial] = []
    begin = time.monotonic()
    for number in range(-(-count // kills)):
        if time.monotonic() - begin > 60 * minutes:
            print(f"{minutes:g} minutes are over after {len(done)} of {count} trials")
            break
        layout, place, start = FOUR_RANKS[number % len(FOUR_RANKS)], folder / f"run-{number}", time.monotonic()
        if layout not in wholes:
            wholes[layout] = run_alone(folder, layout, train={"steps": steps_of(kills)})
        victims = {**VICTIMS, REPORT: 0} if number % REPORTS == 0 else VICTIMS
        found = trials(place, layout, wholes[layout], chance, kills, victims)
        for result in found:
            done.append(result)
            who = result.victim if result.rank is None else f"{result.victim}, rank {result.rank}"
            named = "" if result.naming_seconds is None else f" named in {result.naming_seconds:.2f} s,"
            print(
                f"{len(done):3}  {layout:11} {who} killed in {result.moment}:{named} "
                f"{'; '.join(result.problems) or 'bit-equal'}"
            )
        print(f"run {number + 1}: {time.monotonic() - start:.0f} s", flush=True)
        if not any(result.problems for result in found):
            shutil.rmtree(place)
    table = Table("of", "trials", "bit-equal", "median naming time", "worst")
    for group in (*FOUR_RANKS, *VICTIMS, REPORT, "all"):
        of = [result for result in done if group in (result.layout, result.victim, "all")]
        if of:
            seconds = [result.naming_seconds for result in of if result.naming_seconds is not None]
            times = [f"{statistics.median(seconds):.2f} s", f"{max(seconds):.2f} s"] if seconds else ["", ""]
            good = sum(not result.problems for result in of)
            table.add_row(group, str(len(of)), str(good), *times)
    Console().print(table)
    return all(not result.problems for result in done)


def one_run(folder: Path, layout: str, steps: int, every: float, chance: random.Random) -> bool:
    """A run that loses a rank every so many seconds, never one twice in a row; whether it ends as one that loses none."""
    tables = {"train": {"steps": steps}, "checkpoint": {"every": 10}}
    whole = run_alone(folder, layout, **tables)
    faults, last, begin = 0, -1, time.monotonic()
    fault = begin
    with weft_train(job_file(folder, layout, **tables), layout, folder / "run", "--max-restarts", "20") as command:
        while command.process.poll() is None:
            if time.monotonic() - fault > every and (
                ranks := {rank: found for rank, found in ranks_of(command.process.pid).items() if rank != last}
            ):
                last = chance.choice(sorted(ranks))
                said = f"{time.monotonic() - begin:6.1f} s  rank {last} killed at step {ranks[last].record().step}"
                os.kill(ranks[last].pid, signal.SIGKILL)
                faults, fault = faults + 1, time.monotonic()
                print(said, flush=True)
            time.sleep(0.05)
        exit_code = command.wait()
    wall = time.monotonic() - begin
    if exit_code:
        print(command.printed())
        return False
    rows, problems = read_metrics(folder / "run/metrics.jsonl"), differences(whole, folder / "run")
    goodput = sum(row.step_seconds for row in rows) / wall
    calm = read_metrics(whole / "metrics.jsonl")
    print(f"{faults} faults, {len(rows)} steps in {wall:.0f} s, goodput {goodput:.0%} (steps that count / wall time)")
    print(f"final loss {rows[-1].loss!r}, without faults {calm[-1].loss!r}: {'; '.join(problems) or 'bit-equal'}")
    return not problems and faults > 0


def main() -> None:
    """Run what the command line says, in a folder that goes if all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="kills")
    parser.add_argument("--kills", type=int, default=5, help="of each run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins later")
    parser.add_argument("--every", type=float, help="instead, one run with a kill every so many seconds")
    parser.add_argument("--steps", type=int, default=600, help="of that run")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default=FOUR_RANKS[0], help="of that run; its ranks must start in time"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, folder = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="weft-kill-"))
    if options.every:
        good = one_run(folder, options.layout, options.steps, options.every, chance)
    else:
        good = many_runs(folder, options.trials, options.kills, options.minutes, chance)
    if good:
        shutil.rmtree(folder)
    else:
        print(f"what failed is in {folder}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
