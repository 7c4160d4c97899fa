"""Named schedules: complete, free of deadlocks, within their memory limits, and equal to the schedules of torch."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from tests.lab.plans import resolved
from tests.parallel.pipeline.formulas import max_in_flight_formula
from weft.errors import PlanError
from weft.parallel.pipeline.plan_schedule import load_schedule
from weft.parallel.pipeline.schedule import Schedule, forward_order, parse_schedule, peak_in_flight, slot_text
from weft.parallel.pipeline.schedules import SCHEDULES, build_schedule, rounds
from weft.parallel.pipeline.verify import verify
from weft.plan import Parallel, Pipeline, Plan

fast = settings(max_examples=60, deadline=None)


@st.composite
def schedules(draw: st.DrawFn, *names: str, ranks: int = 8, micro_batches: int = 24) -> tuple[Schedule, int]:
    """A schedule and its virtual stages."""
    name = draw(st.sampled_from(names or tuple(SCHEDULES)))
    kind = SCHEDULES[name]
    fewest, most = kind.virtual_stages
    p = draw(st.integers(1, ranks))
    v = draw(st.integers(fewest, most or 3))
    m = draw(st.integers(max(1, kind.micro_batches_per_rank * p), max(micro_batches, kind.micro_batches_per_rank * p)))
    return build_schedule(name, p, m, v), v


def cells(schedule: Schedule) -> list[list[str]]:
    return [[slot_text(slot) for slot in slots] for slots in schedule.slots]


@fast
@given(schedules())
def test_schedules_verify_and_match_memory_formula(drawn: tuple[Schedule, int]) -> None:
    schedule, v = drawn
    p, m = schedule.num_ranks, schedule.num_micro_batches
    limit = max_in_flight_formula(schedule.name, p, m, v)
    verify(schedule, max_in_flight=limit)
    assert max(peak_in_flight(schedule)) == limit
    assert schedule.num_stages == v * p
    assert sorted(stage for rank in range(p) for stage in schedule.stages_of_rank(rank)) == list(range(v * p))


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_v_placement_puts_first_and_last_stage_on_one_rank(name: str) -> None:
    schedule = build_schedule(name, 3, 6, 2)
    assert [schedule.stages_of_rank(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.must("format: pipeline schedule, file.csv")
@fast
@given(schedules())
def test_csv_roundtrip(drawn: tuple[Schedule, int]) -> None:
    schedule, _ = drawn
    text = schedule.to_csv()
    assert parse_schedule(text, schedule.num_ranks, schedule.num_micro_batches, schedule.name) == schedule
    spread = text.replace(",", ", ,\t")  # a user-defined table may have empty cells
    assert parse_schedule(spread, schedule.num_ranks, schedule.num_micro_batches, schedule.name) == schedule


@fast
@given(schedules())
def test_torch_validates_the_table(drawn: tuple[Schedule, int]) -> None:
    schedule, _ = drawn
    order = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(schedule.to_csv().splitlines())
    }
    owners = torch_schedules._validate_schedule(
        order, schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches
    )
    assert owners == dict(enumerate(schedule.rank_of_stage))
    assert [[str(action) for action in order[rank]] for rank in order] == cells(schedule)


@fast
@given(
    schedules("interleaved", "interleaved-overlap"),
)
def test_interleaved_overlap_pairs_steady_forwards_and_backwards(drawn: tuple[Schedule, int]) -> None:
    schedule, v = drawn
    p, m = schedule.num_ranks, schedule.num_micro_batches
    first = rounds(p, m)[0]
    for rank, slots in enumerate(schedule.slots):
        warm_up = min(v * m, (v - 1) * first + 2 * (p - 1 - rank) + (schedule.name == "interleaved-overlap"))
        pairs = [slot for slot in slots if len(slot) == 2]
        assert [slot[0].kind for slot in slots[:warm_up]] == ["F"] * warm_up
        if schedule.name == "interleaved":
            assert not pairs
        else:
            assert len(pairs) == v * m - warm_up  # every forward after the warm-up, with one backward each
            # A backward depends only on forwards of its own micro-batch.
            assert all(forward.micro_batch != backward.micro_batch for forward, backward in pairs)


def paired_without_warm_up(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B with joint slots but without the extra warm-up that makes the pairs independent."""
    schedule = build_schedule("interleaved", p, m, v)
    slots = []
    for of_rank in schedule.slots:
        paired: list[tuple[Any, ...]] = []
        for slot in of_rank:
            if paired and slot[0].kind == "B" and len(paired[-1]) == 1 and paired[-1][0].kind == "F":
                paired[-1] += slot
            else:
                paired.append(slot)
        slots.append(tuple(paired))
    return Schedule("paired", m, schedule.rank_of_stage, tuple(slots))


def test_pairing_without_the_extra_warm_up_is_refused() -> None:
    with pytest.raises(PlanError, match=r"3F0.*jointly|jointly with 3F0"):
        verify(paired_without_warm_up(2, 4, 2))
    verify(build_schedule("interleaved-overlap", 2, 4, 2))


@fast
@given(st.integers(1, 8), st.integers(1, 40))
def test_rounds_are_even_and_not_below_the_ranks(p: int, m: int) -> None:
    sizes = rounds(p, m)
    assert sum(sizes) == m
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[-1] >= min(p, m)
    assert m % p or set(sizes) == {p}


def torch_order(actions: list[Any]) -> list[str]:
    return [str(a) for a in actions if a is not None and a.computation_type.value != "REDUCE_GRAD"]


def torch_generator(name: str, **attributes: Any) -> Any:
    generator = object.__new__(getattr(torch_schedules, name))  # its __init__ needs stages with modules
    vars(generator).update(attributes)
    return generator


def torch_one_stage_per_rank(p: int, m: int, rank: int, split: bool) -> list[Any]:
    """torch's 1F1B generator for interleaved stages, with one stage per rank (Schedule1F1B warms up the last rank with 1)."""
    warm_up = p - 1 - rank
    return torch_schedules._get_1f1b_rank_ops(
        1, p, warm_up, m - warm_up, warm_up, rank, lambda step: rank, lambda step: rank, rank, enable_zero_bubble=split
    )


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("rest", [0, 1, 4, 10])
def test_same_order_as_torch(p: int, rest: int) -> None:
    m = 2 * p + rest
    for name, split in (("1f1b", False), ("zb-h1", True)):
        expected = [torch_order(torch_one_stage_per_rank(p, m, rank, split)) for rank in range(p)]
        assert expected == cells(build_schedule(name, p, m))
    for name, ours in (("ScheduleZBVZeroBubble", "zbv"), ("ScheduleDualPipeV", "dualpipev")):
        generator = torch_generator(name, pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
        expected = [torch_order(generator._calculate_single_rank_operations(rank)) for rank in range(p)]
        assert expected == cells(build_schedule(ours, p, m, 2))


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 6), (3, 5), (4, 3), (4, 4), (4, 10), (4, 12), (5, 4)])
@pytest.mark.parametrize("v", [2, 3])
def test_same_interleaved_order_as_torch(p: int, m: int, v: int) -> None:
    generator = torch_generator(
        "ScheduleInterleaved1F1B",
        pp_group_size=p,
        n_local_stages=v,
        _n_microbatches=m,
        microbatches_per_round=m // max(1, m // p),
    )
    expected = [torch_order(generator._calculate_single_rank_operations(rank)) for rank in range(p)]
    assert expected == cells(build_schedule("interleaved", p, m, v))


@pytest.mark.parametrize("m", [1, 2, 4])
def test_same_zbv_order_as_torch_with_few_micro_batches(m: int) -> None:
    generator = torch_generator("ScheduleZBVZeroBubble", pp_group_size=3, num_stages=6, _n_microbatches=m)
    expected = [torch_order(generator._calculate_single_rank_operations(rank)) for rank in range(3)]
    assert expected == cells(build_schedule("zbv", 3, m, 2))


def test_dual_pipe_v_slot_counts_match_deepseek() -> None:
    """Slots of rank r of R with M micro-batches, by the steps of DeepSeek's dualpipev.py."""
    ranks, m = 4, 11
    schedule = build_schedule("dualpipev", ranks, m, 2)
    for r, slots in enumerate(schedule.slots):
        main = m - 2 * ranks + r + 1
        joint = [slot for slot in slots if len(slot) == 2]
        assert len(joint) == 2 * main - (r == ranks - 1) + ranks - r - 1
        weights = [slot for slot in slots if slot[0].kind == "W"]
        assert len(weights) == 2 * (ranks - r - 1) + r + 1


@pytest.mark.must("refusal: pipeline schedules")
@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("1f2b", 2, 4), "unknown schedule '1f2b'", "'1f1b'"),
        (("dualpipe", 2, 4), "unknown schedule 'dualpipe'", "'dualpipev'"),
        (("xxxxxxxx", 2, 4), "unknown schedule", "use one of these names"),
        (("1f1b", 0, 4), "a pipeline of 0 ranks", "1 or more"),
        (("1f1b", 2, 0), "0 micro-batches", "1 or more"),
        (("1f1b", 2, 4, 2), "virtual_stages 2 with 1f1b", "virtual_stages to 1"),
        (("interleaved", 2, 4), "virtual_stages 1 with interleaved", 'or plan.pipeline.schedule to "1f1b"'),
        (("zbv", 2, 4, 3), "virtual_stages 3 with zbv", "virtual_stages to 2"),
        (("dualpipev", 4, 7, 2), "7 micro-batches with dualpipev on 4 ranks", "8 or more"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], what: str, fix: str) -> None:
    with pytest.raises(PlanError) as error:
        build_schedule(*arguments)
    assert what in error.value.what
    assert fix in (error.value.fix or "")
    assert error.value.rule


@pytest.mark.parametrize("name", SCHEDULES)
def test_default_virtual_stages_is_the_minimum(name: str) -> None:
    kind = SCHEDULES[name]
    plan = resolved(Plan(parallel=Parallel(pp=2), pipeline=Pipeline(schedule=name)), 2)
    assert plan.pipeline.virtual_stages == kind.virtual_stages[0]
    assert load_schedule(plan, 4).num_stages == 2 * kind.virtual_stages[0]
    assert Plan.model_validate(plan.model_dump()).model_dump() == plan.model_dump()
    assert resolved(Plan(pipeline=Pipeline(schedule=name)), 2).pipeline.virtual_stages == 1


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
@pytest.mark.parametrize("stages", [1, 3])
def test_wrong_number_of_stages_in_a_v_is_refused(name: str, stages: int) -> None:
    plan = resolved(Plan(parallel=Parallel(pp=2), pipeline=Pipeline(schedule=name, virtual_stages=stages)), 2)
    with pytest.raises(PlanError, match=f"virtual_stages {stages} with {name}") as error:
        load_schedule(plan, 4)
    assert error.value.fix == "set plan.pipeline.virtual_stages to 2"


def test_schedule_modules_do_not_import_torch() -> None:
    modules = ["gantt", "schedules", "schedule", "search", "simulate", "verify"]
    code = "; ".join(f"import weft.parallel.pipeline.{module}" for module in modules)
    code += "; import sys; print({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'numpy'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@fast
@given(st.integers(1, 8), st.integers(1, 3), st.booleans(), st.integers(1, 40))
def test_forwards_of_an_evaluation_follow_their_inputs_with_few_micro_batches_in_flight(
    ranks: int, virtual_stages: int, v_shape: bool, micro_batches: int
) -> None:
    there, back = list(range(ranks)), list(reversed(range(ranks)))
    rank_of_stage = [rank for chunk in range(virtual_stages) for rank in (back if v_shape and chunk % 2 else there)]
    last, done, in_flight, end = len(rank_of_stage) - 1, set[tuple[int, int]](), 0, dict.fromkeys(there, 0)
    arrived: dict[tuple[int, int], int] = {}
    for stage, _, micro_batch in forward_order(rank_of_stage, micro_batches):
        assert stage == 0 or (stage - 1, micro_batch) in done
        assert micro_batch == 0 or (stage, micro_batch - 1) in done
        done.add((stage, micro_batch))
        in_flight += (stage == 0) - (stage == last)
        assert in_flight <= 2 * len(rank_of_stage)
        rank = rank_of_stage[stage]
        end[rank] = arrived[stage, micro_batch] = max(end[rank], arrived.get((stage - 1, micro_batch), 0)) + 1
    assert len(done) == len(rank_of_stage) * micro_batches
    if micro_batches >= ranks:  # no rank waits, but while the pipeline fills and drains
        assert max(end.values()) <= virtual_stages * (micro_batches + 2 * ranks)
