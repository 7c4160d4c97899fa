"""Whole runs that are interrupted, spoilt and resumed, on ranks of the pool: the same losses, or a culprit by name."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.lab.checkpoints import tensors_of
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import RankError
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import folder_of, list_checkpoints, step_of
from weft.checkpoint.manifest import read_manifest
from weft.data import Row, Rows
from weft.job import Job
from weft.train.metrics import read_metrics
from weft.train.session import Session

MODEL = {**family("qwen3_moe"), "vocab_size": 300}  # for every axis
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"zero": 0}),
    "zero 3 on 2": (2, {"zero": 3}),
    "zero 3 on 4": (4, {"zero": 3}),
    "zero 0 on 3": (3, {"zero": 0}),
    "zero 1, dp_replicate 2": (4, {"zero": 1, "dp_replicate": 2}),
    "tp2 x dp2": (4, {"tp": 2}),
    "pp2 x dp2": (4, {"pp": 2}),
    "ep2 x dp2": (4, {"ep": 2, "dp_replicate": 2}),
    "cp2 x tp2": (4, {"cp": 2, "tp": 2}),
}
ORDER = ("zero 3 on 4", "zero 3 on 2", "one rank", "tp2 x dp2", "pp2 x dp2", "ep2 x dp2", "zero 0 on 3", "cp2 x tp2")
"""dp 4, 2, 1, then other axes."""
STEPS = 12


def job_of(folder: Path, layout: str, out: str, **tables: dict[str, Any]) -> tuple[Job, int]:
    ranks, parallel = LAYOUTS[layout]
    settings: dict[str, dict[str, Any]] = {
        "model": {"config": MODEL},
        "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1},
        "plan": {"parallel": parallel, "precision": {"param_dtype": "fp32"}},
        "optimizer": {"lr": 1e-2, "eps": 1e-3},
        "checkpoint": {"every": 2},
    }
    for name, table in tables.items():
        settings[name] = {**settings.get(name, {}), **table}
    return Job.load(write_job(folder, **settings), [f"out={folder / out}"]), ranks


def losses_of(out: Path) -> list[float]:
    return [row.loss for row in read_metrics(out / "metrics.jsonl")]


# Troubles, at module level so that they can be sent to ranks


def on_step(session: Session, step: int, do: Any) -> None:
    """Do something after the update of a step."""
    count = session.position.step

    def look(*_: object) -> None:
        nonlocal count
        count += 1
        if count == step:
            do()

    session.optimizer.register_step_post_hook(look)


def stop_after_5(session: Session) -> None:
    on_step(session, 5, lambda: signal.raise_signal(signal.SIGTERM))


def stop_after_2_more(session: Session) -> None:
    on_step(session, session.position.step + 2, lambda: signal.raise_signal(signal.SIGTERM))


def stop_after_5_more(session: Session) -> None:
    on_step(session, session.position.step + 5, lambda: signal.raise_signal(signal.SIGTERM))


IN_SWEEP = [
    pytest.param(layout, marks=pytest.mark.sweep) for layout in ("ep2 x dp2", "zero 3 on 4", "tp2 x dp2", "zero 0 on 3")
]


@pytest.mark.parametrize("layout", ["pp2 x dp2", *IN_SWEEP])
def test_the_same_layout_goes_on_bit_by_bit(layout: str, tmp_path: Path) -> None:
    whole, _ = train_in_the_pool(*job_of(tmp_path, layout, "whole"))
    job, ranks = job_of(tmp_path, layout, "parts")
    parts, _ = train_in_the_pool(job, ranks, trouble=stop_after_5)
    assert [step_of(path) for path in list_checkpoints(parts)] == [5, 4]
    _, printed = train_in_the_pool(job, ranks, resume="auto")
    assert f"going on after step 5, from {folder_of(parts, 5)}" in printed[0]
    assert all("going on" not in text for text in printed[1:])
    for one, other in zip(read_metrics(whole / "metrics.jsonl"), read_metrics(parts / "metrics.jsonl"), strict=True):
        assert (one.loss, one.grad_norm, one.learning_rate) == (other.loss, other.grad_norm, other.learning_rate)
    assert [path.name for path in folder_of(whole, STEPS).iterdir()] == [
        path.name for path in folder_of(parts, STEPS).iterdir()
    ]
    for path in folder_of(whole, STEPS).glob("*.safetensors"):  # weights, optimizer, generators
        assert path.read_bytes() == (folder_of(parts, STEPS) / path.name).read_bytes()
    assert (whole / "export/model.safetensors").read_bytes() == (parts / "export/model.safetensors").read_bytes()


DROPOUT = {**family("gpt2"), "vocab_size": 300, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "dropout": {"model": {"config": DROPOUT}},
    "loss scale": {"plan": {"precision": {"param_dtype": "fp16", "loss_scale": "dynamic"}}},
    "bf16 weights": {"plan": {"precision": {"param_dtype": "bf16", "update": "bf16"}}},
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", OTHERS)
def test_what_else_must_go_on_bit_by_bit(kind: str, tmp_path: Path) -> None:
    whole, _ = train_in_the_pool(*job_of(tmp_path, "zero 3 on 2", "whole", **OTHERS[kind]))
    job, ranks = job_of(tmp_path, "zero 3 on 2", "parts", **OTHERS[kind])
    for resume in (None, "auto"):
        parts, _ = train_in_the_pool(job, ranks, resume=resume, trouble=None if resume else stop_after_5)
    rows, others = (read_metrics(folder / "metrics.jsonl") for folder in (whole, parts))
    for one, other in zip(rows, others, strict=True):
        assert (one.loss, one.grad_norm, one.loss_scale) == (other.loss, other.grad_norm, other.loss_scale)
    assert tensors_equal(whole, parts)


def test_the_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    """It was halved before the interruption: it does not begin anew."""
    tables = {**OTHERS["loss scale"], "optimizer": {"lr": 1e-2, "eps": 1e-3}}
    job, ranks = job_of(tmp_path, "zero 3 on 2", "run", **tables)
    out, _ = train_in_the_pool(job, ranks, trouble=overflow_and_stop)
    assert read_manifest(list_checkpoints(out)[0]).position.loss_scale.value == 2.0**15
    train_in_the_pool(job, ranks, resume="auto")
    rows = read_metrics(out / "metrics.jsonl")
    assert [row.step for row in rows if row.skipped] == [2]
    assert {row.loss_scale for row in rows[2:]} == {2.0**15}


def overflow_and_stop(session: Session) -> None:
    """The gradient of step 2 is beyond fp16 on one rank; the run ends after step 5."""
    on_step(session, 4, lambda: signal.raise_signal(signal.SIGTERM))  # updates: one was left out
    if session.rank == 1:
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        def overflow(module: Any, _: object) -> None:
            module.weight.register_hook(lambda gradient: gradient * float("inf") if forwards in (3, 4) else gradient)

        session.model.register_forward_pre_hook(count)
        session.model.get_submodule("model.layers.0.self_attn.q_proj").register_forward_pre_hook(overflow)


def tensors_equal(one: Path, other: Path) -> bool:
    """Of the last checkpoints of two runs, all of them."""
    mine, theirs = (tensors_of(list_checkpoints(out)[0]) for out in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.sweep  # eight restarts, each on another layout
def test_every_restart_may_have_another_layout(tmp_path: Path) -> None:
    """dp 4 -> 2 -> 1, then other axes: one curve."""
    whole, _ = train_in_the_pool(*job_of(tmp_path, "one rank", "whole", train={"steps": 16}))
    for layout in ORDER:
        job, ranks = job_of(tmp_path, layout, "parts", train={"steps": 16})
        out, _ = train_in_the_pool(job, ranks, resume="auto", trouble=stop_after_2_more)
    assert step_of(list_checkpoints(out)[0]) == 16
    assert losses_of(out) == pytest.approx(losses_of(whole), rel=1e-5)
    assert losses_of(whole)[-1] < losses_of(whole)[0] - 1


def nan_in_step_3_of_rank_1(session: Session) -> None:
    """In the gradient of one parameter: in its two micro-batches, and when the step is run again to find the culprit."""
    if session.rank == 1:
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan") if forwards in (5, 6, 7, 8) else gradient

        def meet(module: Any, _: object) -> None:
            module.weight.register_hook(spoil)

        session.model.register_forward_pre_hook(count)
        session.model.get_submodule("model.layers.1.self_attn.k_proj").register_forward_pre_hook(meet)


def test_a_nan_is_named_and_leaves_the_weights_alone(tmp_path: Path) -> None:
    job, ranks = job_of(tmp_path, "zero 3 on 2", "run", checkpoint={"every": 1, "keep": 0})
    out, printed = train_in_the_pool(job, ranks, trouble=nan_in_step_3_of_rank_1)
    said = " ".join(printed[0].split())
    assert (
        "step 3 skipped, weights untouched: rank 1: the gradient of model.layers.1.self_attn.k_proj.weight not finite"
        in said
    )
    assert [row.step for row in read_metrics(out / "metrics.jsonl") if row.skipped] == [3]
    before, after, later = (tensors_of(folder_of(out, step)) for step in (2, 3, 4))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not torch.equal(later["weights/lm_head.weight"], after["weights/lm_head.weight"])


class Watched(Rows):
    """Rows that remember which was read last, and may be other rows than those of the text."""

    def __init__(self, rows: Rows, first: int, last: int):
        self.__dict__ |= rows.__dict__
        self.bad, self.last = range(first, last), -1

    def __getitem__(self, position: int) -> Row:
        self.last = position
        row = super().__getitem__(position)
        if position not in self.bad:
            return row
        noise = torch.randint(3, 290, row.tokens.shape, generator=torch.Generator().manual_seed(position))
        return row._replace(tokens=noise.to(row.tokens.dtype))


def spoil_rows(session: Session, first: int, last: int) -> None:
    """Rows whose tokens are noise."""
    object.__setattr__(session, "train_rows", Watched(session.train_rows, first, last))


def flip_a_bit(session: Session) -> None:
    parameter = session.model.get_parameter("model.layers.1.self_attn.q_proj.weight").detach()
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.view(torch.int32).view(-1)[5] ^= 1 << 3


def flip_once(session: Session) -> None:
    if session.rank == 2:
        on_step(session, 5, lambda: flip_a_bit(session))


def flip_whenever_step_5_is_done(session: Session) -> None:
    if session.rank == 2:
        session.optimizer.register_step_post_hook(lambda *_: flip_a_bit(session))


def test_a_transient_fault_is_undone(tmp_path: Path) -> None:
    guard = {"sdc_check_interval": 3}
    whole, _ = train_in_the_pool(*job_of(tmp_path, "zero 0 on 3", "whole", guard=guard))
    out, printed = train_in_the_pool(*job_of(tmp_path, "zero 0 on 3", "parts", guard=guard), trouble=flip_once)
    said = " ".join(printed[0].split())
    assert "replicas differ after step 6: rank 2: model.layers.1.self_attn.q_proj.weight" in said
    assert "ranks 0, 1 agree" in said
    assert "going on after step 4" in said
    assert "replicas are equal after step 6: the fault was transient" in said
    assert losses_of(out) == losses_of(whole)
    assert (whole / "export/model.safetensors").read_bytes() == (out / "export/model.safetensors").read_bytes()


def test_a_persistent_fault_ends_the_run_by_name(tmp_path: Path) -> None:
    job, ranks = job_of(tmp_path, "zero 0 on 3", "run", guard={"sdc_check_interval": 3}, checkpoint={"every": 5})
    with pytest.raises(
        RankError, match=r"after step 3, and there is no good checkpoint to go back to\n *rank 2: model"
    ):
        train_in_the_pool(job, ranks, trouble=flip_whenever_step_5_is_done)


def test_noise_in_the_data_is_passed_over(tmp_path: Path) -> None:
    """Batch 80 makes a spike: training goes back at least ten steps, and takes the batches after it."""
    tables: dict[str, dict[str, Any]] = {
        "train": {"steps": 90},
        "guard": {"spikes": "rollback", "rollback_steps": 10},
        "checkpoint": {"every": 6, "keep": 4},
    }
    out, printed = train_in_the_pool(*job_of(tmp_path, "zero 3 on 2", "run", **tables), trouble=noise_in_batch_80)
    said = " ".join(printed[0].split())
    assert "step 81 skipped, weights untouched: loss" in said
    assert "going on after step 66" in said
    assert "batches 66 to 80 are left out" in said
    position = read_manifest(folder_of(out, 90)).position
    assert position.left_out == ((66, 81),)
    assert position.next_batch == 90 + 15
    assert max(losses_of(out)[70:]) < losses_of(out)[0] / 2


@pytest.mark.sweep
def test_a_spike_is_left_out(tmp_path: Path) -> None:
    tables: dict[str, dict[str, Any]] = {
        "train": {"steps": 85},
        "guard": {"spikes": "skip"},
        "checkpoint": {"every": 90},
    }
    out, _ = train_in_the_pool(*job_of(tmp_path, "zero 3 on 2", "run", **tables), trouble=noise_in_batch_80)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row.step for row in rows if row.skipped] == [81]
    assert read_manifest(folder_of(out, 85)).position.skipped == (81,)


def noise_in_batch_80(session: Session) -> None:
    spoil_rows(session, 320, 324)
