"""Diagnosis of a run that is slower than it should be: step time by term, expected and measured, and at most one culprit.

    found = diagnose(Path("runs/first"))
    found.verdict            # None: healthy, or slower without evidence against one part of the run

The evidence is what the ranks recorded (`weft.training.rank_times`). A rank that is slow waits less than others do. Where a
link is slow all ranks of its axis wait, also the one that comes last. A culprit is accused where its own seconds rose, compared
with those of its peers, by `MIN_SHARE` of a healthy step, and the step became longer with them. What makes all ranks slower
alike, such as other programs on a machine that all of them share, accuses nobody.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from weft.observe.rank_timeline import Phase, Timeline, find_phase, read_timeline
from weft.observe.record import read_run
from weft.observe.slow_links import ends_of, pair_rates, pairs_below_others, slow_pairs
from weft.plan import Prediction

MIN_SHARE = 0.15  # of a healthy step: smallest rise of a culprit
START_SHARE = 0.25  # the same for what was slow from the start
START_FACTOR = 1.35  # compute time of a rank over that of its peers, from the start
SUSPECTS = 8  # ranks whose series are searched for each term: those whose times vary most


@dataclass(frozen=True)
class Term:
    """Seconds per step of one part of a step."""

    name: str
    expected: float | None
    """Prediction of the planner, or the median of the healthy steps; None if neither is known."""
    measured: float
    """Median since the step that the verdict names; without a verdict, of the second half of the run."""
    since: int | None = None
    """First step of a clear rise."""


@dataclass(frozen=True)
class Verdict:
    """The part of a run that makes it slow."""

    kind: str
    """link, communication, rank, cores, data, checkpoint, or outside (time between steps)."""
    text: str
    hosts: tuple[int, ...]
    """Hosts at fault; both ends of a link."""
    ranks: tuple[int, ...]
    """Ranks at fault; empty if it is not a rank."""
    since: int
    """First step; 1: from the start."""
    until: int | None
    """Last step; None: to the last recorded one."""
    seconds: float
    """Seconds per step that it costs."""
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose`."""

    headline: str
    verdict: Verdict | None
    terms: list[Term]
    source: str
    """Source of the expected times."""
    notes: list[str] = field(default_factory=list)


def diagnose(folder: Path) -> Diagnosis:
    """Diagnose the run of a folder, also while it is running.

    Raises:
        DataError: the folder does not exist, is damaged, or has too few recorded steps.
    """
    run = read_run(folder)
    predicted = run.job.plan.prediction if run.job else None
    if run.job and predicted and predicted.micro_batch != run.job.train.micro_batch_size:
        predicted = None
    return judge(read_timeline(folder), predicted)


def judge(timeline: Timeline, predicted: Prediction | None = None) -> Diagnosis:
    """Diagnose recorded times.

    Args:
        timeline: times of all ranks.
        predicted: prediction of the planner for this run; None: the run is compared with its own healthy steps.
    """
    whole = find_phase(timeline.step)
    suspects = list(_suspects(timeline)) or list(_from_start(timeline))
    suspect = max(suspects, key=lambda one: one.weight, default=None)
    verdict = _verdict(timeline, suspect) if suspect else None
    terms, source = _terms(timeline, suspect.phase if suspect else whole, predicted)
    step = terms[-1]
    share = step.expected / step.measured if predicted and step.expected else 1.0
    if verdict and not predicted:
        share = 1 - verdict.seconds / step.measured
    speed = f"speed is {min(max(share, 0), 1):.0%} of expected"
    notes = []
    if verdict is None and whole is not None and whole.rise > MIN_SHARE * whole.before:
        since, ratio = timeline.steps[whole.start], whole.inside / whole.before
        notes.append(
            f"steps take {ratio:.2f} x as long since step {since}, on all ranks alike: the machine as a whole is slower, or "
            "steps have more work; no rank, link or file is to blame by the times of the ranks"
        )
    if predicted and share < 1 - MIN_SHARE and verdict is None:
        notes.append(f"{speed}; the terms above show where. Nothing became slower during the run")
    return Diagnosis(f"{speed}: {verdict.text}" if verdict else "healthy", verdict, terms, source, notes)


@dataclass(frozen=True)
class Suspect:
    """Series of seconds that rose, and the part of the run that it belongs to."""

    kind: str
    phase: Phase
    seconds: float
    """Rise in seconds per step."""
    ranks: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    axis: str = ""
    evidence: tuple[str, ...] = ()
    weight: float = 0.0


def _suspects(timeline: Timeline) -> Iterator[Suspect]:
    """Parts of the run that became slower."""
    own = [*_slow_ranks(timeline), *_slow_cores(timeline), *_slow_checkpoints(timeline)]
    yield from own
    yield from _slow_links(timeline, max((suspect.seconds for suspect in own), default=0.0))


def _matters(timeline: Timeline, phase: Phase, seconds: float) -> bool:
    """True if the seconds are more than `MIN_SHARE` of a healthy step."""
    parts = slice(phase.start), slice(phase.start, phase.end)  # a machine may have been busier before
    return seconds > MIN_SHARE * min(float(np.median(timeline.step[part])) for part in parts)


def _delays(timeline: Timeline, phase: Phase, seconds: float) -> bool:
    """True if the seconds matter, and the step became longer with them."""
    return _matters(timeline, phase, seconds) and _median_rise(timeline.running_step, phase) > 0.2 * seconds


def _slow_ranks(timeline: Timeline) -> Iterator[Suspect]:
    """Ranks that compute, wait for data, or are busy between steps for longer than before; others wait for them."""
    peers, hosts = _peers(timeline), [place.host for place in timeline.places]
    # Other programs on the cores of a rank are not its fault. The net times show a rank that they hide; but they also lack the
    # time in which the rank waited for a core within messages, so that the full times are searched, too.
    net = timeline.compute - timeline.queued
    terms = (timeline.compute, "rank"), (net, "rank"), (timeline.data, "data"), (timeline.outside, "outside")
    for series, kind in terms:
        found: list[Suspect] = []
        spread = np.percentile(series, 90, axis=1) - np.percentile(series, 10, axis=1)
        for rank in np.argsort(-spread)[:SUSPECTS]:
            others = np.median(series[peers[rank]], axis=0) if peers[rank] and kind != "data" else 0 * series[rank]
            phase = find_phase(series[rank] - others)
            if phase is None:
                continue
            before, inside = slice(0, phase.start), slice(phase.start, phase.end)
            # What makes the peers slower as well counts in proportion.
            full = series is terms[0][0]
            factor = _ratio(np.median(series[rank, before]), np.median(others[before])) if full else 1.0
            own = float(np.median(series[rank, inside] - factor * others[inside]))
            seconds = own - float(np.median(series[rank, before] - factor * others[before]))
            if full and peers[rank]:
                more = net[rank] - np.median(net[peers[rank]], axis=0)
                seconds = seconds if _median_rise(more, phase) > seconds / 3 else 0.0
            if _delays(timeline, phase, seconds):
                shown = timeline.compute if kind == "rank" else series
                text = f"rank {rank}: {_ms(np.median(shown[rank, before]))} -> {_ms(np.median(shown[rank, inside]))} a step"
                if peers[rank]:
                    theirs = np.median(shown[peers[rank]], axis=0)
                    text += f"; its peers {_ms(np.median(theirs[before]))} -> {_ms(np.median(theirs[inside]))}"
                found.append(Suspect(kind, phase, seconds, (int(rank),), (hosts[rank],), "", (text,), seconds))
        if found:
            worst = max(found, key=lambda one: one.seconds)
            together = [one for one in found if one.seconds > worst.seconds / 2]
            evidence = tuple(one.evidence[0] for one in together) + _wait_evidence(timeline, worst)
            ranks = tuple(sorted(rank for one in together for rank in one.ranks))
            at = _unique(hosts[rank] for rank in ranks)
            yield Suspect(kind, worst.phase, worst.seconds, ranks, at, "", evidence, worst.seconds)


def _wait_evidence(timeline: Timeline, suspect: Suspect) -> tuple[str, ...]:
    """Sentence about the wait of the ranks at fault and of the others."""
    start, end = suspect.phase.start, suspect.phase.end
    rise = np.median(timeline.waited[:, start:end], axis=1) - np.median(timeline.waited[:, :start], axis=1)
    others = [value for rank, value in enumerate(rise) if rank not in suspect.ranks]
    if not others:
        return ()
    own = float(np.median(rise[list(suspect.ranks)]))
    return (f"the other ranks wait {_ms(median(others))} more a step for messages, the accused {_ms(own)}",)


def _slow_cores(timeline: Timeline) -> Iterator[Suspect]:
    """Hosts, or parts of them, whose ranks wait for cores. Ranks that share their cores are not told apart."""
    cores = [place.cores for place in timeline.places]
    sets = {key: [rank for rank, other in enumerate(cores) if other == key] for key in dict.fromkeys(cores) if key}
    if len(sets) < 2:
        return
    queued = {key: np.median(timeline.queued[ranks], axis=0) for key, ranks in sets.items()}
    for key, series in queued.items():
        others = np.median([other for name, other in queued.items() if name != key], axis=0)
        phase = find_phase(series - others)
        if phase and _matters(timeline, phase, phase.rise):
            ranks = tuple(sets[key])
            text = f"the ranks there wait {_ms(phase.inside)} a step longer for a core than those of other cores"
            hosts = _unique(timeline.places[rank].host for rank in ranks)
            yield Suspect("cores", phase, phase.rise, ranks, hosts, "", (text,), phase.rise)


def _slow_checkpoints(timeline: Timeline) -> Iterator[Suspect]:
    """Checkpoints that block training for longer than before."""
    blocked = timeline.checkpoint.max(axis=0)
    bins = np.flatnonzero(blocked)
    events = find_phase(blocked[bins])
    if events is None:
        return
    start = int(bins[events.start])
    end = int(bins[events.end]) if events.end < len(bins) else len(blocked)
    seconds = float(blocked[start:end].mean() - blocked[:start].mean())
    width = int(np.median(np.diff(timeline.steps)))
    text = (
        f"a checkpoint blocks training for {events.before * width:.2g} s before and {events.inside * width:.2g} s since"
    )
    healthy = float(np.median(timeline.step[:start]))
    if seconds > MIN_SHARE * healthy:
        phase = Phase(start, end, float(blocked[:start].mean()), float(blocked[start:end].mean()))
        yield Suspect("checkpoint", phase, seconds, evidence=(text,), weight=seconds)


def _slow_links(timeline: Timeline, explained: float) -> Iterator[Suspect]:
    """Links that became slower, by the wait that even the last rank has, and by re-measured rates.

    Args:
        timeline: times of all ranks.
        explained: seconds per step that a slow rank explains; its messages are slow, too.
    """
    waited = timeline.waited.min(axis=0)
    least = waited - np.median(timeline.queued, axis=0)  # a rank that waits for a core is waited for, too
    phase = find_phase(least)
    if phase is None or explained > phase.rise / 2 or not _matters(timeline, phase, phase.rise):
        return
    start, end = phase.start, phase.end
    rises = {where: _median_rise(wait.min(axis=0), phase) for where, wait in timeline.wait.items()}
    axis = max(rises, key=lambda where: rises[where])
    old, new = float(np.median(waited[:start])), float(np.median(waited[start:end]))
    text = f"every rank waits for messages of {axis}, also the last one: {_ms(old)} -> {_ms(new)} a step"
    if timeline.links:
        slow = slow_pairs(timeline, phase)
        if slow:
            yield Suspect("link", phase, phase.rise, (), ends_of(slow), axis, (text, *slow.values()), phase.rise)
        return
    compute = np.median(timeline.compute, axis=0)
    growth = _ratio(np.median(compute[start:end]), np.median(compute[:start])) - 1
    if phase.rise > START_SHARE * np.median(timeline.step[:start]) and growth < 0.5 * (_ratio(new, old) - 1):
        yield Suspect("communication", phase, phase.rise, (), (), axis, (text,), phase.rise)


def _from_start(timeline: Timeline) -> Iterator[Suspect]:
    """Parts of the run that were slow from the start, beside their peers."""
    step, peers = float(np.median(timeline.step)), _peers(timeline)
    everything = Phase(0, len(timeline.steps), 0.0, 0.0)
    hosts = [place.host for place in timeline.places]
    compute = timeline.compute
    alone = compute - np.minimum(timeline.queued, compute)
    for rank in range(len(hosts)):
        theirs = np.median(compute[peers[rank]], axis=0) if peers[rank] else compute[rank]
        more = float(np.median(compute[rank] - theirs))
        net = float(np.median(alone[rank]) - np.median(alone[peers[rank]])) if peers[rank] else 0.0
        slower = (compute[rank] > START_FACTOR * theirs).mean() > 0.9
        if slower and more > START_SHARE * step and net > more / 2:
            text = f"rank {rank} computes {_ms(np.median(compute[rank]))} a step, its peers {_ms(np.median(theirs))}"
            yield Suspect("rank", everything, more, (rank,), (hosts[rank],), "", (text,), more)
        wait = float(np.median(timeline.data[rank]))
        if wait > START_SHARE * step:
            text = f"rank {rank} waits {_ms(wait)} a step for its rows"
            yield Suspect("data", everything, wait, (rank,), (hosts[rank],), "", (text,), wait)
    blocked = float(timeline.checkpoint.max(axis=0).mean())
    if blocked > START_SHARE * step:
        text = f"checkpoints block training for {_ms(blocked)} a step on average"
        yield Suspect("checkpoint", everything, blocked, evidence=(text,), weight=blocked)
    least = float(np.median(timeline.waited.min(axis=0)))
    measured = [pair_rates(line.rates) for line in timeline.links]
    if len(measured) > 1 and len(measured[0]) > 2 and least > START_SHARE * step:
        slow = pairs_below_others(measured)
        if slow:
            axis = max(timeline.wait, key=lambda where: float(np.median(timeline.wait[where].min(axis=0))))
            yield Suspect("link", everything, least, (), ends_of(slow), axis, tuple(slow.values()), least)


def _verdict(timeline: Timeline, suspect: Suspect) -> Verdict:
    phase = suspect.phase
    since = int(timeline.steps[phase.start]) if phase.start else 1
    until = int(timeline.steps[phase.end]) - 1 if phase.end < len(timeline.steps) else None
    names = {place.host: f"host {place.host} ({place.name})" for place in timeline.places}
    hosts = [names[host] for host in suspect.hosts]
    who = f"{'ranks' if len(suspect.ranks) > 1 else 'rank'} {', '.join(map(str, suspect.ranks))} on {', '.join(hosts)}"
    if suspect.kind == "link":
        where = f"link {' - '.join(hosts)}" if len(hosts) == 2 else f"links of {', '.join(hosts)}"
    texts = {
        "link": lambda: f"{where} {suspect.evidence[-1].partition(': ')[2]} ({suspect.axis})",
        "communication": lambda: f"messages of {suspect.axis} take {_ms(suspect.seconds)} more a step",
        "rank": lambda: f"{who} computes {_ms(suspect.seconds)} a step longer than its peers",
        "data": lambda: f"{who} waits {_ms(suspect.seconds)} a step for its rows: the data source is slow",
        "cores": lambda: f"{who} waits {_ms(suspect.seconds)} a step for a core: other programs use the cores",
        "checkpoint": lambda: f"checkpoints cost {_ms(suspect.seconds)} a step: the storage is slow",
        "outside": lambda: f"{who} spends {_ms(suspect.seconds)} a step more between steps: callbacks, checks, metrics",
    }
    span = f"since step {since}" if until is None else f"from step {since} to {until}"
    text = f"{texts[suspect.kind]()}, {span if phase.start else 'since the start'}"
    return Verdict(suspect.kind, text, suspect.hosts, suspect.ranks, since, until, suspect.seconds, suspect.evidence)


def _terms(timeline: Timeline, phase: Phase | None, predicted: Prediction | None) -> tuple[list[Term], str]:
    """Step time by term, of a rank that is like most others; the last term is the step."""
    half = len(timeline.steps) // 2
    before = slice(0, phase.start) if phase and phase.start else None
    inside = slice(phase.start, phase.end) if phase and phase.start else slice(half, None)
    series = {"compute": np.median(timeline.compute, axis=0)}
    for where, wait in timeline.wait.items():
        series[f"exposed communication of {where}"] = wait.min(axis=0)
    series |= {"data": timeline.data.max(axis=0), "checkpoint": timeline.checkpoint.max(axis=0)}
    series["outside of steps"] = np.median(timeline.outside, axis=0)
    series["stragglers, bubbles"] = np.maximum(timeline.step - sum(series.values(), np.zeros(len(timeline.steps))), 0.0)
    series["step"] = timeline.step
    given, source = (
        dict[str, float](),
        "the healthy steps of this run" if before else "nothing: no healthy phase is known",
    )
    if predicted:
        source = f"the plan's prediction for {predicted.cluster}"
        axes = [name for name in predicted.terms if name not in ("compute", "pipeline", "optimizer")]
        given = {"compute": predicted.terms.get("compute", 0.0) + predicted.terms.get("optimizer", 0.0)}
        given |= {"stragglers, bubbles": predicted.terms.get("pipeline", 0.0), "step": predicted.step_seconds}
        given |= {f"exposed communication ({name})": predicted.terms[name] for name in axes if predicted.terms[name]}
    terms = []
    summary: Callable[[np.ndarray], np.floating] = np.median
    for name, values in series.items():
        usual = np.mean if name == "checkpoint" else summary
        own = find_phase(values)
        rose = own is not None and own.rise > 0.05 * float(np.median(timeline.step))
        expected = given.get(name) if predicted else float(usual(values[before])) if before else None
        since = int(timeline.steps[own.start]) if own is not None and rose else None
        terms.append(Term(name, expected, float(usual(values[inside])), since))
    predicted_axes = [Term(name, value, float("nan")) for name, value in given.items() if name not in series]
    return [*terms[:-1], *predicted_axes, terms[-1]], source


def _peers(timeline: Timeline) -> list[list[int]]:
    """Other ranks of the same pipeline stage, by rank; all other ranks if there are none."""
    stages, everyone = [place.stage for place in timeline.places], range(len(timeline.places))
    same = [[other for other in everyone if other != rank and stages[other] == stages[rank]] for rank in everyone]
    return [own or [other for other in everyone if other != rank] for rank, own in enumerate(same)]


def _median_rise(series: np.ndarray, phase: Phase) -> float:
    return float(np.median(series[phase.start : phase.end]) - np.median(series[: phase.start]))


def _ratio(value: float, other: float) -> float:
    return float(value / other) if other > 0 else 1.0


def _unique(hosts: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(hosts))


def _ms(seconds: float) -> str:
    return f"{1e3 * float(seconds):,.0f} ms" if seconds < 10 else f"{float(seconds):,.1f} s"
