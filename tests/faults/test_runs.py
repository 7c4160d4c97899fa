"""Complete runs on ranks of the pool that are interrupted, corrupted and resumed: the same losses, or a named cause."""

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
from weft.training.metrics import read_metrics
from weft.training.session import Session

MODEL = {**family("qwen3_moe"), "vocab_size": 300}  # supports every axis
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"zero": 0}),
    "zero 3 on 2": (2, {"zero": 3}),
    "zero 3 on 4": (4, {"zero": 3}),
    "zero 0 on 3": (3, {"zero": 0}),
    "zero 1, dp_replicate 2": (4, {"zero": 1, "dp_replicate": 2}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 3}),
    "pp2 x dp2": (4, {"pp": 2, "zero": 3}),
    "ep2 x dp2": (4, {"ep": 2, "dp_replicate": 2, "zero": 3}),
    "cp2 x tp2": (4, {"cp": 2, "tp": 2, "zero": 3}),
}
ORDER = ("zero 3 on 4", "zero 3 on 2", "one rank", "tp2 x dp2", "pp2 x dp2", "ep2 x dp2", "zero 0 on 3", "cp2 x tp2")
"""Layouts: dp 4, 2, 1, then other axes."""
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


# Faults, at module level so that they can be pickled


def on_step(session: Session, step: int, action: Any) -> None:
    """Call a function after the update of a step."""
    count = session.position.step

    def count_updates(*_: object) -> None:
        nonlocal count
        count += 1
        if count == step:
            action()

    session.optimizer.inner.register_step_post_hook(count_updates)


def stop_after(session: Session, updates: int) -> None:
    """End training after a number of updates: ranks agree on signals before the update of each step."""
    on_step(session, session.position.step + updates - 1, lambda: signal.raise_signal(signal.SIGTERM))


def stop_after_5(session: Session) -> None:
    stop_after(session, 5)


def stop_after_2_more(session: Session) -> None:
    stop_after(session, 2)


def stop_after_5_more(session: Session) -> None:
    stop_after(session, 5)


@pytest.mark.parametrize("layout", ["pp2 x dp2", "ep2 x dp2", "zero 3 on 4", "tp2 x dp2", "zero 0 on 3"])
def test_resume_under_the_same_layout_is_bit_equal(layout: str, tmp_path: Path) -> None:
    uninterrupted, _ = train_in_the_pool(*job_of(tmp_path, layout, "uninterrupted"))
    job, ranks = job_of(tmp_path, layout, "interrupted")
    interrupted, _ = train_in_the_pool(job, ranks, fault=stop_after_5)
    assert [step_of(path) for path in list_checkpoints(interrupted)] == [5, 4]
    (interrupted / ".step-00000002.gone").mkdir()  # of a rank that was killed while it removed a checkpoint
    _, printed = train_in_the_pool(job, ranks, resume="auto")
    assert not any(interrupted.glob(".step-*"))
    assert f"resuming after step 5, from {folder_of(interrupted, 5)}" in printed[0]
    assert all("resuming" not in text for text in printed[1:])
    for one, other in zip(
        read_metrics(uninterrupted / "metrics.jsonl"), read_metrics(interrupted / "metrics.jsonl"), strict=True
    ):
        assert (one.loss, one.grad_norm, one.learning_rate) == (other.loss, other.grad_norm, other.learning_rate)
    assert [path.name for path in folder_of(uninterrupted, STEPS).iterdir()] == [
        path.name for path in folder_of(interrupted, STEPS).iterdir()
    ]
    for path in folder_of(uninterrupted, STEPS).glob("*.safetensors"):  # weights, optimizer, generators
        assert path.read_bytes() == (folder_of(interrupted, STEPS) / path.name).read_bytes()
    assert (uninterrupted / "export/model.safetensors").read_bytes() == (
        interrupted / "export/model.safetensors"
    ).read_bytes()


DROPOUT = {**family("gpt2"), "vocab_size": 300, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
OTHER_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "dropout": {"model": {"config": DROPOUT}},
    "loss scale": {"plan": {"precision": {"param_dtype": "fp16", "loss_scale": "dynamic"}}},
    "bf16 weights": {"plan": {"precision": {"param_dtype": "bf16", "update": "bf16"}}},
}


@pytest.mark.parametrize("kind", OTHER_SETTINGS)
def test_resume_with_other_settings_is_bit_equal(kind: str, tmp_path: Path) -> None:
    uninterrupted, _ = train_in_the_pool(*job_of(tmp_path, "zero 3 on 2", "uninterrupted", **OTHER_SETTINGS[kind]))
    job, ranks = job_of(tmp_path, "zero 3 on 2", "interrupted", **OTHER_SETTINGS[kind])
    for resume in (None, "auto"):
        interrupted, _ = train_in_the_pool(job, ranks, resume=resume, fault=None if resume else stop_after_5)
    expected, rows = (read_metrics(folder / "metrics.jsonl") for folder in (uninterrupted, interrupted))
    for a, b in zip(expected, rows, strict=True):
        assert (a.loss, a.grad_norm, a.loss_scale) == (b.loss, b.grad_norm, b.loss_scale)
    assert tensors_equal(uninterrupted, interrupted)


def test_resume_keeps_the_loss_scale(tmp_path: Path) -> None:
    """It was halved before the interruption, and is not reset."""
    tables = {**OTHER_SETTINGS["loss scale"], "optimizer": {"lr": 1e-2, "eps": 1e-3}}
    job, ranks = job_of(tmp_path, "zero 3 on 2", "run", **tables)
    out, _ = train_in_the_pool(job, ranks, fault=overflow_and_stop)
    assert read_manifest(list_checkpoints(out)[0]).position.loss_scale.value == 2.0**15
    train_in_the_pool(job, ranks, resume="auto")
    rows = read_metrics(out / "metrics.jsonl")
    assert [row.step for row in rows if row.skipped] == [2]
    assert {row.loss_scale for row in rows[2:]} == {2.0**15}


def overflow_and_stop(session: Session) -> None:
    """Overflow the gradient of step 2 on one rank; end the run after step 5."""
    stop_after(session, 4)  # counts updates; one was skipped
    if session.rank == 1:
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        def overflow(module: Any, _: object) -> None:
            module.weight.register_hook(lambda gradient: gradient * float("inf") if forwards in (3, 4) else gradient)

        session.model.register_forward_pre_hook(count)
        session.model.get_submodule("model.layers.0.self_attn.q_proj").register_forward_pre_hook(overflow)


def tensors_equal(run_a: Path, run_b: Path) -> bool:
    """True if all tensors of the last checkpoints of two runs are equal."""
    a, b = (tensors_of(list_checkpoints(out)[0]) for out in (run_a, run_b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_each_resume_may_use_another_layout(tmp_path: Path) -> None:
    """dp 4 -> 2 -> 1, then other axes: one loss curve."""
    uninterrupted, _ = train_in_the_pool(*job_of(tmp_path, "one rank", "uninterrupted", train={"steps": 16}))
    for layout in ORDER:
        job, ranks = job_of(tmp_path, layout, "interrupted", train={"steps": 16})
        out, _ = train_in_the_pool(job, ranks, resume="auto", fault=stop_after_2_more)
    assert step_of(list_checkpoints(out)[0]) == 16
    assert losses_of(out) == pytest.approx(losses_of(uninterrupted), rel=1e-5)
    assert losses_of(uninterrupted)[-1] < losses_of(uninterrupted)[0] - 1


def nan_in_step_3_of_rank_1(session: Session) -> None:
    """NaN in the gradient of one parameter: in the two micro-batches of step 3, and when the step is run again to locate it."""
    if session.rank == 1:
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan") if forwards in (5, 6, 7, 8) else gradient

        def watch(module: Any, _: object) -> None:
            module.weight.register_hook(spoil)

        session.model.register_forward_pre_hook(count)
        session.model.get_submodule("model.layers.1.self_attn.k_proj").register_forward_pre_hook(watch)


@pytest.mark.must("fault: A loss or a gradient is not finite")
def test_a_nan_is_located_and_does_not_reach_the_weights(tmp_path: Path) -> None:
    job, ranks = job_of(tmp_path, "zero 3 on 2", "run", train={"steps": 4}, checkpoint={"every": 1, "keep": 0})
    out, printed = train_in_the_pool(job, ranks, fault=nan_in_step_3_of_rank_1)
    output = " ".join(printed[0].split())
    assert (
        "step 3 skipped, weights unchanged: rank 1: the gradient of model.layers.1.self_attn.k_proj.weight not finite"
        in output
    )
    assert [row.step for row in read_metrics(out / "metrics.jsonl") if row.skipped] == [3]
    before, after, later = (tensors_of(folder_of(out, step)) for step in (2, 3, 4))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not torch.equal(later["weights/lm_head.weight"], after["weights/lm_head.weight"])


class NoisyRows(Rows):
    """Rows that record the last position, and are noise at some positions."""

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
    """Replace some training rows by noise."""
    object.__setattr__(session, "train_rows", NoisyRows(session.train_rows, first, last))


def flip_a_bit(session: Session) -> None:
    parameter = session.model.get_parameter("model.layers.1.self_attn.q_proj.weight").detach()
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.view(torch.int32).view(-1)[5] ^= 1 << 3


def flip_once(session: Session) -> None:
    if session.rank == 2:
        on_step(session, 5, lambda: flip_a_bit(session))


def flip_whenever_step_5_is_done(session: Session) -> None:
    if session.rank == 2:
        session.optimizer.inner.register_step_post_hook(lambda *_: flip_a_bit(session))


def test_a_transient_bit_flip_is_undone(tmp_path: Path) -> None:
    guard = {"sdc_check_interval": 3}
    uninterrupted, _ = train_in_the_pool(*job_of(tmp_path, "zero 0 on 3", "uninterrupted", guard=guard))
    out, printed = train_in_the_pool(*job_of(tmp_path, "zero 0 on 3", "interrupted", guard=guard), fault=flip_once)
    output = " ".join(printed[0].split())
    assert "replicas differ after step 6: rank 2: model.layers.1.self_attn.q_proj.weight" in output
    assert "ranks 0, 1 agree" in output
    assert "resuming after step 4" in output
    assert "replicas are equal after step 6: the fault was transient" in output
    assert losses_of(out) == losses_of(uninterrupted)
    assert (uninterrupted / "export/model.safetensors").read_bytes() == (out / "export/model.safetensors").read_bytes()


@pytest.mark.must("fault: A bit of a replica's weights or moments flips")
def test_a_persistent_bit_flip_ends_the_run_with_the_rank(tmp_path: Path) -> None:
    job, ranks = job_of(tmp_path, "zero 0 on 3", "run", guard={"sdc_check_interval": 3}, checkpoint={"every": 5})
    with pytest.raises(
        RankError, match=r"after step 3, and there is no valid checkpoint to roll back to\n *rank 2: model"
    ):
        train_in_the_pool(job, ranks, fault=flip_whenever_step_5_is_done)


def test_rollback_skips_batches_of_noise(tmp_path: Path) -> None:
    """Batch 80 causes a spike: training rolls back at least ten steps, and continues with the batches after it."""
    tables: dict[str, dict[str, Any]] = {
        "train": {"steps": 90},
        "guard": {"spikes": "rollback", "rollback_steps": 10},
        "checkpoint": {"every": 6, "keep": 4},
    }
    out, printed = train_in_the_pool(*job_of(tmp_path, "zero 3 on 2", "run", **tables), fault=noise_in_batch_80)
    output = " ".join(printed[0].split())
    assert "step 81 skipped, weights unchanged: loss" in output
    assert "resuming after step 66" in output
    assert "batches 66 to 80 are skipped" in output
    position = read_manifest(folder_of(out, 90)).position
    assert position.excluded_batches == ((66, 81),)
    assert position.next_batch == 90 + 15
    assert max(losses_of(out)[70:]) < losses_of(out)[0] / 2


@pytest.mark.must("fault: A loss or a gradient norm is far from the previous ones")
def test_the_update_of_a_spike_is_skipped(tmp_path: Path) -> None:
    tables: dict[str, dict[str, Any]] = {
        "model": {"config": {**family("llama"), "vocab_size": 300}},
        "train": {"steps": 70, "micro_batch_size": 2},
        "guard": {"spikes": "skip"},
        "checkpoint": {"every": 90},
    }
    out, _ = train_in_the_pool(*job_of(tmp_path, "one rank", "run", **tables), fault=noise_in_batch_66)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row.step for row in rows if row.skipped] == [67]
    assert read_manifest(folder_of(out, 70)).position.skipped == (67,)


def noise_in_batch_66(session: Session) -> None:
    """Noise soon after the detector's warm-up of 64 steps."""
    spoil_rows(session, 264, 268)


def noise_in_batch_80(session: Session) -> None:
    spoil_rows(session, 320, 324)
