"""How well the planner predicts runs that others have published.

The file is a table with one metric a line; lines whose ids agree up to the first dot are one run (docs/planner.md). Of each
run one step time is derived, from the metric that says it most directly. Runs are grouped by hardware and source. The run of a
group that calibrates is chosen by configuration alone: the one whose predicted time for a model operation is the median of the
group, so the most usual one. Its measured time over its predicted one, to the power of `TRUST`, is the group's only scalar, and
it is not scored. A second predictor, calibrated on the same run, says that every model operation of a group takes the same
time: what the planner is worth is what it does better.
"""

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from weft.planner.costmodel.hardware import GB, GIB, MIB
from weft.planner.costmodel.peak_memory import peak_memory, stage_memory
from weft.planner.costmodel.step_time import CALIBRATED, UNCALIBRATED, step_time
from weft.planner.search.search import EQUAL

from .published import USABLE, Run, measured_seconds

WIDTH = 150  # letters of a line
SURPRISE = 1.5  # times as long as predicted, or as short: what is more says more of that run than of the machine
TRUST = 0.4  # of the logarithm of a measurement against a prior of 1: machines differ by some 0.13, runs of one by 0.16


class Score(NamedTuple):
    """How predictions of step times compare with measurements."""

    runs: int
    mape: float
    bias: float
    spearman: float | None
    """Mean over groups of eight runs or more of one model, length and number of devices; None without such a group."""
    groups: int
    regret: float | None
    """How much slower, on average, the layout that is predicted to be the fastest is than the fastest."""


def predicted_seconds(run: Run) -> float:
    """Of a step, before calibration."""
    return step_time(run.shape, run.layout, run.cluster, run.stack).seconds


MEMORY_METRICS: dict[str, tuple[str, float]] = {
    "mem_gib_alloc": ("allocated", GIB),
    "mem_mib_alloc": ("allocated", MIB),
    "mem_gb_alloc": ("allocated", GB),
    "mem_gib_reserved": ("reserved", GIB),
    "mem_gb_peak_reserved": ("reserved", GIB),
    "mem_gb_static_alloc": ("states", GIB),
    "mem_gb_nvidia_smi": ("total", GIB),
}


def memory_errors(run: Run) -> dict[str, float]:
    """Relative errors of predicted bytes, each of the stage that has most of them, by metric whose meaning is known."""
    stages = [stage_memory(run.shape, run.layout, run.stack, rank) for rank in range(run.layout.pp)]
    return {
        name: max(getattr(memory, part) for memory in stages) / (run.metrics[name] * unit) - 1
        for name, (part, unit) in MEMORY_METRICS.items()
        if run.metrics.get(name)
    }


class Outcome(NamedTuple):
    """A run that is judged."""

    run: Run
    measured: float
    uncalibrated: float
    planner: float
    baseline: float

    @property
    def error(self) -> float:
        """Of the planner, relative."""
        return self.planner / self.measured - 1


@dataclass(frozen=True)
class Calibration:
    """The scalar of a group."""

    run: str
    scalar: float


def judge(runs: Iterable[Run]) -> tuple[list[Outcome], dict[tuple[str, str], Calibration]]:
    """Predict all runs that have a step time, each group calibrated on one of its runs, which is left out."""
    groups: dict[tuple[str, str], list[tuple[Run, float, float]]] = defaultdict(list)
    for run in runs:
        seconds = measured_seconds(run)
        if seconds:
            groups[run.group].append((run, seconds, predicted_seconds(run)))
    outcomes, calibrations = [], {}
    for group, found in groups.items():
        chosen, seconds, predicted = sorted(
            found, key=lambda item: (item[2] * item[0].num_devices / item[0].model_flops, item[0].id)
        )[len(found) // 2]
        scalar = min(max(seconds / predicted, 1 / SURPRISE), SURPRISE) ** TRUST
        rate = seconds * chosen.num_devices / chosen.model_flops
        calibrations[group] = Calibration(chosen.id, scalar)
        outcomes += [
            Outcome(run, measured, guess, guess * scalar, rate * run.model_flops / run.num_devices)
            for run, measured, guess in found
            if run is not chosen
        ]
    return outcomes, calibrations


def score(outcomes: Sequence[Outcome], baseline: bool = False) -> Score:
    """Of some outcomes, of the planner or of the constant rate."""
    guesses = [outcome.baseline if baseline else outcome.planner for outcome in outcomes]
    errors = [guess / outcome.measured - 1 for guess, outcome in zip(guesses, outcomes, strict=True)]
    large = [pairs for pairs in comparable(outcomes, guesses) if len(pairs) >= 8]
    ranks = [spearman([a for a, _ in pairs], [b for _, b in pairs]) for pairs in large]
    regrets = [min(pairs)[1] / min(b for _, b in pairs) - 1 for pairs in large]
    return Score(
        runs=len(errors),
        mape=statistics.fmean(abs(error) for error in errors),
        bias=statistics.fmean(errors),
        spearman=statistics.fmean(ranks) if ranks else None,
        groups=len(large),
        regret=statistics.fmean(regrets) if regrets else None,
    )


def comparable(outcomes: Sequence[Outcome], guesses: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Guessed and measured seconds of a token, in groups of one source, model, length, and number and kind of devices."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for guess, (run, measured, *_) in zip(guesses, outcomes, strict=True):
        tokens = run.layout.global_batch * run.layout.seq
        key = run.family, run.model, run.layout.seq, run.num_devices, run.cluster.device.name
        groups[key].append((guess / tokens, measured / tokens))
    return list(groups.values())


class Order(NamedTuple):
    """How often the faster of two runs is predicted to be the faster one."""

    low: float
    high: float
    """Relative difference of the two predictions, from and to."""
    pairs: int
    right: float


def order_by_difference(outcomes: Sequence[Outcome]) -> list[Order]:
    """Pairs of comparable runs by how far their predictions are apart: below `EQUAL`, and twice and more above it."""
    found: list[tuple[float, bool]] = []
    for group in comparable(outcomes, [outcome.planner for outcome in outcomes]):
        for (guess, measured), (other, seen) in itertools.combinations(group, 2):
            found.append((max(guess, other) / min(guess, other) - 1, (guess < other) == (measured < seen)))
    limits = (0.0, EQUAL, 2 * EQUAL, 4 * EQUAL, float("inf"))
    orders = []
    for low, high in itertools.pairwise(limits):
        right = [agrees for difference, agrees in found if low <= difference < high]
        if right:
            orders.append(Order(low, high, len(right), sum(right) / len(right)))
    return orders


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks; equal values share their mean rank. 0 where one side is all equal."""
    a, b = _ranks(one), _ranks(other)
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(a, b)


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


class Fit(NamedTuple):
    """Whether runs fit into memory, predicted against seen."""

    right: int
    false_fits: int
    """Predicted to fit, and did not."""
    false_refusals: int

    @property
    def runs(self) -> int:
        """Judged."""
        return sum(self)


def judge_fit(runs: Iterable[Run]) -> Fit:
    """Of runs that say whether they fitted; those that have a peak or a step time fitted."""
    right = false_fits = refusals = 0
    for run in runs:
        fitted = run.metrics.get("fits", 1.0) > 0
        if run.guessed or ("fits" not in run.metrics and measured_seconds(run) is None):
            continue
        fits = peak_memory(run.shape, run.layout, run.stack).total <= USABLE * run.cluster.device.memory
        right += fits == fitted
        false_fits += fits and not fitted
        refusals += fitted and not fits
    return Fit(right, false_fits, refusals)


class Interval(NamedTuple):
    """Between which factors of a prediction nine of ten measured step times lie."""

    low: float
    high: float
    coverage: float
    """Share of runs in the interval that all other sources give."""


def interval(outcomes: Sequence[Outcome], calibrated: bool) -> Interval:
    """From the scatter of outcomes; a source weighs as the root of its runs, so that no long sweep decides alone."""
    sources: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        sources[outcome.run.family].append(outcome)
    ratios = {family: _ratios(some, calibrated) for family, some in sources.items()}
    covered = 0.0
    for family, found in ratios.items():
        others = [other for name, other in ratios.items() if name != family]
        covered += len(found) * _share(_quantiles(others or [found]), found)
    return Interval(*_quantiles(list(ratios.values())), covered / len(outcomes))


def _ratios(outcomes: Iterable[Outcome], calibrated: bool) -> list[float]:
    """Measured times over predicted ones."""
    return [one.measured / (one.planner if calibrated else one.uncalibrated) for one in outcomes]


def _share(limits: tuple[float, float], ratios: Sequence[float]) -> float:
    """Of ratios that are within limits."""
    return sum(limits[0] <= ratio <= limits[1] for ratio in ratios) / len(ratios)


def _quantiles(sources: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The ratios below which are 5 % and 95 % of the weight."""
    weighed = sorted((ratio, len(ratios) ** -0.5) for ratios in sources for ratio in ratios)
    sums = list(itertools.accumulate(weight for _, weight in weighed))
    low, high = (bisect.bisect_left(sums, share * sums[-1]) for share in (0.05, 0.95))
    return weighed[low][0], weighed[high][0]


# Printed


def print_scores(runs: list[Run], refused: dict[str, str]) -> None:
    """Print a line a source, and what they come to together."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)  # rather wrapped than cut
    outcomes, calibrations = judge(runs)
    names: tuple[str, ...] = (
        "runs",
        "MAPE",
        "constant",
        "bias",
        "Spearman",
        "constant",
        "groups",
        "regret",
        "fit",
        "false fit",
        "memory",
        "n",
    )
    table = Table("source", *(Column(name, justify="right") for name in names))
    families = list(dict.fromkeys(run.family for run in runs))
    for family in families:
        some = [run for run in runs if run.family == family]
        table.add_row(family, *cells([outcome for outcome in outcomes if outcome.run.family == family], some))
    table.add_section()
    for name, sweeps in (("tuned", False), ("sweeps", True)):
        some = [run for run in runs if run.source.sweep == sweeps]
        table.add_row(name, *cells([o for o in outcomes if o.run.source.sweep == sweeps], some))
    console.print(table)
    table = Table("memory", *(Column(name, justify="right") for name in ("runs", "error", "bias")))
    for family, metric, errors in memory_scores(runs):
        size = statistics.fmean(abs(error) for error in errors)
        table.add_row(f"{family} {metric}", str(len(errors)), f"{size:.1%}", f"{statistics.fmean(errors):+.1%}")
    console.print(table)
    table = Table("calibrated", "on", Column("scalar", justify="right"))
    for (family, device), found in calibrations.items():
        table.add_row(f"{family}, {device}", found.run, f"{found.scalar:.3f}")
    console.print(table)
    if outcomes:
        heads = ("from", "to", "coverage", "stated", "coverage")
        table = Table("90 % of measured times", *(Column(name, justify="right") for name in heads))
        for calibrated, stated in ((True, CALIBRATED), (False, UNCALIBRATED)):
            low, high, coverage = interval(outcomes, calibrated)
            table.add_row(
                "calibrated" if calibrated else "uncalibrated",
                *(f"x {low:.2f}", f"x {high:.2f}", f"{coverage:.0%}"),
                *(f"x {stated[0]} to {stated[1]}", f"{_share(stated, _ratios(outcomes, calibrated)):.0%}"),
            )
        console.print(table)
        names = ("to", "pairs", "faster one known")
        table = Table("predictions apart, from", *(Column(name, justify="right") for name in names))
        for low, high, pairs, right in order_by_difference(outcomes):
            table.add_row(f"{low:.0%}", f"{high:.0%}" if high < 1 else "", str(pairs), f"{right:.0%}")
        console.print(table)
    console.print(f"{len(runs)} runs read, {len(refused)} left out for what their lines say, or do not.")


def memory_scores(runs: Iterable[Run]) -> list[tuple[str, str, list[float]]]:
    """Errors by source and metric."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        for metric, error in memory_errors(run).items():
            found[run.family, metric].append(error)
    return [(*key, errors) for key, errors in found.items()]


def cells(outcomes: Sequence[Outcome], runs: Sequence[Run]) -> list[str]:
    """A line of the table."""
    fit = judge_fit(runs)
    errors = [error for *_, found in memory_scores(runs) for error in found]
    memory = [f"{statistics.fmean(abs(error) for error in errors):.1%}", str(len(errors))] if errors else ["", ""]
    right = [f"{fit.right / fit.runs:.1%}", f"{fit.false_fits / fit.runs:.1%}"] if fit.runs else ["", ""]
    if not outcomes:
        return ["0", "", "", "", "", "", "", "", *right, *memory]
    planner, constant = score(outcomes), score(outcomes, baseline=True)
    return [
        str(planner.runs),
        f"{planner.mape:.1%}",
        f"{constant.mape:.1%}",
        f"{planner.bias:+.1%}",
        *(["", ""] if planner.spearman is None else [f"{planner.spearman:.2f}", f"{constant.spearman:.2f}"]),
        str(planner.groups or ""),
        "" if planner.regret is None else f"{planner.regret:.1%}",
        *right,
        *memory,
    ]
