"""Broken tables and deadlocks are refused, deadlocks with their cycle; valid tables are accepted."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad

from weft.errors import PlanError
from weft.parallel.pipeline.plan_schedule import load_schedule, plan_timeline, splits_backward, stage_ranks
from weft.parallel.pipeline.schedule import Action, Schedule, parse_schedule, slot_text
from weft.parallel.pipeline.schedules import SCHEDULES, build_schedule
from weft.parallel.pipeline.verify import verify
from weft.plan import Plan


def table(*lines: str, micro_batches: int) -> Schedule:
    return parse_schedule("\n".join(lines), len(lines), micro_batches)


def refusal(schedule: Schedule, max_in_flight: int | None = None) -> PlanError:
    with pytest.raises(PlanError) as error:
        verify(schedule, max_in_flight)
    assert error.value.rule
    assert error.value.fix
    return error.value


GOOD = ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1I1,1W1")


def test_table_may_mix_full_and_split_backwards() -> None:
    verify(table(*GOOD, micro_batches=2))


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ("0F0,0B0,0B1", GOOD[1], "stage 0 on rank 0 has B of micro-batch 1"),
        ("0F0,0F1,0B0", GOOD[1], "stage 0 on rank 0 has F of micro-batch 1"),
        (GOOD[0], "1F0,1B0", "stage 1 on rank 1 has nothing of micro-batch 1"),
        ("0F0,0F1,0B0,0B1,0F1", GOOD[1], "0F1 occurs 2 times"),
        (GOOD[0], "1F0,1B0,1F1,1W1", "has F and W of micro-batch 1"),
        (GOOD[0], "1F0,1B0,1F1,1I1", "has F and I of micro-batch 1"),
        (GOOD[0], "1F0,1B0,1F1,1B1,1I1,1W1", "has F and B and I and W of micro-batch 1"),
        (GOOD[0], "1F0,1B0,1F1,1B1,1W1", "has F and B and W of micro-batch 1"),
        ("0F0,0F1,0B0,0B1,0F2", GOOD[1], "0F2 in slot 4 of rank 0 is unknown"),
        ("0B0,0F0,0F1,0B1", GOOD[1], "rank 0 runs 0B0 in slot 0, but 0F0 in slot 1"),
        (GOOD[0], "1F0,1B0,1F1,1W1,1I1", "rank 1 runs 1W1 in slot 3, but 1I1 in slot 4"),
        ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", GOOD[1], "rank 0 runs 0B1 in slot 1, jointly with 0F1"),
        ("(0F0;0F1)OVERLAP_F_B,0B0,0B1", GOOD[1], "slot 0 of rank 0 holds (0F0;0F1)OVERLAP_F_B"),
        (GOOD[0], "1F0,1F1,1I1,(1W1;1B0)OVERLAP_F_B", "slot 3 of rank 1 holds (1W1;1B0)OVERLAP_F_B"),
    ],
)
def test_broken_tables_are_refused(first: str, second: str, what: str) -> None:
    assert what in refusal(table(first, second, micro_batches=2)).what


def test_broken_schedules_that_no_table_can_express_are_refused() -> None:
    good = build_schedule("1f1b", 2, 2)
    assert "stage 1 is on rank 2" in refusal(Schedule("x", 2, (0, 2), good.slots)).what
    assert "0F0 in slot 0 of rank 0" in refusal(Schedule("x", 2, (1, 0), good.slots)).what
    assert (
        "slot 4 of rank 0 holds nothing"
        in refusal(Schedule("x", 2, (0, 1), ((*good.slots[0], ()), good.slots[1]))).what
    )
    odd = ((*good.slots[0], (Action(0, "X", 0),)), good.slots[1])
    assert "0X0 in slot 4 of rank 0 is unknown" in refusal(Schedule("x", 2, (0, 1), odd)).what


def test_deadlock_message_has_the_cycle() -> None:
    schedule = table("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1", "2F0,2B0,2F1,2B1", micro_batches=2)
    assert refusal(schedule).what == (
        "schedule table: deadlock: rank 0 waits with 0B0 for 1B0 on rank 1, which waits with 1F1 for 0F1 on rank 0"
    )


def test_deadlock_message_omits_ranks_outside_the_cycle() -> None:
    schedule = table("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1", "2F0,2F1,2B0,2B1", micro_batches=2)
    assert refusal(schedule).what.endswith(
        "deadlock: rank 1 waits with 1B0 for 2B0 on rank 2, which waits with 2F1 for 1F1 on rank 1"
    )


def test_joint_slot_waits_for_dependencies_of_both_actions() -> None:
    """Separate slots would run; a forward and a backward that start together deadlock."""
    apart = table("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1", micro_batches=2)
    verify(apart)
    first, second = "0F0,(0F1;0B0)OVERLAP_F_B,0B1", "1F0,(1F1;1B0)OVERLAP_F_B,1B1"
    assert "waits with (0F1;0B0)OVERLAP_F_B for 1B0 on rank 1" in refusal(table(first, second, micro_batches=2)).what


def test_memory_limit_is_checked() -> None:
    schedule = build_schedule("gpipe", 2, 5)
    verify(schedule, max_in_flight=5)
    assert "rank 0 holds the activations of 5 micro-batches" in refusal(schedule, 4).what


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("0F0,0B0\n1F0,1X0", "'1X0'", "line 2, cell 2"),
        ("0F0,,0B0\n1F0,1B", "'1B'", "line 2, cell 2"),
        ("0F0,,(0F1;0B0)\n1F0", "'(0F1;0B0)'", "line 1, cell 3"),
        ("0F0,(0F1)OVERLAP_F_B\n1F0", "'(0F1)OVERLAP_F_B'", "line 1, cell 2"),
        ("0F0,0B0\n1F0,0F1", "0F1 on rank 1, but stage 0 is on rank 0", "line 2"),
        ("0F0,0B0\n2F0,2B0", "no rank runs stage 1", ""),
        ("0F0,0B0", "1 lines for 2 ranks", ""),
        ("0F0,0B0,1F0,1B0\n,,", "no action on rank 1", "line 2"),
        (",\n,", "no action on rank 0", "line 1"),
        ("0F0,\0,0B0\n1F0,1B0", "cannot read the slot", "line 1, cell 2"),
        ("0F0,-1F0,0B0\n1F0,1B0", "'-1F0'", "line 1, cell 2"),
        ("0F0,0B0\n9999999999F0,1B0", "'9999999999F0'", "line 2, cell 1"),
        (f"0F0,0B0\n{'9' * 5000}F0,1B0", "' ...", "line 2, cell 1"),
        ("0F0,0B0\n1F0,999999999F0", "no rank runs stage 2", ""),
        ("0F0,0REDUCE_GRAD,0B0\n1F0,1B0", "0B0 after 0REDUCE_GRAD", "line 1, cell 3"),
        ("0F0,0B0,1REDUCE_GRAD\n1F0,1B0", "1REDUCE_GRAD on a rank without stage 1", "line 1"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", "0SEND_F0 in a schedule", "line 1, cell 2"),
        ("0UNSHARD,0F0,0B0\n1F0,1B0", "0UNSHARD in a schedule", "line 1, cell 1"),
    ],
)
def test_unreadable_tables_name_line_and_cell(text: str, what: str, where: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_schedule(text, 2, 1)
    assert what in error.value.what
    assert (error.value.where or "").endswith(where)


CELLS = ["", "\0", "-1F0", "0F-1", "1F0", "0B7", "999999999F0", "0F999999999", "٣F0", "0F0;0B0", "(0F0;1B0)OVERLAP_F_B"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_any_cells_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """Lines and cells of a right table are removed, repeated and replaced; every reader of the file takes it, or none."""
    rows = [row.split(",") for row in build_schedule("1f1b", 2, 2, 1).to_csv().splitlines()]
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.sampled_from(rows))
        at = data.draw(st.integers(0, len(row)))
        row[at : at + data.draw(st.integers(0, 3))] = data.draw(st.lists(st.sampled_from(CELLS), max_size=2))
        rows = data.draw(st.sampled_from([rows, rows, rows, [*rows, row], rows[:1], rows[::-1]]))
    file = tmp_path / "own.csv"
    file.write_text("\n".join(",".join(row) for row in rows))
    plan = Plan.model_validate({"parallel": {"pp": 2}, "pipeline": {"schedule": str(file)}})
    try:
        schedule = load_schedule(plan, 2)
    except PlanError:
        return
    assert stage_ranks(plan) == schedule.rank_of_stage
    assert set(schedule.rank_of_stage) == {0, 1}
    assert not splits_backward(plan)
    assert plan_timeline(plan, 2)


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"\xff\xfe", "is no text file"), (b"0F0," * 2**24 + b"0", "has more than"), (None, "cannot be read")],
)
def test_a_file_that_is_no_table_is_refused(content: bytes | None, what: str, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_bytes(content) if content else file.mkdir()
    for name, problem in ((str(file), what), (f"{file}\0.csv", "is no text file")):
        plan = Plan.model_validate({"parallel": {"pp": 2}, "pipeline": {"schedule": name}})
        with pytest.raises(PlanError) as error:
            stage_ranks(plan)
        assert problem in error.value.what


def runs(schedule: Schedule) -> bool:
    """True if the slots can run: program order and dependencies form no cycle."""
    location = {action: (rank, position) for rank, position, action in schedule.actions()}
    graph: dict[tuple[int, int], set[tuple[int, int]]] = {}
    last = schedule.num_stages - 1
    for rank, position, (stage, kind, batch) in schedule.actions():
        before = graph.setdefault((rank, position), {(rank, position - 1)} if position else set())
        needs = [Action(stage, "I", batch)] if kind == "W" else []
        needs += [Action(stage - 1, "F", batch)] if kind == "F" else []
        needs += [Action(stage, "F", batch)] if kind in "BI" else []
        needs += [Action(stage + 1, back, batch) for back in "BI"] if kind in "BI" and stage < last else []
        before.update(location[need] for need in needs if need in location)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_shuffled_schedules_are_refused_exactly_where_they_cannot_run(data: st.DataObject) -> None:
    name, v = data.draw(st.sampled_from([("1f1b", 1), ("zb-h1", 1), ("interleaved-overlap", 2), ("zbv", 2)]))
    p, m = data.draw(st.integers(2, 3)), data.draw(st.integers(2, 4))
    schedule = build_schedule(name, p, m, v)
    slots = [list(of_rank) for of_rank in schedule.slots]
    for _ in range(data.draw(st.integers(1, 4))):
        of_rank = slots[data.draw(st.integers(0, p - 1))]
        position = data.draw(st.integers(0, len(of_rank) - 2))
        of_rank.insert(position, of_rank.pop(position + data.draw(st.integers(1, min(3, len(of_rank) - 1 - position)))))
    shuffled = Schedule("shuffled", m, schedule.rank_of_stage, tuple(map(tuple, slots)))
    if runs(shuffled):
        verify(shuffled)
    else:
        refusal(shuffled)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-overlap", "dualpipev"])
def test_reduce_grad_cells_of_torch_are_accepted(name: str) -> None:
    schedule = build_schedule(name, 2, 4, SCHEDULES[name].virtual_stages[0])
    rows = [[_Action.from_str(slot_text(slot)) for slot in slots] for slots in schedule.slots]
    text = "\n".join(",".join(map(str, _add_reduce_grad(row, 4))) for row in rows)
    assert text.count("REDUCE_GRAD") == schedule.num_stages
    assert parse_schedule(text, 2, 4, name) == schedule


def test_bidirectional_pipeline_is_refused() -> None:
    """DualPipe: each rank holds one stage from each end, so that each stage is on two ranks."""
    with pytest.raises(PlanError, match="0F1 on rank 1, but stage 0 is on rank 0") as error:
        parse_schedule("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1", 2, 2)
    assert "bidirectional" in (error.value.rule or "")
    assert "dualpipev" in (error.value.fix or "")
