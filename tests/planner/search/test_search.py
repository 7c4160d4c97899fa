"""The branch-and-bound search gives the same results as brute force."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from weft.planner.costmodel.frameworks import WEFT
from weft.planner.costmodel.hardware import GIB, ClusterSpec, find_device
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.peak_memory import peak_memory
from weft.planner.costmodel.shape import Shape
from weft.planner.costmodel.step_time import step_time
from weft.planner.search.alternatives import reason, sensitivity
from weft.planner.search.options import MEMORY_OPTIONS, ExpertOptions, MemoryOptions
from weft.planner.search.search import fewest_devices, search, simplest, techniques
from weft.planner.search.space import Choice, Space, degrees_of, divisors

pytestmark = pytest.mark.together  # the layouts of a space are computed once

DENSE = Shape(12, 1024, 16, 4, 64, 4096, 32000)
MOE = Shape(8, 512, 8, 8, 64, 0, 32000, experts=8, top_k=2, expert_ffn=1024)


def space(shape: Shape, gib: float, hosts: int = 2, per_host: int = 2) -> Space:
    device = replace(find_device("A100-80"), memory=gib * GIB)
    return Space(shape, 2048, 16, ClusterSpec(device, hosts, per_host), WEFT)


def with_experts(shape: Shape, gib: float) -> Space:
    """Space of two devices that also searches joint experts and replicas."""
    options = [ExpertOptions(joint, slots) for joint in (False, True) for slots in (0, 2)]
    return replace(space(shape, gib, 2, 1), global_batch=4, expert_options=options)


def everything(where: Space) -> list[Choice]:
    """All layouts that fit, by brute force."""
    found = []
    every = ((degrees, experts) for degrees in where.all_degrees() for experts in where.expert_options_of(degrees))
    for (degrees, experts), options in product(every, MEMORY_OPTIONS):
        some = where.layout(degrees, options, experts)
        memory = peak_memory(where.shape, some, WEFT)
        if memory.total <= where.budget:
            sizes = [size for size in divisors(some.cp) if where.shape.heads // some.tp % size == 0]
            grids = [replace(some, ulysses=size) for size in sizes]
            found += [Choice(grid, step_time(where.shape, grid, where.cluster, WEFT), memory) for grid in grids]
    return sorted(found, key=lambda choice: choice.time.seconds)


@cache
def everything_of(shape: Shape, gib: float) -> list[Choice]:
    """All layouts that fit, computed once for the tests of this module."""
    return everything(space(shape, gib))


@pytest.mark.parametrize("gib", [80.0, 3.5])
def test_search_of_expert_options_equals_brute_force(gib: float) -> None:
    where = with_experts(MOE, gib)
    every = everything(where)
    best = search(where, 1).best[0]
    assert best.time.seconds == pytest.approx(every[0].time.seconds, rel=1e-12)
    best_of_degrees = {degrees_of(choice.layout): choice.time.seconds for choice in reversed(every)}
    for degrees, seconds in best_of_degrees.items():
        choice, _ = where.fastest(degrees, math.inf)
        assert choice is not None
        assert choice.time.seconds == pytest.approx(seconds, rel=1e-12)
    bounds = {degrees: bound for bound, degrees in where.bounds}
    assert all(bounds[degrees_of(choice.layout)] <= choice.time.seconds * (1 + 1e-12) for choice in every)
    limit = every[0].time.seconds * 1.03
    expected = min((techniques(c.layout), c.time.seconds) for c in every if c.time.seconds < limit)
    found = simplest(where, limit) or pytest.fail("nothing")
    assert (techniques(found.layout), found.time.seconds) == (expected[0], pytest.approx(expected[1], rel=1e-12))
    size = sum(len(where.expert_options_of(degrees)) for degrees in where.all_degrees()) * len(MEMORY_OPTIONS)
    assert search(where, 1).size == size


@pytest.mark.parametrize(("shape", "gib"), [(DENSE, 80), (DENSE, 6), (DENSE, 5), (MOE, 80), (MOE, 4.5)])
def test_search_equals_brute_force(shape: Shape, gib: float) -> None:
    where, every = space(shape, gib), everything_of(shape, gib)
    fastest: dict[
        tuple[object, ...], float
    ] = {}  # fastest layout for each combination of degrees, over its memory options
    for choice in every:
        layout = replace(
            choice.layout, recompute="none", recompute_share=1.0, offload=False, optimizer_on_host=False, ulysses=1
        )
        fastest.setdefault((layout,), choice.time.seconds)
    found = search(where, 5)
    assert [choice.time.seconds for choice in found.best] == pytest.approx(list(fastest.values())[:5], rel=1e-12)
    assert found.size == sum(1 for _ in where.all_degrees()) * len(MEMORY_OPTIONS)
    for alternative in sensitivity(where, found.best[0]):
        same = [c.time.seconds for c in every if (alternative.setting, alternative.value) in settings(c.layout)]
        assert (alternative.choice is None) == (not same)
        if alternative.choice:
            assert alternative.choice.time.seconds == pytest.approx(same[0], rel=1e-12)
        assert reason(alternative, found.best[0], where.cluster)


@pytest.mark.parametrize(("shape", "gib"), [(DENSE, 80), (DENSE, 5), (MOE, 4.5)])
def test_simplest_equals_brute_force(shape: Shape, gib: float) -> None:
    where, every = space(shape, gib), everything_of(shape, gib)
    for slower in (1.001, 1.03, 1.3):
        limit = every[0].time.seconds * slower
        expected = min((techniques(c.layout), c.time.seconds) for c in every if c.time.seconds < limit)
        found = simplest(where, limit) or pytest.fail("nothing")
        assert (techniques(found.layout), found.time.seconds) == (expected[0], pytest.approx(expected[1], rel=1e-12))
    assert simplest(where, every[0].time.seconds) is None


def test_search_equals_brute_force_at_every_memory_budget() -> None:
    """The search is exact at every budget, even with so few layers that a memory option can increase the peak."""
    shallow = Shape(4, 1024, 16, 4, 64, 4096, 8000)
    roomy = space(shallow, 1000)
    every = everything(roomy)
    totals = sorted(choice.memory.total for choice in every)
    for total in totals[:40:8] + totals[40 :: len(totals) // 12]:
        gib = total / GIB / roomy.margin * (1 + 1e-9)
        fitting = [choice.time.seconds for choice in every if choice.memory.total <= total]
        found = search(space(shallow, gib), 1)
        assert found.best[0].time.seconds == pytest.approx(fitting[0], rel=1e-12)
    assert not search(space(shallow, totals[0] / GIB / roomy.margin * 0.999), 1).best


def test_a_restricted_space_equals_brute_force() -> None:
    options = [one for one in MEMORY_OPTIONS if one.recompute in ("none", "full") and not one.optimizer_on_host]
    where = replace(space(DENSE, 6), micro_batch=4, options=options, accepts=lambda degrees: degrees.dp == 2)
    assert {(degrees.dp, degrees.micro_batch) for degrees in where.all_degrees()} == {(2, 4)}
    layouts = [where.layout(degrees, some) for degrees, some in product(where.all_degrees(), options)]
    fits = [one for one in layouts if where.memory(one).total <= where.budget]
    fastest = min(where.time(one).seconds for one in fits)
    assert search(where, 1).best[0].time.seconds == pytest.approx(fastest, rel=1e-12)
    assert replace(where, reserved=2.0 * GIB).budget == where.budget - 2 * GIB
    assert search(where, 1).size == len(layouts)
    assert not search(replace(where, reserved=5.0 * GIB), 1).best


def settings(layout: TrainingLayout) -> set[tuple[str, object]]:
    names = "tp", "cp", "pp", "ep", "zero", "micro_batch", "shard"
    return {*((name, getattr(layout, name)) for name in names), ("schedule", (layout.schedule, layout.vpp))}


def test_less_memory_is_slower_until_nothing_fits() -> None:
    seconds = [search(space(DENSE, gib), 1).best[0].time.seconds for gib in (80, 6, 4)]
    assert seconds == sorted(seconds)
    nothing = search(space(DENSE, 1), 1)
    assert not nothing.best


def test_fewest_devices() -> None:
    cluster, choice = fewest_devices(space(DENSE, 80)) or pytest.fail("nothing")
    assert cluster.num_devices == 1
    assert choice.layout.num_devices == 1
    small = replace(space(DENSE, 3.5), cluster=ClusterSpec(replace(find_device("A100-80"), memory=3.5 * GIB), 1, 1))
    assert not search(small, 1).best
    larger, choice = fewest_devices(small) or pytest.fail("nothing")
    assert larger.num_devices > 1
    assert choice.memory.total <= small.budget
    assert fewest_devices(space(DENSE, 0.5)) is None


def test_dominance_of_memory_options() -> None:
    assert MemoryOptions("none", 1, False, False).dominates(MemoryOptions("full", 4, True, True))
    # Recomputation leaves less to offload.
    assert not MemoryOptions("none", 1, True, False).dominates(MemoryOptions("full", 1, True, False))
    assert not MemoryOptions("light", 1, False, False).dominates(MemoryOptions("none", 1, True, True))
    assert MemoryOptions("full", 4, False, False).dominates(MemoryOptions("full", 2, False, False))
    assert not MemoryOptions("attention", 1, False, False).dominates(MemoryOptions("full", 2, False, False))
    assert not MemoryOptions("mlp", 1, False, False).dominates(MemoryOptions("attention", 1, False, False))
    assert all(options.dominates(options) for options in MEMORY_OPTIONS)


def test_space_with_another_budget_shares_times_and_finds_the_same() -> None:
    first = space(MOE, 80)
    search(first, 2)
    narrow = first.with_memory(margin=0.01)
    assert narrow.bounds is first.bounds
    assert search(narrow, 5) == search(replace(first, margin=0.01), 5) != search(first, 5)


def test_divisors() -> None:
    for number in (1, 2, 12, 36, 97, 1024):
        assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]
    assert math.prod(divisors(6)) == 36
