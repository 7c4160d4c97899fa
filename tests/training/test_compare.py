"""`weft compare`: equal plans agree, and injected bugs are located by the first tensor that differs."""

import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.lab.families import family
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.checkpoint.model_config import read_config
from weft.cli import main
from weft.data import Prepared, Rows, prepare
from weft.errors import DataError, JobError
from weft.job import Job, Optimizer
from weft.parallel.experts.dispatch import dispatch
from weft.parallel.pipeline.runtime import PipelineRuntime as PipelineOfModel
from weft.parallel.pipeline.stage import Stage
from weft.parallel.pipeline.weight_gradients import DeferredMatmul
from weft.parallel.weights import LocalWeights
from weft.plan import Compute, Kernels, Parallel, Pipeline, Plan
from weft.training import compare as compare_module
from weft.training import compare_rank
from weft.training.compare import compare_folders, min_ranks
from weft.training.compare_records import Comparison, RecordedStep, RecordedTensor, Side, relative, tensor_file
from weft.training.forward_backward import forward_backward
from weft.training.session import Session, build_optimizer, open_session

SEQ_LEN = 16
DROPOUT = {"gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}}
FP64 = {"param_dtype": "fp64", "update": "fp64", "reduce_dtype": "fp64"}


def job_for(folder: Path, name: str = "llama", rows: int = 5, blocks: int = 2, **tables: dict[str, Any]) -> Job:
    """Job with a tiny model and rows of random tokens."""
    depth = {"n_layer" if name == "gpt2" else "num_hidden_layers": blocks}
    generator = np.random.default_rng(3)
    np.save(folder / "rows.npy", generator.integers(3, 96, (40, SEQ_LEN + 1), dtype=np.int32))
    job: dict[str, Any] = {
        "model": {"config": {**family(name), **DROPOUT.get(name, {}), **depth}},
        "data": {"source": "tokens", "path": str(folder / "rows.npy"), "seq_len": SEQ_LEN},
        "train": {"steps": 2, "global_batch_size": rows, "micro_batch_size": 8},
        "plan": {"parallel": {}, "precision": {"param_dtype": "fp32"}},
        "out": str(folder / "run"),
    }
    for table, values in tables.items():
        job[table] = {**job[table], **values}
    return Job.parse(job)


# Injected bugs


@contextmanager
def no_bug(rank: int) -> Iterator[None]:
    yield


@contextmanager
def norm_gradient_not_reduced(rank: int) -> Iterator[None]:
    """The gradient of the first norm of each block is not reduced over ranks."""

    def without_norm(unit: nn.Module, layouts: dict[str, Any], *others: Any) -> LocalWeights:
        return LocalWeights(unit, {k: v for k, v in layouts.items() if k != "input_layernorm.weight"}, *others)

    with mock.patch("weft.parallel.weights.LocalWeights", without_norm):
        yield


@contextmanager
def expert_ranks_swapped(rank: int) -> Iterator[None]:
    """Tokens for the experts of one rank are sent to the other rank."""

    def swapped(hidden: Any, index: Any, weights: Any, num_experts: int, *others: Any) -> Any:
        return dispatch(hidden, (index + num_experts // 2) % num_experts, weights, num_experts, *others)

    with mock.patch("weft.parallel.experts.dispatch.dispatch", swapped):
        yield


@contextmanager
def micro_batches_not_divided_by(rank: int) -> Iterator[None]:
    """The loss of each micro-batch is scaled as if it were the full step."""

    def too_large(model: Any, batches: Any, factor: float, *others: Any) -> torch.Tensor:
        return forward_backward(model, batches, factor * len(batches), *others)

    with mock.patch("weft.training.step.forward_backward", too_large):
        yield


@contextmanager
def parameter_forgotten(rank: int) -> Iterator[None]:
    """The optimizer lacks the final norm."""

    def without_norm(model: Any, settings: Any) -> torch.optim.Optimizer:
        model.model.norm.requires_grad_(False)
        optimizer = build_optimizer(model, settings)
        model.model.norm.requires_grad_(True)
        return optimizer

    with mock.patch("weft.training.session.build_optimizer", without_norm):
        yield


@contextmanager
def one_rank_off(rank: int) -> Iterator[None]:
    """Only rank 1 has a wrong gradient of a replicated weight; the gradient written by rank 0 is correct."""

    opened = open_session

    def spoil(*arguments: Any) -> Session:
        session = opened(*arguments)
        if rank == 1:
            session.model.model.layers[0].input_layernorm.weight.register_hook(lambda gradient: gradient * 1.5)
        return session

    with mock.patch(f"{__name__}.open_session", spoil):
        yield


@contextmanager
def received_for_another_micro_batch(rank: int) -> Iterator[None]:
    """A stage runs its second micro-batch on the hidden states of the first micro-batch."""
    run = Stage.forward_one_chunk
    first: list[torch.Tensor] = []

    def stale(self: Stage, micro_batch: int, *others: Any, **named: Any) -> Any:
        if micro_batch == 0 and 0 in self.inputs:
            first[:] = [tensor.clone() for tensor in self.inputs[0]]
        if micro_batch == 1 and 1 in self.inputs:
            self.inputs[1] = first
        return run(self, micro_batch, *others, **named)

    with mock.patch.object(Stage, "forward_one_chunk", stale):
        yield


@contextmanager
def tied_gradient_not_shared(rank: int) -> Iterator[None]:
    """The gradients of tied embedding and head are not summed."""
    with mock.patch.object(PipelineOfModel, "_sum_tied_gradients", return_value=None):
        yield


@contextmanager
def tied_copy_off(rank: int) -> Iterator[None]:
    """Only the head's copy of a tied weight has a wrong gradient."""
    share = PipelineOfModel._sum_tied_gradients

    def spoil(self: PipelineOfModel) -> None:
        share(self)
        if self.tied_copy is not None:
            self.tied_copy.grad *= 1.5  # type: ignore[operator]

    with mock.patch.object(PipelineOfModel, "_sum_tied_gradients", spoil):
        yield


@contextmanager
def late_gradients_computed_twice(rank: int) -> Iterator[None]:
    """The weight gradients of the first stage are doubled."""
    compute = DeferredMatmul.compute
    with mock.patch.object(DeferredMatmul, "compute", lambda self: compute(self) * (2 if rank == 0 else 1)):
        yield


def spoiling(spoil: Callable[[Session, list[int]], None]) -> Any:
    """Patch `open_session` so that `spoil` modifies the session; its second argument holds the number of updates so far."""
    opened = open_session

    def open_spoilt(*arguments: Any) -> Session:
        session, updates = opened(*arguments), [0]
        spoil(session, updates)
        session.optimizer.inner.register_step_post_hook(lambda *_: updates.__setitem__(0, updates[0] + 1))
        return session

    return mock.patch(f"{__name__}.open_session", open_spoilt)


def forward_wrong_from_step_3(rank: int) -> Any:
    """The output of the second block is 5 % too large after two updates."""

    def spoil(session: Session, updates: list[int]) -> None:
        block: Any = session.model.model.layers[1]  # type: ignore[attr-defined]
        block.mlp.register_forward_hook(lambda _, args, output: output * (1.05 if updates[0] >= 2 else 1.0))

    return spoiling(spoil)


def update_2_wrong(rank: int) -> Any:
    """The second update skips the final norm, so that losses differ from the third step on."""

    def spoil(session: Session, updates: list[int]) -> None:
        weight: Any = session.model.model.norm.weight  # type: ignore[attr-defined]

        def skip(*_: object) -> None:
            if updates[0] == 1:
                weight.grad = None

        session.optimizer.inner.register_step_pre_hook(skip)

    return spoiling(spoil)


def run_side(
    rank: int,
    world_size: int,
    job: Job,
    prepared: Prepared,
    folder: Path,
    steps: int,
    bug: Callable[[int], Any],
    recorded: int = 1,
) -> None:
    """`weft.training.compare_rank` in an existing process group."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("weft.training.session.connect", return_value=(rank, world_size, rank)))
        stack.enter_context(bug(rank))
        compare_rank.record(open_session(job, prepared), folder, steps, recorded)


def side(job: Job, folder: Path, bug: Callable[[int], Any] = no_bug) -> Path:
    folder.mkdir()
    prepared = prepare(job.data, model_folder=None, log=lambda text: None)
    run_ranks(min_ranks(job.plan), run_side, job, prepared, folder, 2, bug)
    return folder


def with_plan(job: Job, micro_batch: int = 8, pipeline: Pipeline = Pipeline(), **parallel: Any) -> Job:  # noqa: B008
    plan = Plan(parallel=Parallel(**parallel), pipeline=pipeline, precision=job.plan.precision)
    return job.model_copy(
        update={"plan": plan, "train": job.train.model_copy(update={"micro_batch_size": micro_batch})}
    )


def compare_sides(
    job: Job,
    folder: Path,
    a: dict[str, Any],
    b: dict[str, Any],
    bug: Callable[[int], Any] = no_bug,
    tolerance: float = 1e-4,
) -> Comparison:
    one, two = side(with_plan(job, **a), folder / "a"), side(with_plan(job, **b), folder / "b", bug)
    return compare_folders(one, two, tolerance)


ONE = {"zero": 0}
STAGES = {"pp": 2, "zero": 1, "micro_batch": 1, "pipeline": Pipeline(schedule="zb-h1")}
ZBV, INTERLEAVED = (Pipeline(schedule=name, virtual_stages=2) for name in ("zbv", "interleaved"))
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("llama", {"dp_shard": 2, "micro_batch": 2}),
    "no_sp": ("qwen3", {"tp": 2, "sp": False, "zero": 0}),
    "packed": ("phi3", {"tp": 2, "zero": 1}),
    "dropout": ("gpt2", {"tp": 2, "zero": 2, "micro_batch": 2}),
    "ring": ("llama", {"cp": 2, "zero": 3}),
    "ulysses": ("qwen3", {"cp": 2, "cp_ulysses": 2}),
    "tensor_ring": ("llama", {"tp": 2, "cp": 2, "micro_batch": 3}),
    "tensor_data": ("qwen3_moe", {"tp": 2, "dp_shard": 2, "ep": 2, "zero": 2}),
    "stages": ("llama", {"pp": 2, "zero": 1, "micro_batch": 2}),
    "stages_tied": ("qwen3", {"pp": 2, "zero": 0, "micro_batch": 1, "pipeline": Pipeline(schedule="zb-h1")}),
    "stages_data_dropout": ("gpt2", {"pp": 2, "dp_shard": 2, "micro_batch": 2}),
    "stages_tensor": ("qwen3_moe", {"pp": 2, "tp": 2, "ep": 2, "zero": 1, "micro_batch": 1, "pipeline": ZBV}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_plans_agree(layout: str, tmp_path: Path) -> None:
    """In float64, with negligible rounding; all tensors are recorded in order of comparison."""
    name, plan = LAYOUTS[layout]
    blocks = plan.get("pp", 2) * plan.get("pipeline", Pipeline()).stages_per_rank
    job = job_for(tmp_path, name, blocks=blocks, plan={"precision": FP64})
    found = compare_sides(job, tmp_path, ONE, plan, tolerance=1e-9)
    assert found.agrees, (found.first, found.steps)
    kinds = found.by_kind()
    names = [tensor.name for tensor in kinds["output"]]
    assert (len(names), names[-1]) == (blocks + 3, "lm_head")  # embedding, blocks, final norm, head
    assert len(kinds["gradient"]) == len(kinds["weight"]) >= 15
    assert [seen.name for seen in Side.read(tmp_path / "a").tensors] == [
        seen.name for seen in Side.read(tmp_path / "b").tensors
    ]
    assert load_file(tensor_file(tmp_path / "b", "output", "lm_head", 4))["tensor"].shape == (SEQ_LEN, 96)
    assert not tensor_file(tmp_path / "b", "output", "lm_head", 5).exists()


def test_pipelines_agree_with_each_other(tmp_path: Path) -> None:
    """Different schedules and partitions; both ends of a tied model on one rank or on two."""
    job = job_for(tmp_path, "qwen3", rows=4, blocks=4, plan={"precision": FP64})
    plans = [
        {"pp": 2, "pipeline": ZBV, "zero": 0},
        {"pp": 2, "pipeline": INTERLEAVED, "zero": 3},
        {"pp": 4, "zero": 1},
        {"pp": 2, "tp": 2, "pipeline": Pipeline(stage_blocks=(1, 3))},
    ]
    folders = [side(with_plan(job, micro_batch=1, **plan), tmp_path / str(number)) for number, plan in enumerate(plans)]
    for folder in folders[1:]:
        found = compare_folders(folders[0], folder, 1e-9)
        assert found.agrees, (folder.name, found.first, found.steps)


@pytest.mark.parametrize(
    ("bug", "plan", "first", "wrong"),
    [
        (norm_gradient_not_reduced, {"tp": 2}, "gradient of model.layers.1.input_layernorm.weight", 2),
        (expert_ranks_swapped, {"ep": 2}, "output of model.layers.0", 4),
        (micro_batches_not_divided_by, {"zero": 0, "micro_batch": 2}, "gradient of lm_head.weight", None),
        (parameter_forgotten, ONE, "weight of model.norm.weight", 1),
        (one_rank_off, {"tp": 2, "sp": False, "zero": 0}, "gradient of model.layers.0.input_layernorm.weight", 1),
        (received_for_another_micro_batch, STAGES, "output of model.layers.1", 3),
        (tied_gradient_not_shared, STAGES, "gradient of model.embed_tokens.weight", 1),
        (tied_copy_off, STAGES, "gradient of model.embed_tokens.weight", 1),
        (late_gradients_computed_twice, STAGES, "gradient of model.layers.0.mlp.down_proj.weight", 7),
    ],
    ids=["norm", "dispatch", "accumulation", "forgotten", "one_rank", "stale", "tied", "tied_copy", "twice"],
)
def test_injected_bug_is_located(
    bug: Callable[[int], Any], plan: dict[str, Any], first: str, wrong: int | None, tmp_path: Path
) -> None:
    """In float32 with the default tolerance. `wrong`: number of differing tensors of the first tensor's kind; None: all."""
    name = "qwen3_moe" if "ep" in plan else "qwen3" if "pp" in plan else "llama"
    found = compare_sides(job_for(tmp_path, name), tmp_path, ONE, plan, bug)
    assert not found.agrees
    assert found.first is not None
    assert str(found.first).startswith(f"{first}: ")
    kind = found.by_kind()[found.first.kind]
    assert sum(tensor.exceeds for tensor in kind) == (len(kind) if wrong is None else wrong)
    if bug in (one_rank_off, tied_copy_off):  # the tensor written by rank 0 is correct
        assert found.first.note == "the ranks of B hold different values"


# Compare two folders


def write_side(folder: Path, tensors: dict[tuple[Any, str], list[torch.Tensor]], loss: float = 1.0) -> Path:
    """Write the folder of a side with given pieces and a learning rate of 0.01."""
    folder.mkdir(parents=True)
    recorded = []
    for (kind, name), pieces in tensors.items():
        recorded.append(RecordedTensor(kind, name, max(compare_rank._largest(piece) for piece in pieces)))
        for number, piece in enumerate(pieces):
            compare_rank._save(piece, tensor_file(folder, kind, name, number))
    Side([RecordedStep(loss, 1.0)], 0.01, recorded).write(folder)
    return folder


def pair(folder: Path, a: dict[Any, list[torch.Tensor]], b: dict[Any, list[torch.Tensor]], **loss: float) -> Comparison:
    return compare_folders(write_side(folder / "a", a), write_side(folder / "b", b, **loss), 1e-4)


def test_index_of_the_largest_difference(tmp_path: Path) -> None:
    rows = [torch.ones(4, 3), torch.ones(4, 3)]
    other = [row.clone() for row in rows]
    other[1][2, 1] = 1.5
    first = pair(tmp_path, {("output", "m"): rows}, {("output", "m"): other}).first
    assert first is not None
    assert (first.index, first.size) == ((1, 2, 1), pytest.approx(0.5 / 1.5))
    assert str(first) == "output of m: off by 3.3e-01 of its largest value, tolerance 1.0e-04, at [1, 2, 1]"


def test_nonfinite_values(tmp_path: Path) -> None:
    """They differ if only one side has them, and are equal if both sides have the same."""
    plain, spoilt = torch.ones(3), torch.tensor([1.0, math.nan, math.inf])
    assert pair(tmp_path / "1", {("output", "m"): [spoilt]}, {("output", "m"): [spoilt]}).agrees
    first = pair(tmp_path / "2", {("output", "m"): [plain]}, {("output", "m"): [spoilt]}).first
    assert str(first) == "output of m: finite on one side only, at [0, 1]"
    assert not pair(tmp_path / "3", {}, {}, loss=math.nan).agrees


def test_missing_tensors_and_different_shapes(tmp_path: Path) -> None:
    one, two = {("gradient", "w"): [torch.ones(3)]}, {("gradient", "w"): [torch.ones(2)]}
    assert str(pair(tmp_path / "1", one, two).first) == "gradient of w: shape (3,) in A, (2,) in B"
    assert str(pair(tmp_path / "2", one, {}).first) == "gradient of w: present in A only"
    rows = {("output", "m"): [torch.ones(3)] * 2}
    assert (
        str(pair(tmp_path / "3", rows, {("output", "m"): [torch.ones(3)]}).first) == "output of m: 2 rows in A, 1 in B"
    )


def test_gradients_of_rounding_errors_are_ignored(tmp_path: Path) -> None:
    """The bias of a key does not change the softmax: its gradient is noise, from which Adam makes full updates."""
    large, noise = torch.full((3,), 1.0), torch.full((3,), 3e-8)
    a = {("gradient", "w"): [large], ("gradient", "b"): [noise], ("weight", "b"): [torch.full((3,), 0.01)]}
    b = {("gradient", "w"): [large], ("gradient", "b"): [-noise], ("weight", "b"): [torch.full((3,), -0.01)]}
    assert pair(tmp_path / "1", a, b).agrees
    b[("gradient", "b")] = [torch.full((3,), 1e-5)]
    assert str(pair(tmp_path / "2", a, b).first).startswith("gradient of b: ")


def test_missing_update_of_a_weight(tmp_path: Path) -> None:
    """The difference is relative to the learning rate: 1 % of an update is far below 1 % of the weight."""
    gradient, weight = torch.full((3,), 1e-3), torch.full((3,), 2.0)
    a = {("gradient", "w"): [gradient], ("weight", "w"): [weight]}
    b = {("gradient", "w"): [gradient], ("weight", "w"): [weight - 1e-4]}
    first = pair(tmp_path, a, b).first
    assert first is not None
    assert first.kind == "weight"
    assert first.size == pytest.approx(1e-2, rel=1e-2)


def test_losses_differ_with_equal_tensors(tmp_path: Path) -> None:
    found = pair(tmp_path, {}, {}, loss=1.001)
    assert (found.first, found.first_step, found.agrees) == (None, 1, False)
    assert relative(math.inf, math.nan) == 0
    assert relative(math.inf, 1.0) == math.inf
    assert relative(0.0, 0.0) == 0


# Command and launch


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({}, 1),
        ({"tp": 2, "cp": 2}, 4),
        ({"ep": 2}, 2),
        ({"ep": 2, "tp": 2}, 2),
        ({"ep": 4, "tp": 2}, 4),
        ({"dp_shard": 3, "dp_replicate": 2}, 6),
        ({"ep": 4, "dp_replicate": 2, "zero": 0}, 4),
        ({"pp": 3, "ep": 4, "tp": 2}, 12),
    ],
)
def test_min_ranks(parallel: dict[str, Any], ranks: int) -> None:
    plan = Plan(parallel=Parallel(**parallel))
    assert min_ranks(plan) == ranks
    resolved(plan, ranks)


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, job: Job, *arguments: str
) -> tuple[int, str]:
    """Exit code and output of `weft compare`."""
    path = Path(job.out).parent / "job.toml"
    path.write_text(job.to_toml())
    monkeypatch.setattr(sys, "argv", ["weft", "compare", str(path), *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return int(stopped.value.code or 0), printed.out + printed.err


def in_the_pool(bug: Callable[[int], Any]) -> Callable[..., None]:
    """Replacement of `launch` that runs ranks of the pool; side B has the bug."""

    def launch(argv: list[str], *, ranks: int, log_dir: Path, use_forkserver: bool) -> None:
        folder, steps, recorded = Path(argv[-3]), int(argv[-2]), int(argv[-1])
        job, prepared = Job.load(folder / "job.toml"), Prepared.from_json((folder / "prepared.json").read_text())
        run_ranks(ranks, run_side, job, prepared, folder, steps, bug if folder.name == "b" else no_bug, recorded)

    return launch


PLANS = ("--set-a=plan.parallel.zero=0", "--set-b=plan.parallel.tp=2")


@pytest.mark.must("command: compare")
def test_command_locates_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for(tmp_path)
    monkeypatch.setattr(compare_module, "launch", in_the_pool(no_bug))
    code, text = command(capsys, monkeypatch, job, *PLANS, "--steps", "1", "--rows", "3")
    assert code == 0
    assert "The plans agree" in text
    assert "B: 2 ranks: tp 2, sp true, zero 0, fp32 forward" in text
    assert len(list((tmp_path / "run.compare" / "a" / "output" / "lm_head").iterdir())) == 3
    monkeypatch.setattr(compare_module, "launch", in_the_pool(norm_gradient_not_reduced))
    code, text = command(capsys, monkeypatch, job, *PLANS)
    assert code == 1
    assert "The first tensor that differs is the gradient of model.layers.1.input_layernorm.weight" in text
    code, text = command(capsys, monkeypatch, job, *PLANS, "--tolerance", "10")
    assert code == 0


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_side_a_is_the_untouched_model_by_default(
    name: str, attention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its losses are those of the library, and a fault of the plan in the file is found without any key."""
    plan = {
        "parallel": {"tp": 2, "zero": 2},
        "memory": {"recompute": ["block"]},
        "compute": {"kernels": {"rms_norm": "reference"}},
    }
    job = job_for(tmp_path, name, plan=plan)
    monkeypatch.setattr(compare_module, "launch", in_the_pool(no_bug))
    code, text = command(capsys, monkeypatch, job, "--steps", "1")
    assert code == 0, text
    assert "A: 1 rank: zero 0, fp32 forward" in text
    assert "B: 2 ranks: tp 2, sp true, zero 2" in text
    side_a = Job.load(tmp_path / "run.compare" / "a" / "job.toml").plan
    compute = Compute(attention=attention, kernels=Kernels(**dict.fromkeys(Kernels.model_fields, "reference")))
    untouched = Plan(parallel=Parallel(zero=0), precision=job.plan.precision, compute=compute)
    assert resolved(side_a, 1) == resolved(untouched, 1)
    torch.manual_seed(job.model.init_seed)
    model = AutoModelForCausalLM.from_config(read_config(job.model))
    spans = prepare(job.data, model_folder=None, log=str).train
    rows = Rows(spans, seq_len=SEQ_LEN, packing=True, shuffle=True, seed=job.train.seed)
    batch = torch.stack([rows[number].tokens.long() for number in range(5)])
    loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
    assert Side.read(tmp_path / "run.compare" / "a").steps[0].loss == pytest.approx(loss.item(), rel=1e-5)
    monkeypatch.setattr(compare_module, "launch", in_the_pool(norm_gradient_not_reduced))
    code, text = command(capsys, monkeypatch, job, "--steps", "1")
    assert code == 1
    assert "input_layernorm.weight" in text


@pytest.mark.parametrize(
    ("bug", "step", "steps", "first", "runs"),
    [
        (forward_wrong_from_step_3, 3, 4, "output of model.layers.1: ", 3),
        (update_2_wrong, 2, 4, "weight of model.norm.weight: ", 2),
    ],
)
def test_fault_in_a_later_step_is_located(
    bug: Callable[[int], Any],
    step: int,
    steps: int,
    first: str,
    runs: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default the step before the first difference is compared, then the step of the difference; with --step that step."""
    optimizer = Optimizer(lr=0.02, warmup_steps=0)  # large enough for one update of one norm to change the loss
    job = job_for(tmp_path, train={"steps": 5}).model_copy(update={"optimizer": optimizer})
    launches: list[list[str]] = []

    def launch(argv: list[str], **others: Any) -> None:
        launches.append(argv)
        in_the_pool(bug)(argv, **others)

    monkeypatch.setattr(compare_module, "launch", launch)
    code, text = command(capsys, monkeypatch, job, *PLANS, "--steps", str(steps))
    assert code == 1
    assert f"The first tensor of step {step} that differs is the {first}" in text
    assert f"tensors of step {step}" in text
    assert len(launches) == 2 * runs
    code, text = command(capsys, monkeypatch, job, *PLANS, "--steps", "1", "--step", str(step))
    assert code == 1
    assert f"The first tensor of step {step} that differs is the {first}" in text
    assert len(launches) == 2 * runs + 2


@pytest.mark.parametrize(("name", "plan"), [("gpt2", {"tp": 2, "zero": 1}), ("qwen3", STAGES)], ids=["tp", "pp"])
def test_equal_plans_agree_at_a_later_step(name: str, plan: dict[str, Any], tmp_path: Path) -> None:
    job = job_for(tmp_path, name, train={"steps": 3})
    prepared = prepare(job.data, model_folder=None, log=lambda text: None)
    for folder, layout in (("a", ONE), ("b", plan)):
        (tmp_path / folder).mkdir()
        one = with_plan(job, **layout)
        run_ranks(min_ranks(one.plan), run_side, one, prepared, tmp_path / folder, 3, no_bug, 3)
    found = compare_folders(tmp_path / "a", tmp_path / "b", 1e-4)
    assert found.agrees, (found.first, found.steps)
    assert found.step == 3
    assert len(found.steps) == 3
    assert len(found.by_kind()["weight"]) == len(found.by_kind()["gradient"]) >= 15


def test_bad_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for(tmp_path)
    (tmp_path / "other" / "mine").mkdir(parents=True)
    monkeypatch.setattr(compare_module, "launch", in_the_pool(no_bug))
    refusals = {
        ("--set-b", "train.seed=3"): "train.seed = 0 in A, 3 in B",
        ("--set-a", "plan.parallel.zero=0"): "both sides are the same plan: 1 rank: zero 0",
        (
            *("--set-a", "plan.parallel.tp=2", "--set-a", "plan.parallel.zero=0"),
            *("--set-b", "plan.parallel.tp=2", "--set-b", "plan.parallel.zero=0"),
        ): "both sides are the same plan: 2 ranks",
        (
            *("--set", "plan.parallel.zero=0"),
            *("--set", "plan.compute={attention='sdpa', kernels='reference'}"),
        ): "side A is the",
        ("--set-a", "plan.parallel.tpp=3"): "did you mean plan.parallel.tp?",
        ("--set-b", "plan.parallel.tp=2", "--nproc-per-node-b", "3"): "3 ranks cannot be divided",
        ("--set-a", "plan.parallel.pp=3"): "2 blocks cannot fill 3 stages",
        ("--set-b", "plan.parallel.pp=3"): "2 blocks cannot fill 3 stages",
        ("--rows", "0"): "train.global_batch_size = 0",
        ("--step", "9"): "step 9 of a job with 2 steps",
        ("--out", str(tmp_path / "other")): "has content other than a comparison",
    }
    for arguments, words in refusals.items():
        code, text = command(capsys, monkeypatch, job, *arguments)
        assert code == 2, text
        assert words in text
    assert not (tmp_path / "run.compare").exists()
    assert (tmp_path / "rows.npy").exists()


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: mock.Mock(free=200_000))
    with pytest.raises(DataError, match=r"0\.0 GB are free"):
        compare_module.compare(job, with_plan(job, zero=1), tmp_path / "out")
    with pytest.raises(JobError, match="content other than"):
        compare_module.compare(job, with_plan(job, zero=1), tmp_path)


def test_launched_ranks(tmp_path: Path) -> None:
    """In bf16; one side is a pipeline."""
    job = job_for(tmp_path, plan={"precision": {"param_dtype": "bf16"}})
    jobs = with_plan(job, zero=3), with_plan(job, micro_batch=2, pp=2)
    found = compare_module.compare(*jobs, tmp_path / "out", steps=2)
    assert found.agrees
    assert found.tolerance == 5e-2
    assert 0 < max(tensor.size for tensor in found.tensors if tensor.kind == "gradient") < 5e-2
