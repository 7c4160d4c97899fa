"""Bubbles and activations of the named schedules in closed form: what a planner ranks by. Imports no torch."""

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
    """Seconds that the most idle rank idles in one step, where all stages are even and communication takes no time.

    All times are of one micro-batch on one rank, over all the stages that it holds. With p ranks, m micro-batches, v stages a
    rank, forward F, whole backward B, its weight part W (I = B - W) and joint forward and backward J, the formulas and where
    `simulate` gives exactly the same (elsewhere they are estimates):

    - gpipe, 1f1b: (p - 1) (F + B). Always exact. Narayanan et al., SC21, section 2.2.1.
    - interleaved, and interleaved-overlap with J = F + B: (p - 1) (F + B) / v, plus (v - 1) (p - m) (F + B) / v below p
      micro-batches. Always exact, rounds of uneven size among them. SC21, section 2.2.2.
    - zb-h1: (p - 1) (F + B - 2 W), or (p - 1) (F + B - W) - (m - 1) W below p micro-batches. Exact for W <= F and W <= I.
      Qi et al., Zero Bubble, 2023, table 2 (where B is our I) and appendix H.
    - zb-h2: (p - 1) (F + B - 3 W), of `Timeline.longest_span` and not of the makespan: the cost of a step where ranks need
      not start together. Exact for m >= 2 p - 1, W <= F and W <= I. Qi et al., table 2.
    - dualpipev: (p - 1) (J + B - 3 W) / 2. Exact for F = I, W <= F and B <= J <= F + B; ranks idle unevenly, the last most.
      DeepSeek, DualPipe, README, where PP = 2 p stages and times are of one stage.

    Args:
        name: of the schedule.
        num_ranks: p.
        num_micro_batches: m.
        virtual_stages: v.
        forward: F.
        backward: B, the whole of it.
        weight: W, its part that `W` actions run; read by zb-h1, zb-h2 and dualpipev.
        joint: J, of a joint slot, summed over v; None: F + B.

    Raises:
        PlanError: there is no formula for the schedule.
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
    """Most activations that any rank holds at once, in micro-batches of one stage: the largest of `peak_in_flight`.

    Exact for every named schedule. One stage is 1/v of what a rank holds: zbv's 2p are as much memory as the p of 1f1b,
    dualpipev's 2p + 1 as p + 1/2 (its README says PP + 1 for PP = 2p), and interleaved's (v - 1) p + 2p - 1 as
    p (1 + (p - 1) / (p v)) (Korthikanti et al., 2022), where p divides m; else its first round is larger than p.

    Raises:
        PlanError: there is no formula for the schedule.
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


def _no_formula(name: str, what: str, known: dict[str, int] | dict[str, Callable[[], float]]) -> PlanError:
    return PlanError(
        f"no formula of the {what} of {name!r}",
        where=WHERE,
        rule=f"there is one for {', '.join(known)}",
        fix="simulate the schedule instead",
    )
