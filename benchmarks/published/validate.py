"""Accuracy of the planner on published runs.

The input is a CSV table with one metric per line; lines whose ids agree up to the first dot belong to one run
(docs/planner.md). The step time of a run is derived from the metric that gives it most directly.

Runs are grouped by source and device. One run per group calibrates it and is not scored. It is chosen by configuration only:
the run whose predicted time per model FLOP is the median of the group. Its measured / predicted step time, to the power of
`SHRINKAGE`, is the only scalar of the group.

The baseline predictor assumes the same time per model FLOP for all runs of a group, and is calibrated on the same run.
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
from weft.planner.search.alternatives import EQUAL

from .published import USABLE, PublishedRun, measured_seconds

WIDTH = 150  # minimum line width in characters
MAX_RATIO = 1.5  # limit of measured / predicted for calibration: a larger ratio is specific to the run, not the machine
# Shrinkage of log(measured / predicted) towards 0: its standard deviation is about 0.13 between machines and 0.16 between the
# runs of one machine.
SHRINKAGE = 0.4


class Score(NamedTuple):
    """Accuracy of predicted step times."""

    runs: int
    mape: float
    bias: float
    spearman: float | None
    """Mean rank correlation over groups of at least eight comparable runs; None without such a group."""
    groups: int
    """Number of these groups."""
    regret: float | None
    """Mean slowdown of the layout that is predicted to be the fastest, relative to the fastest layout of a group."""


def predicted_seconds(run: PublishedRun) -> float:
    """Predicted step time before calibration."""
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


def memory_errors(run: PublishedRun) -> dict[str, float]:
    """Relative errors of the predicted memory by metric, each on the pipeline stage with the most bytes of that metric."""
    stages = [stage_memory(run.shape, run.layout, run.stack, rank) for rank in range(run.layout.pp)]
    return {
        name: max(getattr(memory, part) for memory in stages) / (run.metrics[name] * unit) - 1
        for name, (part, unit) in MEMORY_METRICS.items()
        if run.metrics.get(name)
    }


class ScoredRun(NamedTuple):
    """Measured and predicted step times of a scored run."""

    run: PublishedRun
    measured: float
    uncalibrated: float
    """Prediction of the planner before calibration."""
    planner: float
    """Prediction of the planner after calibration."""
    baseline: float
    """Prediction of the baseline: constant time per model FLOP."""

    @property
    def error(self) -> float:
        """Relative error of the planner."""
        return self.planner / self.measured - 1


@dataclass(frozen=True)
class Calibration:
    """Calibration run and scalar of a group."""

    run: str
    scalar: float


def judge(runs: Iterable[PublishedRun]) -> tuple[list[ScoredRun], dict[tuple[str, str], Calibration]]:
    """Predict all runs with a measured step time; each group is calibrated on one of its runs, which is not scored."""
    groups: dict[tuple[str, str], list[tuple[PublishedRun, float, float]]] = defaultdict(list)
    for run in runs:
        seconds = measured_seconds(run)
        if seconds:
            groups[run.group].append((run, seconds, predicted_seconds(run)))
    outcomes, calibrations = [], {}
    for group, found in groups.items():
        chosen, seconds, predicted = sorted(
            found, key=lambda item: (item[2] * item[0].num_devices / item[0].model_flops, item[0].id)
        )[len(found) // 2]
        scalar = min(max(seconds / predicted, 1 / MAX_RATIO), MAX_RATIO) ** SHRINKAGE
        rate = seconds * chosen.num_devices / chosen.model_flops
        calibrations[group] = Calibration(chosen.id, scalar)
        outcomes += [
            ScoredRun(run, measured, guess, guess * scalar, rate * run.model_flops / run.num_devices)
            for run, measured, guess in found
            if run is not chosen
        ]
    return outcomes, calibrations


def score(outcomes: Sequence[ScoredRun], baseline: bool = False) -> Score:
    """Score the planner, or the baseline, on some outcomes."""
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


def comparable(outcomes: Sequence[ScoredRun], guesses: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Predicted and measured seconds per token, in groups of the same source, model, sequence length and devices."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for guess, (run, measured, *_) in zip(guesses, outcomes, strict=True):
        tokens = run.layout.global_batch * run.layout.seq
        key = run.family, run.model, run.layout.seq, run.num_devices, run.cluster.device.name
        groups[key].append((guess / tokens, measured / tokens))
    return list(groups.values())


class PairAccuracy(NamedTuple):
    """Accuracy of the predicted order of two runs."""

    low: float
    high: float
    """Range of the relative difference of the two predictions."""
    pairs: int
    right: float
    """Share of pairs whose faster run is predicted to be the faster one."""


def order_by_difference(outcomes: Sequence[ScoredRun]) -> list[PairAccuracy]:
    """Accuracy of the predicted order of comparable runs, by the relative difference of their predictions.

    The ranges end at `EQUAL`, 2 x `EQUAL`, 4 x `EQUAL` and infinity.
    """
    found: list[tuple[float, bool]] = []
    for group in comparable(outcomes, [outcome.planner for outcome in outcomes]):
        for (guess, measured), (other, seen) in itertools.combinations(group, 2):
            found.append((max(guess, other) / min(guess, other) - 1, (guess < other) == (measured < seen)))
    limits = (0.0, EQUAL, 2 * EQUAL, 4 * EQUAL, float("inf"))
    orders = []
    for low, high in itertools.pairwise(limits):
        right = [agrees for difference, agrees in found if low <= difference < high]
        if right:
            orders.append(PairAccuracy(low, high, len(right), sum(right) / len(right)))
    return orders


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman rank correlation; equal values get their mean rank. 0 if all values of one side are equal."""
    a, b = _ranks(one), _ranks(other)
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(a, b)


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


class FitAccuracy(NamedTuple):
    """Accuracy of the prediction that a run fits into memory."""

    right: int
    false_fits: int
    """Runs that were predicted to fit but did not."""
    false_refusals: int
    """Runs that were predicted not to fit but did."""

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(self)


def judge_fit(runs: Iterable[PublishedRun]) -> FitAccuracy:
    """Score the prediction that runs fit into memory; a run without the metric `fits` fitted if it has a step time."""
    right = false_fits = refusals = 0
    for run in runs:
        fitted = run.metrics.get("fits", 1.0) > 0
        if run.guessed or ("fits" not in run.metrics and measured_seconds(run) is None):
            continue
        fits = peak_memory(run.shape, run.layout, run.stack).total <= USABLE * run.cluster.device.memory
        right += fits == fitted
        false_fits += fits and not fitted
        refusals += fitted and not fits
    return FitAccuracy(right, false_fits, refusals)


class Interval(NamedTuple):
    """90 % interval of measured / predicted step time."""

    low: float
    high: float
    coverage: float
    """Share of runs within the interval computed from all other sources (leave-one-source-out)."""


def interval(outcomes: Sequence[ScoredRun], calibrated: bool) -> Interval:
    """90 % interval of measured / predicted step time.

    The weight of a source is the square root of its number of runs, so that a long sweep does not dominate.
    """
    sources: dict[str, list[ScoredRun]] = defaultdict(list)
    for outcome in outcomes:
        sources[outcome.run.family].append(outcome)
    ratios = {family: _ratios(some, calibrated) for family, some in sources.items()}
    covered = 0.0
    for family, found in ratios.items():
        others = [other for name, other in ratios.items() if name != family]
        covered += len(found) * _share(_quantiles(others or [found]), found)
    return Interval(*_quantiles(list(ratios.values())), covered / len(outcomes))


def _ratios(outcomes: Iterable[ScoredRun], calibrated: bool) -> list[float]:
    """Ratios of measured to predicted step time."""
    return [one.measured / (one.planner if calibrated else one.uncalibrated) for one in outcomes]


def _share(limits: tuple[float, float], ratios: Sequence[float]) -> float:
    """Share of ratios within limits."""
    return sum(limits[0] <= ratio <= limits[1] for ratio in ratios) / len(ratios)


def _quantiles(sources: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Weighted 5 % and 95 % quantiles of the ratios."""
    weighed = sorted((ratio, len(ratios) ** -0.5) for ratios in sources for ratio in ratios)
    sums = list(itertools.accumulate(weight for _, weight in weighed))
    low, high = (bisect.bisect_left(sums, share * sums[-1]) for share in (0.05, 0.95))
    return weighed[low][0], weighed[high][0]


# Output


def print_scores(runs: list[PublishedRun], refused: dict[str, str]) -> None:
    """Print one table row per source, the totals, memory errors, calibration scalars and intervals."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
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
    console.print(f"{len(runs)} runs read, {len(refused)} runs skipped because their lines are incomplete or invalid.")


def memory_scores(runs: Iterable[PublishedRun]) -> list[tuple[str, str, list[float]]]:
    """Relative memory errors by source and metric."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        for metric, error in memory_errors(run).items():
            found[run.family, metric].append(error)
    return [(*key, errors) for key, errors in found.items()]


def cells(outcomes: Sequence[ScoredRun], runs: Sequence[PublishedRun]) -> list[str]:
    """Cells of a table row."""
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
