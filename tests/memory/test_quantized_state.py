"""States of few bits: as near as their map allows, stable, a quarter or an eighth of the bytes, and trained with."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.test_runs import LAYOUTS as RUNS
from tests.faults.test_runs import job_of, losses_of, stop_after_5
from tests.lab.bits import assert_near
from tests.lab.checkpoints import tensors_of
from tests.lab.families import family
from tests.lab.live import LiveBytes
from tests.lab.pool import close_pools
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import list_checkpoints
from weft.device.device import detect
from weft.errors import JobError, PlanError
from weft.job import Job
from weft.memory.chunked_step import chunked_step
from weft.memory.optimizer_state import OffloadedStates
from weft.memory.packed import PackedTensor
from weft.memory.pool import Pool, mapped_files
from weft.memory.quantized_state import SMALLEST, build_map, keep_states_small, pack
from weft.memory.storages import plain_parts
from weft.plan import Parallel, Plan, Precision, state_bytes
from weft.train.metrics import read_metrics

FORMATS = ("bf16", "int8", "int4")
BOTH = pytest.mark.parametrize("signed", [False, True], ids=["never negative", "signed"])


def numbers(*shape: int, signed: bool) -> torch.Tensor:
    """Of many magnitudes, as moments are."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    return found if signed else found.square()


@BOTH
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(64, 128), (5, 1001), (97,)])
def test_the_nearest_entry_of_the_map(form: Any, signed: bool, shape: tuple[int, ...]) -> None:
    """By looking at all entries; and what was unpacked is packed to the same bits."""
    values = numbers(*shape, signed=signed)
    packed = pack(values, form, signed=signed)
    joined = packed.joined()
    assert packed.shape == values.shape == joined.shape
    again = pack(joined, form, signed=signed)
    assert torch.equal(again.joined(), joined)
    assert all(torch.equal(*pair) for pair in zip(plain_parts(again), plain_parts(packed), strict=True))
    if form == "bf16":
        assert torch.equal(joined, values.bfloat16().float())
        return
    size, entries = {"int8": 256, "int4": 128}[form], build_map({"int8": 8, "int4": 4}[form], signed=signed)
    for block, found in zip(values.flatten().split(size), joined.flatten().split(size), strict=True):
        largest = block[block.abs().argmax()]
        best = (block[:, None] / largest - entries).abs().min(1).values * largest.abs()
        assert torch.allclose((found - block).abs(), best, rtol=1e-4, atol=float(largest.abs()) * 1e-6)
        assert largest in found  # kept exactly, so that nothing moves when it is packed again


def test_zeros_stay_zero() -> None:
    for form in FORMATS:
        packed = pack(torch.zeros(300), form, signed=False)  # type: ignore[arg-type]
        assert not packed.joined().any()


def test_no_worse_than_torchao() -> None:
    """Their maps, and scales that are always positive."""
    optim = pytest.importorskip("torchao.optim.subclass_8bit", reason="torchao is not installed")
    four = pytest.importorskip("torchao.optim.subclass_4bit")
    for form, peer, block in (("int8", optim.OptimState8bit, 256), ("int4", four.OptimState4bit, 128)):
        for signed in (False, True):
            values = numbers(64, 256, signed=signed)
            theirs = peer.zeros(values.shape, signed, block)
            theirs.copy_(values)
            if form == "int8" or not signed:
                assert torch.allclose(build_map(8 if form == "int8" else 4, signed=signed), theirs.qmap)
            mine = pack(values, form, signed=signed).joined()  # type: ignore[arg-type]
            assert (mine - values).norm() <= 1.001 * (theirs.dequantize() - values).norm()


@pytest.mark.parametrize("form", FORMATS)
def test_reads_writes_and_views(form: Any) -> None:
    values = numbers(40, 256, signed=True)
    packed = pack(values, form, signed=True)
    joined = packed.joined()
    assert torch.equal(packed + 1, joined + 1)
    assert torch.equal(packed[3:5].clone(), joined[3:5])
    assert torch.equal(packed.narrow(1, 8, 16) * 2, joined[:, 8:24] * 2)
    assert torch.equal(packed.chunk(2)[1].clone(), joined[20:])
    rows = numbers(2, 256, signed=True)
    packed[7:9].copy_(rows)
    joined[7:9] = rows
    assert torch.equal(packed.joined(), pack(joined, form, signed=True).joined())
    packed.mul_(0)
    assert not packed.joined().any()


def parameters_of(number: int, *shape: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(number)]


@pytest.mark.parametrize("form", FORMATS)
def test_bytes(form: Any, tmp_path: Path) -> None:
    """At rest the promised bytes, and around an update one part more; on a disk nothing is left on the device."""
    parameters = [*parameters_of(24, 64, 128), nn.Parameter(torch.ones(SMALLEST - 1))]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    keep_states_small(optimizer, form)
    large = 24 * 64 * 128
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with LiveBytes().track(parameters, optimizer.state) as live:
            before = live.current
            chunked_step(optimizer, part_bytes=large * 4 // 12)
        if step:
            assert live.peak - before <= 2.5 * large * 4 * 2 / 12  # what is unpacked, and what packing needs
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    held = sum(part.nbytes for value in states for part in plain_parts(value))
    expected = 2 * large * state_bytes(Precision(optimizer_state_dtype=form)) + 2 * 4 * (SMALLEST - 1)
    assert held == expected


@pytest.mark.parametrize("form", FORMATS)
def test_on_a_disk_the_bits_are_those_at_home(form: Any, tmp_path: Path) -> None:
    here, away = parameters_of(8, 64, 128), parameters_of(8, 64, 128)
    optimizers = [torch.optim.AdamW(side, fused=True) for side in (here, away)]
    for optimizer in optimizers:
        keep_states_small(optimizer, form)
    pool = Pool(mapped_files(tmp_path))
    OffloadedStates(optimizers[1], detect(), pool)
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        for one, other in zip(here, away, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            chunked_step(optimizer, part_bytes=3 * 64 * 128 * 4)
    assert all(torch.equal(one, other) for one, other in zip(here, away, strict=True))
    states = [value for state in optimizers[1].state.values() for value in state.values() if value.ndim]
    assert all(isinstance(value, PackedTensor) for value in states)
    assert all(part.untyped_storage().is_shared() for value in states for part in plain_parts(value))
    assert (
        pool.live < 1.2 * 2 * 8 * 64 * 128 * state_bytes(Precision(optimizer_state_dtype=form)) + 32 * 4096
    )  # rooms are 4 KiB at least


# In training

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 2}),
    "pp2": (2, {"pp": 2, "zero": 1}),
    "ep2": (2, {"ep": 2, "zero": 3}),
}
WIDE = {**family("llama"), "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256}
"""Its matrices are large enough to be packed, a quarter of them too."""
DISTANCE = {"bf16": 0.01, "int8": 0.05, "int4": 0.2}


@pytest.mark.thin(11)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_near_whole_states_in_any_layout(layout: str, form: Any) -> None:
    """Three steps of a model whose matrices are large enough to be packed, at a large rate."""
    ranks, parallel = LAYOUTS[layout]
    config = {**family("qwen3_moe" if "ep" in layout else "qwen3"), "hidden_size": 128, "intermediate_size": 256}
    plan = Plan(parallel=Parallel(**parallel))  # type: ignore[arg-type]
    small = plan.model_copy(update={"precision": Precision(optimizer_state_dtype=form, weights="split")})
    whole = plan.model_copy(update={"precision": Precision(weights="split")})
    assert_near(config, ranks, 1, whole, small, DISTANCE[form])


def train(folder: Path, layout: str, out: str, form: str, **settings: Any) -> Path:
    plan = {
        "parallel": RUNS[layout][1],
        "precision": {"optimizer_state_dtype": form},
        "memory": {"optimizer_device": "disk", "offload_dir": str(folder)},
    }
    job, ranks = job_of(
        folder, layout, out, model={"config": WIDE}, train={"steps": 12}, plan=plan, checkpoint={"every": 50}
    )
    close_pools()
    return train_in_the_pool(job, ranks, **settings)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_resume(form: str, tmp_path: Path) -> None:
    """Under the same layout bit by bit; under another one, a curve that is near."""
    whole = train(tmp_path, "zero 3 on 4", "whole", form)
    assert losses_of(whole) != losses_of(train(tmp_path, "zero 3 on 4", "plain", "update"))  # states are packed
    (pool,) = (read_metrics(whole / "metrics.jsonl")[-1].pools or {}).values()
    assert 0 < pool["live"] == pool["peak"] <= pool["held"]  # of what is on the disk
    train(tmp_path, "zero 3 on 4", "stopped", form, trouble=stop_after_5)
    again = train(tmp_path, "zero 3 on 4", "stopped", form, resume="auto")
    assert losses_of(again) == losses_of(whole)
    ends = [tensors_of(list_checkpoints(run)[0]) for run in (whole, again)]
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    train(tmp_path, "zero 3 on 4", "other", form, trouble=stop_after_5)
    other = train(tmp_path, "tp2 x dp2", "other", form, resume="auto")
    assert losses_of(other)[5] == pytest.approx(losses_of(whole)[5], rel=1e-3)
    assert all(math.isfinite(loss) for loss in losses_of(other))


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="states of few bits with another update than fp32"):
        Plan(precision=Precision(optimizer_state_dtype="int8", update="bf16")).resolve(1)
    tables = {"model": {"config": "c.json"}, "plan": {"precision": {"optimizer_state_dtype": "bf16"}}}
    with pytest.raises(JobError, match=r"betas\[1\] = 0.999 with plan.precision.optimizer_state_dtype = bf16"):
        Job.parse({**tables, "optimizer": {"betas": [0.9, 0.999]}})
    assert Job.parse({**tables, "optimizer": {"betas": [0.9, 0.99]}})
