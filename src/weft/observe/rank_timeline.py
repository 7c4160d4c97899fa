"""Times of all ranks of a run, by what they did, on one axis of steps: read from `logs/times-host-N.jsonl`."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.errors import DataError
from weft.training.metrics import read_lines
from weft.training.progress import WARM_UP_STEPS
from weft.training.rank_times import LinkRates, RankPlace, RankTimes

MOST_BINS = 200
FEWEST_BINS = 20
TERMS = ("seconds", "data", "checkpoint", "outside", "queued")


@dataclass(frozen=True)
class Timeline:
    """Mean seconds per step, [ranks, bins]; a bin is some consecutive steps. Warm-up steps of each process are left out."""

    places: list[RankPlace]
    """Place of each rank."""
    steps: np.ndarray
    """First step of each bin, int64 [bins]."""
    last: int
    """Last step of the last bin."""
    seconds: np.ndarray
    """Duration of a step, including the time before it."""
    data: np.ndarray
    checkpoint: np.ndarray
    outside: np.ndarray
    queued: np.ndarray
    wait: dict[str, np.ndarray]
    """Wait by mesh axis and kind of link."""
    links: list[LinkRates]
    """Measurements of the links between hosts, in the order of steps."""

    @property
    def waited(self) -> np.ndarray:
        """Wait of all axes."""
        return sum(self.wait.values(), np.zeros_like(self.seconds))

    @property
    def compute(self) -> np.ndarray:
        """Rest of a step: computation of the rank."""
        rest = self.seconds - self.data - self.checkpoint - self.outside - self.waited
        return np.maximum(rest, 0.0)

    @property
    def step(self) -> np.ndarray:
        """Duration of a step, median over the ranks, [bins]."""
        return np.median(self.seconds, axis=0)

    @property
    def running_step(self) -> np.ndarray:
        """The same without the time in which the ranks waited for a core, of which other programs are the cause, [bins]."""
        return np.median(self.seconds - self.queued, axis=0)


def read_timeline(folder: Path) -> Timeline:
    """Read the times of all ranks of a run folder.

    Raises:
        DataError: the folder has no times, a file is damaged, or fewer steps than `FEWEST_BINS` were recorded by all ranks.
    """
    places, logs = _read_logs(folder)
    links = {line.after: line for log in logs for line in log if isinstance(line, LinkRates)}
    windows = [[line for line in log if isinstance(line, RankTimes)] for log in logs]
    last = min((max((line.last for line in rank), default=0) for rank in windows), default=0)
    starts = {line.first for line in logs[0] if isinstance(line, RankPlace)}
    axes = sorted({where for rank in windows for line in rank for where in line.wait})
    table = _times_of_steps(windows, axes, last)
    known = np.isfinite(table).all(axis=(0, 2))
    for start in starts:
        known[start : start + WARM_UP_STEPS + 1] = False
    steps = np.flatnonzero(known)
    long = int(np.median([line.last + 1 - line.first for rank in windows for line in rank] or [1]))
    width = max(long, -(-len(steps) // MOST_BINS))
    bins = len(steps) // width
    if bins < FEWEST_BINS:
        raise DataError(
            f"{len(steps)} steps after the first ones were recorded by all ranks, in {bins} lines of each",
            where=str(folder),
            rule=f"a diagnosis needs {FEWEST_BINS} lines, each of {width} steps here",
            fix="wait until the run has made more steps",
        )
    steps = steps[len(steps) - bins * width :]  # without the first steps, which fill no bin
    means = table[:, steps].reshape(len(windows), bins, width, -1).mean(axis=2)
    terms = dict(zip(TERMS, np.moveaxis(means, 2, 0), strict=False))
    wait = {where: means[:, :, len(TERMS) + index] for index, where in enumerate(axes)}
    return Timeline(
        places=places,
        steps=steps[::width],
        last=int(steps[-1]),
        wait=wait,
        links=[links[step] for step in sorted(links)],
        **terms,
    )


def _read_logs(folder: Path) -> tuple[list[RankPlace], list[list[RankPlace | RankTimes | LinkRates]]]:
    """Place of each rank, and its lines in the order of its processes.

    Read are the files of all hosts, and those of single ranks that earlier versions wrote. After a restart on other hosts the
    lines of a rank are in another file.
    """
    files = sorted((folder / "logs").glob("times-*.jsonl"))
    if not files:
        raise DataError(
            f"{folder} has no times of its ranks",
            where=str(folder / "logs"),
            rule="`weft train` writes logs/times-host-N.jsonl; scripts and loops of your own do not",
            fix="name the run folder of a `weft train` of this version",
        )
    processes = [process for path in files for process in _read_processes(path)]
    logs: defaultdict[int, list[RankPlace | RankTimes | LinkRates]] = defaultdict(list)
    for place, lines in sorted(processes, key=lambda process: process[0].started):
        logs[place.rank] += [place, *lines]
    places = {rank: next(line for line in reversed(log) if isinstance(line, RankPlace)) for rank, log in logs.items()}
    newest = max(places.values(), key=lambda place: place.started)
    ranks = [rank for rank in sorted(places) if rank < newest.world_size]
    return [places[rank] for rank in ranks], [logs[rank] for rank in ranks]


def _read_processes(path: Path) -> list[tuple[RankPlace, list[RankTimes | LinkRates]]]:
    """Place and lines of each process of a rank in a file."""
    processes: list[tuple[RankPlace, list[RankTimes | LinkRates]]] = []
    current: dict[int, list[RankTimes | LinkRates]] = {}
    rank = 0
    for line in read_lines(path, RankPlace | RankTimes | LinkRates, skip_torn=True):
        if isinstance(line, RankPlace):
            rank, current[line.rank] = line.rank, []
            processes.append((line, current[line.rank]))
        elif isinstance(line, LinkRates):
            current.setdefault(0, []).append(line)
        else:
            current.setdefault(rank if line.rank < 0 else line.rank, []).append(line)
    return processes


def _times_of_steps(windows: list[list[RankTimes]], axes: list[str], last: int) -> np.ndarray:
    """Seconds of each term and of the waits along each axis, [ranks, last + 1, terms + axes]; NaN where none are recorded."""
    table = np.full((len(windows), last + 1, len(TERMS) + len(axes)), np.nan)
    for rank, lines in enumerate(windows):
        for line in lines:  # of a step that a restarted run repeated, the last line counts
            values = [*(getattr(line, name) for name in TERMS), *(line.wait.get(where, 0.0) for where in axes)]
            table[rank, line.first : line.last + 1] = np.array(values) / (line.last + 1 - line.first)
    return table


@dataclass(frozen=True)
class Phase:
    """Bins in which a series is higher than before."""

    start: int
    """First bin; 0: it was high from the start."""
    end: int
    """First bin after them."""
    before: float
    """Median before `start`."""
    inside: float
    """Median inside."""

    @property
    def rise(self) -> float:
        """Difference of the medians."""
        return self.inside - self.before


FEWEST = 8  # bins before and inside a phase
SEPARATED = 0.75  # share of the bins on the right side of the mean of both medians


def find_phase(series: np.ndarray) -> Phase | None:
    """Find the phase in which a series is higher than before; it may have ended. None if there is no clear one.

    The change point minimizes the sum of absolute deviations from the medians of both sides, so that single slow steps do not
    move it.

    Args:
        series: float64 [bins].
    """
    at = _split(series)
    if at is None:
        return None
    before, after = np.median(series[:at]), np.median(series[at:])
    if after < before:  # it has ended at `at`, if it rose before
        inner = _split(series[:at])
        return None if inner is None else _phase(series, inner, at)
    end = _split(series[at:])
    if end is not None and np.median(series[at + end :]) < before + 0.3 * (np.median(series[at : at + end]) - before):
        return _phase(series, at, at + end)
    return _phase(series, at, len(series))


def _split(series: np.ndarray) -> int | None:
    """Best change point with `FEWEST` bins on both sides."""
    ends = range(FEWEST, len(series) - FEWEST + 1)
    costs = [_deviation(series[:at]) + _deviation(series[at:]) for at in ends]
    return ends[int(np.argmin(costs))] if costs else None


def _deviation(values: np.ndarray) -> float:
    return float(np.abs(values - np.median(values)).sum())


def _phase(series: np.ndarray, start: int, end: int) -> Phase | None:
    """The phase, if it is higher than the bins before in most of its bins."""
    before, inside = series[:start], series[start:end]
    middle = (np.median(before) + np.median(inside)) / 2
    separated = min((before < middle).mean(), (inside > middle).mean()) >= SEPARATED
    return Phase(start, end, float(np.median(before)), float(np.median(inside))) if separated else None
