"""Terms, merged trace and summary of synthetic profiles, and the models behind them."""

import gzip
import itertools
import json
import mmap
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.observe.profiles import TRACE_SHIFT, collective, operator, profile, record, span
from weft.comm.clocks import offset_of
from weft.device.counters import PAGE_FAULTS, Counters
from weft.errors import DataError, JobError
from weft.job import Job
from weft.memory.live_bytes import LiveBytes
from weft.memory.operator_trace import MOST_SAMPLES, CacheModel, OperatorTrace
from weft.observe.profile.intervals import intersect, subtract, total, union
from weft.observe.profile.operators import top_operators
from weft.observe.profile.page import comparison_rows, findings
from weft.observe.profile.profile import compare_profiles, read_summary, write_profile
from weft.observe.profile.ranks import read_profiles
from weft.observe.profile.summary import collective_rows, cost_of, slots_of, summarize, verdicts
from weft.observe.profile.terms import gaps, step_terms
from weft.observe.profile.trace import assign_lanes, merge


def test_intervals_agree_with_sets_of_points() -> None:
    chance = random.Random(0)
    for _ in range(200):
        sides = [[(a, a + chance.randint(0, 6)) for a in (chance.randint(0, 30) for _ in range(6))] for _ in range(2)]
        points = [{at for start, end in side for at in range(start, end)} for side in sides]
        a, b = (union([(float(start), float(end)) for start, end in side]) for side in sides)
        assert all(first[1] < second[0] for first, second in itertools.pairwise(a))
        for found, expected in (
            (a, points[0]),
            (subtract(a, b), points[0] - points[1]),
            (intersect(a, b), points[0] & points[1]),
        ):
            assert total(found) == len(expected)
            assert {at for start, end in found for at in range(int(start), int(end))} == expected


def test_terms_are_disjoint_and_overlap_counts_once() -> None:
    one = profile(
        [
            span("weft: data", "user_annotation", 0, 1),
            operator("stack", 0.2, 0.8),  # the collation of a batch is data
            span("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 1, 9),  # framework, not computation
            operator("mm", 1, 4),
            operator("empty", 1.5, 2.0),  # its own time is not computation
            operator("mm", 5, 6, thread=8),  # while thread 7 waits
            operator("copy_", 4.5, 5.5),  # inside the collective of its thread
            operator("add", 8, 9, thread=8),
        ],
        collectives=[
            collective("dp_shard", "all_reduce", 4, 7),
            collective("tp", "all_gather", 7, 7, done=8.5, waited=8.75, ended=9.5),
            collective("pp", "receive", 9, 9, waited=9.5, ended=9.75),
        ],
    )
    (step,) = step_terms(one)
    assert step.terms == pytest.approx(
        {
            "computation": 2.5 + 1 + 1,
            "communication: dp_shard": 2.0,  # 4-5 and 6-7; 5-6 is overlapped
            "communication: tp": 0.5,  # 9-9.5; 8.75-9 is overlapped
            "pipeline wait": 0.25,
            "data": 1.0,
            "host": 10 - 4.5 - 2 - 0.5 - 0.25 - 1,
        }
    )
    assert sum(step.terms.values()) == pytest.approx(step.seconds) == 10
    assert step.hidden == pytest.approx({"dp_shard": 1.0, "tp": 0.5})
    rows = {(row["axis"], row["operation"]): row for row in collective_rows([one])}
    assert rows["dp_shard", "all_reduce"]["exposed"] == pytest.approx(2.0)
    assert rows["tp", "all_gather"]["bytes"] == 64


def test_random_traces_have_terms_that_sum_to_the_step() -> None:
    chance = random.Random(1)

    def times(count: int) -> list[tuple[float, float]]:
        starts = [chance.uniform(-1, 11) for _ in range(count)]
        return [(start, start + chance.uniform(0, 2)) for start in starts]

    for _ in range(50):
        entries = [operator(chance.choice(["mm", "view"]), *t, thread=chance.choice([7, 8])) for t in times(30)]
        entries += [span("weft: data", "user_annotation", *t) for t in times(2)]
        waits = [collective(chance.choice(["dp", "tp"]), "all_reduce", *t) for t in times(8)]
        for step in step_terms(profile(entries, collectives=waits, steps=((5, 0.0, 4.0), (6, 4.5, 10.0)))):
            assert sum(step.terms.values()) == pytest.approx(step.seconds)
            assert min(step.terms.values()) >= 0


def kernel(name: str, start: float, end: float, stream: int, **args: Any) -> dict[str, Any]:
    return span(name, "kernel", start, end, stream, **args)


NCCL = {
    "Collective name": "_allgather_base",
    "In msg nelems": 8,
    "Out msg nelems": 16,
    "Group size": 2,
    "dtype": "BFloat16",
    "Process Group Description": "mesh_dp_shard",
}


def test_kernels_of_a_cuda_trace_are_computation_and_collectives() -> None:
    one = profile(
        [
            operator("mm", 0, 9, **{"External id": 3, "Input Dims": [[4, 4], [4, 4]]}),  # of the host: not counted
            kernel("gemm", 1, 4, 7, **{"External id": 3}),
            kernel("ncclDevKernel_AllGather_RING_LL", 3, 6, 20, **NCCL),
            span("Memcpy HtoD", "gpu_memcpy", 7, 8, 7),
            span("weft: data", "user_annotation", 0, 2),
        ]
    )
    (step,) = step_terms(one)
    expected = {"computation": 4.0, "communication: dp_shard": 2.0, "data": 1.0, "host": 3.0}
    assert step.terms == pytest.approx(expected)
    assert step.hidden == pytest.approx({"dp_shard": 1.0})
    (found,) = one.collectives
    assert (found.axis, found.operation, found.bytes, found.size) == ("dp_shard", "all_gather", 16, 32)
    first, *_ = top_operators([one])
    assert (first.name, first.shapes, first.seconds) == ("aten::mm", "4x4 4x4", pytest.approx(3.0))


def test_kernels_of_an_ascend_trace() -> None:
    names = {5: "Python", 6: "Ascend Hardware", 8: "Communication"}
    metadata = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names.items()]
    entries = [
        {**span("MatMulV2", "", 1, 4, "Stream 2"), "pid": 6},
        {**span("hcom_allGather__123_0_1", "", 3, 6, "Group 0"), "pid": 8},
        {**span("Notify_Wait", "", 3, 9, "Plane 0"), "pid": 8},
    ]
    (step,) = step_terms(profile([*metadata, *entries]))
    assert step.terms == pytest.approx({"computation": 3, "communication: world": 2, "data": 0, "host": 5})


def test_merged_trace_aligns_clocks_and_names_ranks() -> None:
    late = 2.5  # clock of rank 1 against rank 0
    clock = {"marks": [[-2.0, -1.0]], "offset": late, "error": 0.001}
    sides = [
        profile([operator("mm", 1, 2)], collectives=[collective("tp", "all_reduce", 3, 4, size=1000)]),
        profile([operator("mm", 1, 2), kernel("gemm", 2, 3, 9)], rank=1, clock=clock, steps=((5, late, late + 10),)),
    ]
    merged = json.loads(json.dumps(merge(sides)))["traceEvents"]
    assert {e["pid"] for e in merged} == {0, 1}
    names = {(e["pid"], e["args"]["name"]) for e in merged if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {(0, "rank 0 (dp_shard 0)"), (1, "rank 1 (dp_shard 1)")}
    tracks = {(e["pid"], e["args"]["name"]) for e in merged if e["ph"] == "M" and e["name"] == "thread_name"}
    assert tracks >= {(0, "thread 7"), (0, "collectives tp"), (1, "stream 9"), (0, "steps"), (1, "steps")}
    at = {(e["pid"], e["name"]): e["ts"] for e in merged if e["ph"] == "X"}
    assert at[0, "aten::mm"] == pytest.approx(1e6)
    assert at[1, "aten::mm"] == pytest.approx((1 - late) * 1e6)
    assert at[0, "step 5"] == at[1, "step 5"] == 0
    (found,) = [e for e in merged if e.get("cat") == "collective"]
    assert found["args"]["axis"] == "tp"
    assert found["args"]["bytes"] == 1000
    assert found["dur"] == pytest.approx(1e6)
    for pid, tid in {(e["pid"], e["tid"]) for e in merged if e.get("cat") == "collective"}:
        assert (pid, tid) in {(e["pid"], e["tid"]) for e in merged if e["name"] == "thread_name"}


def test_overlapping_collectives_get_lanes() -> None:
    assert assign_lanes([(0, 4), (1, 2), (2, 3), (2.5, 6), (4, 5)]) == [0, 1, 1, 2, 0]


def test_clock_offset_is_within_its_bound() -> None:
    chance = random.Random(2)
    for _ in range(20):
        offset = chance.uniform(-5, 5)
        common = [chance.uniform(0, 100) for _ in range(10)]
        spans = [[(at - chance.random() * 1e-2, at + chance.random() * 1e-2) for at in common] for _ in range(2)]
        own = [(start + offset, end + offset) for start, end in spans[0]]
        found = offset_of(own, spans[1])
        assert abs(found.seconds - offset) <= found.error <= 1e-2


def test_gaps_name_phase_and_operators() -> None:
    entries = [operator("mm", 0, 2), operator("add", 5, 10), span("weft: forward", "user_annotation", 0, 6)]
    (gap,) = gaps(profile(entries))
    assert (gap.phase, gap.after, gap.before) == ("forward", "aten::mm", "aten::add")
    assert (gap.start, gap.seconds) == pytest.approx((2, 3))


def test_slots_start_after_their_wait() -> None:
    entries = [
        span("PP:1RECV_F0", "user_annotation", 0, 0.5),
        span("PP:1F0", "user_annotation", 1, 4),
        span("PP:(1F1;1B0)OVERLAP_F_B", "user_annotation", 4, 6),
    ]
    waits = [collective("pp", "receive", 0, 0, waited=1.0, ended=2.5)]
    one = profile(entries, collectives=waits, slots=["1F0", "(1F1;1B0)OVERLAP_F_B"])
    slots = slots_of(one, 0, 10)
    assert [text for text, _, _ in slots] == one.record["slots"]
    assert [low for _, low, _ in slots] == pytest.approx([2.5, 4])


def test_roofline_of_operators() -> None:
    dims = {"Input Dims": [[4, 4], [4, 4], []]}
    rows = [["aten::mm", [[4, 4], [4, 4]], 2, 400, 20], ["aten::add", [[4, 4], [4, 4]], 1, 0, 30]]
    entries = [operator("mm", 0, 4, **dims), operator("mm", 4, 8, **dims), operator("add", 8, 10, **dims)]
    mm, add = top_operators([profile(entries, operators=rows)])
    assert (mm.calls, mm.seconds, mm.flops, mm.bytes, mm.bound) == pytest.approx((2, 8, 400, 20, "computation"))
    assert mm.share == pytest.approx(4 / 8)  # 400 FLOPs at 100 FLOP/s
    assert (add.bound, add.share) == ("memory", pytest.approx(3 / 2))


def test_cache_model() -> None:
    cache = CacheModel(100)
    for address, size in [(1, 60), (2, 30), (1, 60), (3, 30), (2, 30)]:
        cache.access(address, size)
    # 60 and 30 are fetched, 60 is a hit, 30 evicts address 2, which is fetched again.
    assert (cache.accessed, cache.fetched, cache.compulsory) == (210, 150, 120)
    cache.access(4, 1000)  # larger than the cache: evicts all, and does not stay
    assert cache.held == 0
    cache.access(4, 1000)
    assert (cache.fetched, cache.compulsory) == (2150, 1120)


def test_operator_trace_counts_flops_bytes_and_memory() -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    with LiveBytes() as live, OperatorTrace(live, CacheModel(2**20)) as trace:
        live.track("parameters", [a, b])
        kept = a @ b.t().t()
        for _ in range(3 * MOST_SAMPLES):
            kept.add_(1.0)
        big = torch.ones(1000)
        del big
        kept.add_(1.0)
    assert trace.costs["aten::mm", ((4, 8), (8, 2))] == (1, 2 * 4 * 8 * 2, 4 * (32 + 16 + 8))
    assert trace.costs["aten::add_", ((4, 2),)].calls == 3 * MOST_SAMPLES + 1
    assert len(trace.samples) <= MOST_SAMPLES
    assert max(sum(sizes.values()) for _, sizes in trace.samples) == live.peak  # no peak is lost by thinning
    assert [index for index, _ in trace.samples] == sorted(index for index, _ in trace.samples)
    assert trace.samples[0][1] == {"parameters": 4 * 48, "activations": 4 * 8}


@pytest.mark.skipif(sys.platform != "linux", reason="counters of Linux")
def test_counters_of_this_process() -> None:
    try:
        counters = Counters((PAGE_FAULTS,))
    except OSError as error:
        pytest.skip(f"this system forbids counters: {error}")
    before = len(os.listdir("/proc/self/fd"))
    with mmap.mmap(-1, 4096 * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(4096):
            memory[page * mmap.PAGESIZE] = 1
    assert counters.read()[0] >= 4096
    counters.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_verdicts_and_findings() -> None:
    entries = [operator("mm", 0, 5), span("weft: data", "user_annotation", 8, 10)]
    cache = {**record()["cache"], "compulsory": 80, "fetched": 100}
    one = profile(entries, collectives=[collective("dp_shard", "all_gather", 5, 7)], cpu_seconds=[2.0], cache=cache)
    summary = summarize([one], Path("missing"))
    assert [found.value for found in verdicts(summary)] == pytest.approx([0.5, 0.2, 0.8])
    assert [found.passed for found in verdicts(summary)] == [False, False, False]
    text = " ".join(findings(summary))
    for part in ("Kernel use is 50.0%", "all_gather over dp_shard", "80.0% of the bytes", "20.0% of its time", "33%"):
        assert part in text
    counted = {**cache, "counted_bytes": 160, "references": 10, "misses": 1}
    assert verdicts({**summary, "cache": counted})[2][1:] == (
        0.5,
        False,
        "of the bytes from memory, goal 90% or more; perf counters, 90.0% cache hits",
    )
    assert summary["cost"] is None


def write(folder: Path, ranks: int = 2, **changes: Any) -> Path:
    """Write the files of a profile with one operator in each step."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        entries = [span("weft: clock", "user_annotation", -2, -1), operator("mm", 1, 9)]
        (folder / f"rank-{rank}.json").write_text(json.dumps(record(rank, **changes)))
        (folder / f"rank-{rank}.trace.json").write_text(json.dumps({"traceEvents": entries}))
    return folder


def test_profile_folder_is_written_and_written_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "run" / "profile")
    first = write_profile(folder)
    assert first["terms"]["computation"] == pytest.approx(8)
    assert read_summary(tmp_path / "run") == read_summary(folder) == json.loads(json.dumps(first))
    merged = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert {e["pid"] for e in merged["traceEvents"]} == {0, 1}
    assert sorted(path.name for path in folder.glob("rank-0*")) == ["rank-0.json", "rank-0.trace.json.gz"]
    page = (folder / "profile.html").read_text()
    assert "80.0%" in page
    assert "<script" not in page
    assert write_profile(folder) == first


def test_comparison_names_the_ratio_of_each_term(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name / "profile", steps=((5, 0.0, end),)) for name, end in (("a", 10.0), ("b", 9.0)))
    summaries = [write_profile(folder) for folder in (a, b)]
    rows = {row[0]: row for row in comparison_rows(*summaries)}
    assert rows["host"][-1] == "2"
    assert rows["step"][-1] == "1.11"
    path = compare_profiles((a, tmp_path / "b"), tmp_path / "out", lambda *_: pytest.fail("no plan was named"))
    assert "1.11 x" in path.read_text()


def test_comparison_of_other_models_is_refused(tmp_path: Path) -> None:
    work = {**record()["work"], "parameters": 2000}
    a, b = write(tmp_path / "a"), write(tmp_path / "b", work=work)
    for folder in (a, b):
        write_profile(folder)
    with pytest.raises(JobError, match="parameters") as refused:
        compare_profiles((a, b), tmp_path / "out", lambda *_: pytest.fail("no plan was named"))
    assert "the same model" in str(refused.value)


def test_folders_without_a_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no profile"):
        read_profiles(tmp_path)
    with pytest.raises(DataError, match="no profile"):
        read_summary(tmp_path)
    folder = write(tmp_path / "damaged")
    (folder / "rank-1.trace.json").write_text('{"traceEvents": [')
    with pytest.raises(DataError, match="cannot be read"):
        read_profiles(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.profile_steps=20-22"], "steps of the run"),
        (["train.profile_steps=5-4"], "not before the first"),
        (["train.profile_steps=5"], "first and the last step"),
        (["train.profile_only=true"], "without train.profile_steps"),
        (["train.profile_ranks=[0]"], "without train.profile_steps"),
    ],
)
def test_jobs_with_other_steps_are_refused(changes: list[str], words: str) -> None:
    with pytest.raises(JobError) as refused:
        Job.parse({"model": {"path": "x"}, "train": {"steps": 20}}, changes)
    assert words in str(refused.value)


def test_cost_compares_with_the_other_steps(tmp_path: Path) -> None:
    row: dict[str, Any] = dict.fromkeys(
        ("loss", "grad_norm", "learning_rate", "tokens_per_second", "loss_scale"), 1.0
    ) | {"tokens": 1, "mfu": None, "peak_memory_bytes": 1, "comm_bytes": 0, "skipped": False}
    seconds = {1: 9.0, 2: 9.0, 3: 1.0, 4: 1.2, 5: 1.5, 6: 1.1}
    lines = [json.dumps({**row, "step": step, "step_seconds": value}) for step, value in seconds.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert cost_of(tmp_path, [profile([])]) == {"profiled": 1.5, "plain": 1.1, "plain_steps": 3}


def test_synthetic_clock_is_the_one_of_the_trace() -> None:
    one = profile([operator("mm", 1, 2)])
    assert one.shift == pytest.approx(TRACE_SHIFT)
    assert one.events[-1].start == pytest.approx(1.0)
