"""Closed-form bubble time and peak activations of the named schedules, with which timelines are compared."""

from collections.abc import Callable

from weft.errors import PlanError
from weft.parallel.pipeline.schedule import WHERE
from weft.parallel.pipeline.schedules import rounds


def bubble_formula(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int,
    forward: float,
    backward: float,
    weight: float = 0,
    joint: float | None = None,
) -> float:
    """Idle seconds per step of the rank that idles most, for even stages and free communication.

    All times are per micro-batch and rank, summed over the stages of the rank. Symbols: p ranks, m micro-batches, v stages per
    rank, forward F, full backward B, its weight part W (I = B - W), joint forward and backward J. Each entry says where the
    formula equals `simulate` exactly; elsewhere it is an estimate.

    - gpipe, 1f1b: (p - 1) (F + B). Always exact. Narayanan et al., SC21, section 2.2.1.
    - interleaved, and interleaved-overlap with J = F + B: (p - 1) (F + B) / v, plus (v - 1) (p - m) (F + B) / v below p
      micro-batches. Always exact, also for rounds of uneven size. SC21, section 2.2.2.
    - zb-h1: (p - 1) (F + B - 2 W), or (p - 1) (F + B - W) - (m - 1) W below p micro-batches. Exact for W <= F and W <= I.
      Qi et al., Zero Bubble, 2023, table 2 (where B is our I) and appendix H.
    - zb-h2: (p - 1) (F + B - 3 W), relative to `Timeline.longest_span` instead of the makespan: the cost of a step if ranks
      need not start together. Exact for m >= 2 p - 1, W <= F and W <= I. Qi et al., table 2.
    - dualpipev: (p - 1) (J + B - 3 W) / 2. Exact for F = I, W <= F and B <= J <= F + B; ranks idle unevenly, the last rank
      most. DeepSeek, DualPipe, README, where PP = 2 p stages and times are per stage.

    Args:
        name: schedule name.
        num_ranks: p.
        num_micro_batches: m.
        virtual_stages: v.
        forward: F.
        backward: B, the full backward.
        weight: W, the part of B that `W` actions run; used by zb-h1, zb-h2 and dualpipev.
        joint: J, the time of a joint slot, summed over v; None: F + B.

    Raises:
        PlanError: no formula exists for the schedule.
    """
    p, m, v = num_ranks, num_micro_batches, virtual_stages
    both = forward + backward
    formulas: dict[str, Callable[[], float]] = {
        "gpipe": lambda: (p - 1) * both,
        "1f1b": lambda: (p - 1) * both,
        "interleaved": lambda: (p - 1 + (v - 1) * max(0, p - m)) * both / v,
        "interleaved-overlap": lambda: (p - 1 + (v - 1) * max(0, p - m)) * both / v,
        "zb-h1": lambda: (p - 1) * (both - weight) - (min(m, p) - 1) * weight,
        "zb-h2": lambda: (p - 1) * (both - 3 * weight),
        "dualpipev": lambda: (p - 1) * ((both if joint is None else joint) + backward - 3 * weight) / 2,
    }
    if name not in formulas:
        raise _no_formula(name, "bubble", formulas)
    return formulas[name]()


def max_in_flight_formula(name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> int:
    """Peak activations of any rank, in micro-batches of one stage: the maximum of `peak_in_flight`.

    Exact for every named schedule. One stage is 1/v of a rank's share of the model: the 2p of zbv need as much memory as the p
    of 1f1b, and the 2p + 1 of dualpipev as much as p + 1/2 (the DualPipe README says PP + 1 for PP = 2p). Interleaved holds
    (v - 1) p + 2p - 1, which is p (1 + (p - 1) / (p v)) (Korthikanti et al., 2022) if p divides m; otherwise its first round
    is larger than p.

    Raises:
        PlanError: no formula exists for the schedule.
    """
    p, m, v = num_ranks, num_micro_batches, virtual_stages
    warm_up = (v - 1) * rounds(p, m)[0] + 2 * (p - 1)
    formulas = {
        "gpipe": m,
        "1f1b": p,
        "interleaved": warm_up + 1,
        "interleaved-overlap": warm_up + 2,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-1p": p,
        "zb-2p": 2 * p,
        "zbv": 2 * p,
        "dualpipev": 2 * p + 1,
    }
    if name not in formulas:
        raise _no_formula(name, "memory", formulas)
    return min(v * m, formulas[name])


def _no_formula(name: str, quantity: str, known: dict[str, int] | dict[str, Callable[[], float]]) -> PlanError:
    return PlanError(
        f"no formula for the {quantity} of {name!r}",
        where=WHERE,
        rule=f"formulas exist for {', '.join(known)}",
        fix="simulate the schedule instead",
    )
