"""Summary of a profile: verdicts, terms, collectives, operators, gaps, memory and cost; written as summary.json."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.observe.profile.intervals import intersect, subtract, total, union
from weft.observe.profile.operators import top_operators
from weft.observe.profile.ranks import SLOT, RankProfile
from weft.observe.profile.terms import COMMUNICATION, COMPUTATION, PIPELINE, StepTerms, claims, gaps, step_terms
from weft.parallel.pipeline.schedule import ACTION, JOINT_CELL
from weft.training.metrics import read_metrics

FILE = "summary.json"
MOST_OPERATORS, MOST_GAPS = 40, 12
KERNEL_USE, EXPOSED, TRAFFIC = 0.85, 0.15, 0.90
"""Bounds of the three verdicts: at least, at most, at least."""


class Verdict(NamedTuple):
    """One of the three numbers of a profile, and its bound."""

    name: str
    value: float | None
    """Share; None if it is unknown."""
    passed: bool | None
    text: str
    """Bound and source of the value."""


def summarize(profiles: Sequence[RankProfile], run: Path) -> dict[str, Any]:
    """Summary of the profiles of all ranks of a run; times are seconds per step, as a mean over ranks and steps.

    Args:
        profiles: at least one rank.
        run: run folder; without its metrics the cost of the profile is unknown.
    """
    first = profiles[0].record
    by_rank = {profile.rank: step_terms(profile) for profile in profiles}
    return {
        "work": first["work"],
        "plan": first["plan"],
        "device": first["device"],
        "world_size": first["world_size"],
        "flops_per_token": first["flops_per_token"],
        "rates": first["rates"],
        "clock_error": max(profile.record["clock"]["error"] for profile in profiles),
        "steps": [step for step, _, _ in profiles[0].steps],
        "seconds": statistics.fmean(step.seconds for steps in by_rank.values() for step in steps),
        "terms": _mean_terms([step for steps in by_rank.values() for step in steps]),
        "ranks": [_rank(profile, by_rank[profile.rank]) for profile in profiles],
        "collectives": collective_rows(profiles),
        "operators": [operator._asdict() for operator in top_operators(profiles)[:MOST_OPERATORS]],
        "gaps": [gap._asdict() for gap in _longest_gaps(profiles)],
        "pipeline": _pipeline(profiles),
        "memory": first["memory"],
        "cache": first["cache"],
        "cost": cost_of(run, profiles),
    }


def _mean_terms(steps: Sequence[StepTerms]) -> dict[str, float]:
    names = dict.fromkeys(term for step in steps for term in step.terms)
    return {term: sum(step.terms.get(term, 0.0) for step in steps) / len(steps) for term in names}


def _rank(profile: RankProfile, steps: Sequence[StepTerms]) -> dict[str, Any]:
    return {
        "rank": profile.rank,
        "label": profile.label,
        "terms": _mean_terms(steps),
        "seconds": statistics.fmean(step.seconds for step in steps),
        "cpu_seconds": statistics.fmean(profile.record["cpu_seconds"]),
    }


def _longest_gaps(profiles: Sequence[RankProfile]) -> list[Any]:
    found = [gap for profile in profiles for gap in gaps(profile)[:MOST_GAPS]]
    return sorted(found, key=lambda gap: -gap.seconds)[:MOST_GAPS]


def collective_rows(profiles: Sequence[RankProfile]) -> list[dict[str, Any]]:
    """Collectives by axis and operation, per step and rank: calls, bytes sent, exposed and hidden seconds.

    A moment in which collectives of several kinds block a rank counts for each of them here, but once in the terms.
    """
    rows: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0.0))
    for profile in profiles:
        busy = claims(profile)[0][1]
        steps = union((start, end) for _, start, end in profile.steps)
        weight = 1 / (len(profiles) * max(len(profile.steps), 1))
        kinds: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for collective in profile.collectives:
            if steps and steps[0][0] <= collective.flight[0] < steps[-1][1]:
                kinds[collective.axis, collective.operation].append(collective)
        for kind, collectives in kinds.items():
            blocked = intersect(union(span for c in collectives for span in c.blocked), steps)
            row = rows[kind]
            row["calls"] += weight * len(collectives)
            row["bytes"] += weight * sum(c.bytes for c in collectives)
            row["exposed"] += weight * total(subtract(blocked, busy))
            row["hidden"] += weight * total(intersect(busy, union(c.flight for c in collectives)))
    found: list[dict[str, Any]] = [{"axis": axis, "operation": name, **row} for (axis, name), row in rows.items()]
    return sorted(found, key=lambda row: -row["exposed"])


COUNTS = "calls", "bytes", "exposed", "hidden"


def _pipeline(profiles: Sequence[RankProfile]) -> dict[str, Any] | None:
    """Measured slots of the first profiled step, and whether all steps ran the slots of the schedule; None without stages."""
    if not any(profile.record["slots"] for profile in profiles):
        return None
    zero = min(profile.steps[0][1] for profile in profiles)
    lanes, equal = {}, True
    for profile in profiles:
        for index, (_, start, end) in enumerate(profile.steps):
            slots = slots_of(profile, start, end)
            equal &= [text for text, _, _ in slots] == profile.record["slots"]
            if index == 0:
                lanes[profile.label] = [[text, low - zero, high - zero] for text, low, high in slots]
    return {"equals_schedule": equal, "slots": lanes}


def slots_of(profile: RankProfile, start: float, end: float) -> list[tuple[str, float, float]]:
    """(slot, start, end) of each computation of a pipeline between two moments; waits at its start are left out."""
    waits = sorted(span for c in profile.collectives if c.operation == "receive" for span in c.blocked)
    found = []
    for event in profile.events:
        text = event.name.removeprefix(SLOT)
        if event.category != "range" or text == event.name or not start <= event.start < end:
            continue
        if ACTION.fullmatch(text) or JOINT_CELL.fullmatch(text):
            waited = max((high for low, high in waits if event.start <= low and high <= event.end), default=event.start)
            found.append((text, waited, event.end))
    return found


def cost_of(run: Path, profiles: Sequence[RankProfile]) -> dict[str, float] | None:
    """Median seconds of the profiled and of the other steps of the same run, without its warm-up; None if unknown."""
    path, record = run / "metrics.jsonl", profiles[0].record
    rows = read_metrics(path) if path.exists() else []
    steps = {step for step, _, _ in profiles[0].steps}
    profiled = [row.step_seconds for row in rows if row.step in steps]
    plain = [row.step_seconds for row in rows if row.step not in steps and row.step >= record["first_plain_step"]]
    if not profiled or not plain:
        return None
    return {"profiled": statistics.median(profiled), "plain": statistics.median(plain), "plain_steps": len(plain)}


def verdicts(summary: dict[str, Any]) -> list[Verdict]:
    """Kernel use, exposed communication and memory traffic of a profile."""
    seconds, terms, cache = summary["seconds"], summary["terms"], summary["cache"]
    used = terms[COMPUTATION] / seconds
    exposed = sum(value for term, value in terms.items() if term.startswith(COMMUNICATION)) / seconds
    waited = terms.get(PIPELINE, 0.0) / seconds
    bubble = f"; {waited:.1%} more in waits for other stages" if waited else ""
    return [
        Verdict("Kernel use", used, used >= KERNEL_USE, f"of the step, goal {KERNEL_USE:.0%} or more"),
        Verdict("Exposed communication", exposed, exposed <= EXPOSED, f"goal {EXPOSED:.0%} or less{bubble}"),
        _traffic(cache, len(summary["steps"])),
    ]


def _traffic(cache: dict[str, Any], steps: int) -> Verdict:
    """Compulsory bytes as a share of the bytes from memory: counted by the processor, else by the model."""
    name, goal = "Compulsory traffic", f"of the bytes from memory, goal {TRAFFIC:.0%} or more"
    if not cache["compulsory"]:
        return Verdict(name, None, None, "the size of the cache is unknown")
    if cache["counted_bytes"]:
        share = cache["compulsory"] * steps / cache["counted_bytes"]
        hits = 1 - cache["misses"] / max(cache["references"], 1)
        return Verdict(name, share, share >= TRAFFIC, f"{goal}; perf counters, {hits:.1%} cache hits")
    share = cache["compulsory"] / max(cache["fetched"], 1)
    return Verdict(name, share, share >= TRAFFIC, f"{goal}; by the LRU model of a cache")
