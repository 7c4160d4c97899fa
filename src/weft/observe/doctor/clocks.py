"""Clocks: offset and drift of each host against host 0, by the exchange of NTP (RFC 5905) over the store of host 0."""

import time
from collections.abc import Sequence
from typing import Protocol

from weft.observe.doctor.finding import Facts, Finding, group, label, summarize

EXCHANGES = 16
RED_SECONDS, YELLOW_SECONDS = 1.0, 0.05
RED_DRIFT, YELLOW_DRIFT = 1e-3, 1e-4  # seconds a second; a healthy quartz has 1e-5 to 5e-5
MIN_DRIFT_SECONDS = 1.0  # between the two measurements
FIX = "start an NTP client (chronyd, systemd-timesyncd) on all hosts, with the same servers"


class HasClock(Protocol):
    """Store that tells the clock of host 0."""

    def server_time(self) -> float:
        """Clock of host 0 in seconds since 1970."""


def measure_clock(store: HasClock) -> dict[str, float]:
    """Measure the offset of the clock of this host against host 0.

    The exchange with the shortest round trip counts. The clock of host 0 was read within it, so that the error is at most half
    of the round trip.

    Returns:
        offset_seconds: this host minus host 0.
        error_seconds: bound of its error.
        monotonic_seconds: time of the exchange by the monotonic clock of this host.
    """
    best: dict[str, float] = {}
    for _ in range(EXCHANGES):
        begin, start = time.time(), time.monotonic()
        there = store.server_time()
        error = (time.monotonic() - start) / 2
        if not best or error < best["error_seconds"]:
            best = {
                "offset_seconds": begin + error - there,
                "error_seconds": error,
                "monotonic_seconds": start + error,
            }
    return best


def judge_clocks(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: a clock is off by more than 1 s, or drifts by more than 1000 ppm; yellow: 50 ms, or 100 ppm.

    Facts: "clock" of `measure_clock` at the start, "clock_late" of a second measurement. Differences within the error are no
    finding.
    """
    findings, examined = [], []
    worst = 0.0
    for facts in hosts[1:]:
        clock, late = group(facts, "clock"), group(facts, "clock_late")
        if clock is None:
            continue
        examined.append(facts)
        off, error = clock["offset_seconds"], clock["error_seconds"]
        worst = max(worst, abs(off) + error)
        if (certain := abs(off) - error) > YELLOW_SECONDS:
            side = "ahead of" if off > 0 else "behind"
            text = f"{label(facts)} is {abs(off):.3g} s {side} host 0 (error at most {error:.1g} s)"
            findings.append(Finding("red" if certain > RED_SECONDS else "yellow", "clock", text, FIX))
        if late is None:
            continue
        seconds = late["monotonic_seconds"] - clock["monotonic_seconds"]
        if seconds < MIN_DRIFT_SECONDS:
            continue
        drift = (late["offset_seconds"] - off) / seconds
        error = (late["error_seconds"] + error) / seconds
        if (certain := abs(drift) - error) > YELLOW_DRIFT:
            text = (
                f"{label(facts)} drifts by {drift * 1e6:.0f} ppm against host 0 (error at most {error * 1e6:.0f} ppm)"
            )
            findings.append(Finding("red" if certain > RED_DRIFT else "yellow", "clock drift", text, FIX))
    return summarize("clock", findings, examined, f"all clocks are within {worst:.2g} s of host 0, error included")
