"""Choice of the attention kernel: the table of times, real measurements on CPU, its context, and whole runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import _registry
from torch.profiler import profile

from tests.lab.jobs import write_job
from tests.lab.pool import RankError, run_ranks
from tests.lab.runs import observe
from weft.cli.anatomy import anatomy
from weft.compute import attention_choice
from weft.compute.attention_choice import (
    AttentionChoice,
    AttentionShape,
    Timings,
    candidates,
    choose_attention,
    named_choice,
    time_attention,
    use_attention,
)
from weft.compute.sequences import VarlenKernel
from weft.compute.varlen_blocks import CPU_BLOCKS
from weft.device.cpu import Cpu
from weft.device.detect import detect
from weft.errors import PlanError
from weft.job import Job
from weft.parallel.runtime import runtime
from weft.parallel.sequence.varlen import check_attention
from weft.plan import Compute, Kernels, Plan
from weft.training import attention
from weft.training.metrics import Attempt, read_lines, to_line
from weft.training.session import Session

CPU = torch.device("cpu")
FLASH, MATH = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"
SHAPE = AttentionShape(((60, 4), (64,)), 4, 2, 16, 16, torch.float32, None, None)


@pytest.mark.parametrize(
    ("rows", "documents", "expected"),
    [
        ({"reference": 1.0, "flash": 0.9, "cudnn": 0.8, "FA3": 0.7}, {}, AttentionChoice("FA3", "FA3")),
        ({"reference": 1.0, "flash": 1.1, "cudnn": 0.8, "FA3": 0.9}, {}, AttentionChoice("cudnn", "flash")),
        ({"reference": 1.0, "flash": 0.97, "cudnn": 0.96}, {}, AttentionChoice("reference", "flash")),  # too close
        ({"efficient": 1.0}, {}, AttentionChoice("efficient", "flash")),
        ({}, {}, AttentionChoice("reference", "flash")),
        # Documents choose the implementation that full rows also have.
        ({"reference": 1.0, "cudnn": 0.8, "FA3": 0.7}, {"flash": 1.0, "FA3": 0.6}, AttentionChoice("FA3", "FA3")),
        ({"reference": 1.0, "cudnn": 0.6, "FA3": 0.7}, {"flash": 1.0, "FA3": 0.6}, AttentionChoice("cudnn", "FA3")),
        ({"reference": 1.0, "cudnn": 0.8, "FA3": 0.7}, {"flash": 1.0, "FA3": 0.99}, AttentionChoice("cudnn", "flash")),
        ({}, {"flash": 1.0, "FA3": 0.8, "FA4": 0.7}, AttentionChoice("FA4", "FA4")),
    ],
)
def test_the_fastest_kernel_is_chosen(
    rows: dict[str, float], documents: dict[str, float], expected: AttentionChoice
) -> None:
    assert choose_attention(rows, documents) == expected


def test_text_has_kernels_times_and_failures() -> None:
    timings = Timings({"reference": 0.002, "cudnn": 0.001}, {"flash": 0.003}, {"FA3": "No module named 'x'"})
    found = choose_attention(timings.rows, timings.documents).text(timings)
    assert found == (
        "cudnn for rows, flash for documents, by time of one layer: rows: reference 2 ms, cudnn 1 ms; "
        "documents: flash 3 ms; no FA3: No module named 'x'"
    )


@pytest.mark.parametrize("kernel", [None, CPU_BLOCKS])
def test_kernels_of_the_cpu_are_timed(kernel: VarlenKernel | None) -> None:
    random = torch.get_rng_state()
    shape = SHAPE._replace(kernel=kernel)
    found = time_attention(shape, ["reference", "flash", "math", "cudnn", "FA3"], detect(), CPU)
    assert set(found.rows) == {"reference", "flash", "math"}
    assert set(found.documents) == ({"flash"} if kernel else set())
    assert all(seconds > 0 for seconds in (found.rows | found.documents).values())
    assert set(found.failures) == {"cudnn", "FA3"}
    assert "flash_attn_interface" in found.failures["FA3"]
    assert torch.equal(torch.get_rng_state(), random)


def test_the_mask_is_that_of_documents_and_windows() -> None:
    seen = SHAPE._replace(documents=((2, 3),), window=2).mask(CPU)[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert not SHAPE._replace(documents=((5,), (5,)), window=5).needs_mask
    assert SHAPE._replace(documents=((5,), (5,)), window=4).needs_mask


def operators(run: Any) -> set[str]:
    """Operators of attention in a forward and backward."""
    q = torch.randn(2, 4, 64, 16, requires_grad=True)
    with profile() as profiler:
        run(q)
    return {event.key for event in profiler.key_averages() if event.key in (FLASH, MATH)}


def recomputed(q: torch.Tensor) -> None:
    """Attention whose backward runs its forward again."""
    torch.utils.checkpoint.checkpoint(
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), q, use_reentrant=False
    ).sum().backward()


def test_the_context_sets_the_back_end_and_restores_it() -> None:
    assert operators(recomputed) == {FLASH}
    with use_attention(named_choice("math")):
        assert operators(recomputed) == {MATH}
    for name in ("reference", "flash"):
        with use_attention(named_choice(name)):
            assert operators(recomputed) == {FLASH}
    assert operators(recomputed) == {FLASH}


def test_compiled_code_keeps_the_back_end_of_its_first_call() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), backend=backend)
    for _ in range(3):
        with use_attention(named_choice("math")):
            assert operators(lambda q: compiled(q).sum().backward()) == {MATH}
    assert len(graphs) == 1  # torch guards neither the back ends nor their order


class Handle:
    """Handle of a stand-in for an implementation of the flash operators."""

    active: list[str]

    def __init__(self, active: list[str], name: str) -> None:
        self.active, self.name = active, name
        active.append(name)

    def remove(self) -> None:
        self.active.remove(self.name)


@contextmanager
def stand_ins(*names: str) -> Iterator[list[str]]:
    """Register implementations without kernels; yields the names of those that are active."""
    active: list[str] = []
    with mock.patch.dict(_registry._FLASH_ATTENTION_IMPLS):
        for name in names:
            torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda name=name: Handle(active, name))
        yield active


def test_implementations_are_active_while_they_are_timed_or_used() -> None:
    seen: list[tuple[str, ...]] = []

    with stand_ins("one", "two") as active:

        def forward(*arguments: Any, **options: Any) -> Any:
            seen.append(tuple(active))
            return CPU_BLOCKS.forward(*arguments, **options)

        shape = SHAPE._replace(kernel=CPU_BLOCKS._replace(forward=forward))
        found = time_attention(shape, ["reference", "flash", "one", "two"], detect(), CPU)
        assert set(found.documents) == {"flash", "one", "two"}
        assert set(seen) == {(), ("one",), ("two",)}
        assert active == []
        with use_attention(AttentionChoice("cudnn", "two")):
            assert active == ["two"]
        assert active == []


def test_candidates_are_those_that_torch_has_and_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert candidates(detect()) == ["flash"]  # nothing to choose on a CPU
    monkeypatch.setattr(Cpu, "attention_kernels", ("flash", "efficient", "math", "cudnn", "FA3", "FA9"))
    assert candidates(detect()) == ["flash", "efficient", "cudnn", "FA3"]
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "mem_efficient_sdp_enabled", lambda: False)
    assert candidates(detect()) == ["flash", "FA3"]


def test_kernels_of_another_device_are_refused() -> None:
    for name in ("auto", "reference", "flash", "math"):
        check_attention(Plan(compute=Compute(kernels=Kernels(attention=name))), detect())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="attention = 'FA3' on cpu") as caught:
        check_attention(Plan(compute=Compute(kernels=Kernels(attention="FA3"))), detect())
    assert caught.value.rule == "kernels for cpu: flash, math"


def test_documents_are_read_from_positions() -> None:
    positions = torch.tensor([[3, 4, 0, 1, 0], [0, 1, 2, 3, 4]])  # the first row begins inside of a document
    assert attention.documents_of(positions) == ((2, 2, 1), (5,))


def _agreed(rank: int, world_size: int) -> Timings:
    own = [
        Timings({"reference": 1.0, "cudnn": 3.0, "FA3": 1.0}, {"flash": 2.0, "FA3": 1.0}, {}),
        Timings({"reference": 2.0, "cudnn": 1.0}, {"flash": 1.0}, {"FA3": "no kernel"}),
    ]
    return attention.agree(own[rank])


def test_ranks_agree_on_the_slowest_time_and_on_failures() -> None:
    expected = Timings({"reference": 2.0, "cudnn": 3.0}, {"flash": 2.0}, {"FA3": "no kernel"})
    assert run_ranks(2, _agreed) == [expected, expected]


# Runs of `weft train`: a CPU measures its two back ends as a GPU does its own.


def _measure_here(session: Session) -> None:
    """Let this rank choose between the back ends of the CPU, "math" being much faster."""
    real = attention.time_attention

    def timed(*arguments: Any, **options: Any) -> Timings:
        found = real(*arguments, **options)
        return replace_time(found, "math", found.rows["reference"] / 10)

    for name, value in (("candidates", lambda device: ["flash", "math"]), ("time_attention", timed)):
        mock.patch.object(attention, name, value).start()


def replace_time(timings: Timings, name: str, seconds: float) -> Timings:
    return timings._replace(rows=timings.rows | {name: seconds})


def _end_measurement(session: Session) -> Any:
    mock.patch.stopall()
    return torch.backends.cuda.flash_sdp_enabled()


def test_a_run_measures_reports_and_records_its_kernel(tmp_path: Path) -> None:
    plan = {"compute": {"attention": "sdpa"}}
    job = Job.load(write_job(tmp_path, plan=plan, train={"steps": 2}))
    run = observe(job, 2, fault=_measure_here, probe=_end_measurement)
    (line,) = (line for line in run.printed[0].splitlines() if line.startswith("attention"))
    assert line.startswith("attention   math for rows, by time of one layer: rows: reference ")
    assert "attention" not in run.printed[1]
    (attempt,) = read_lines(run.folder / "attempts.jsonl", Attempt)
    assert attempt.attention.startswith("math for rows, by time")
    assert attempt.measured_kernels == ("math", "flash")
    assert run.facts == [True, True]


def _earlier(rank: int, world_size: int, out: str, names: list[list[str]]) -> Any:
    found = attention.earlier_choice(Path(out), names[rank])
    return found and tuple(found)


def test_a_run_that_is_continued_keeps_its_kernels(tmp_path: Path) -> None:
    lines = [
        Attempt(0, 1.0, 0, 2, 2, ""),
        Attempt(1, 2.0, 4, 2, 2, "", "", ("math", "FA3")),
        Attempt(2, 3.0, 5, 2, 2, ""),
    ]
    (tmp_path / "attempts.jsonl").write_text("".join(to_line(each) for each in lines))
    both, one = ["flash", "math", "FA3"], ["flash", "math"]
    assert run_ranks(2, _earlier, str(tmp_path), [both, both]) == [("math", "FA3")] * 2
    assert run_ranks(2, _earlier, str(tmp_path), [both, one]) == [None] * 2
    (tmp_path / "attempts.jsonl").write_text("damaged\n{}\n")
    assert run_ranks(2, _earlier, str(tmp_path), [both, both]) == [None] * 2
    (tmp_path / "attempts.jsonl").unlink()
    assert run_ranks(2, _earlier, str(tmp_path), [both, both]) == [None] * 2


def _graphs(session: Session) -> int:
    compiled = runtime(session.model).compiled
    assert compiled is not None
    return compiled.graphs


def _without_inductor(session: Session) -> None:
    torch._dynamo.reset()
    compiled = runtime(session.model).compiled
    assert compiled is not None
    compiled.lower = lambda graph, inputs: graph.forward


def test_compiled_blocks_have_as_many_graphs_as_without_the_context(tmp_path: Path) -> None:
    graphs = []
    for name in ("reference", "math"):
        plan = {"compute": {"attention": "sdpa", "compile": "blocks", "kernels": {"attention": name}}}
        run = observe(Job.load(write_job(tmp_path, plan=plan)), 1, fault=_without_inductor, probe=_graphs)
        graphs.append(run.facts[0])
        assert len({row.compiled_regions for row in run.metrics}) == 1
    assert graphs[0] == graphs[1] > 0


def test_anatomy_times_one_row_where_there_are_several_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    job = write_job(tmp_path)
    anatomy(job)
    assert "timed at the start of a run on cuda; on cpu torch has nothing to choose" in capsys.readouterr().out
    monkeypatch.setattr(attention_choice, "candidates", lambda device: ["flash", "math"])
    anatomy(job)
    assert "for documents, by time of one layer: rows: reference " in capsys.readouterr().out


def test_a_model_that_does_not_use_the_kernel_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 300, "attn_pdrop": 0.1}
    plan = {"compute": {"kernels": {"attention": "math"}}}
    job = Job.load(write_job(tmp_path, model={"config": config}, plan=plan, train={"steps": 1}))
    with pytest.raises(RankError, match="without attention dropout"):
        observe(job, 1)
