"""Quantized states: optimal rounding, idempotent packing, a quarter or an eighth of the bytes, and training with them."""

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
from tests.lab.live import StorageBytes
from tests.lab.plans import resolved
from tests.lab.pool import close_pools
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import list_checkpoints
from weft.device.detect import detect
from weft.errors import JobError, PlanError
from weft.job import Job
from weft.memory.chunked_step import chunked_step
from weft.memory.optimizer_state import OffloadedStates
from weft.memory.packed import PackedTensor
from weft.memory.pool import Pool, mapped_files
from weft.memory.quantized_state import SMALLEST, build_map, pack, quantize_states
from weft.memory.storages import plain_parts
from weft.plan import Parallel, Plan, Precision, bytes_per_state_element
from weft.training.metrics import read_metrics

FORMATS = ("bf16", "int8", "int4")
BOTH = pytest.mark.parametrize("signed", [False, True], ids=["never negative", "signed"])


def random_values(*shape: int, signed: bool) -> torch.Tensor:
    """Values of many magnitudes, like moments."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    return values if signed else values.square()


@BOTH
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(64, 128), (5, 1001), (97,)])
def test_values_are_rounded_to_the_nearest_entry(form: Any, signed: bool, shape: tuple[int, ...]) -> None:
    """Compared with all entries of the map; unpacked values are packed to the same bits."""
    values = random_values(*shape, signed=signed)
    packed = pack(values, form, signed=signed)
    unpacked = packed.unpack()
    assert packed.shape == values.shape == unpacked.shape
    repacked = pack(unpacked, form, signed=signed)
    assert torch.equal(repacked.unpack(), unpacked)
    assert all(torch.equal(*pair) for pair in zip(plain_parts(repacked), plain_parts(packed), strict=True))
    if form == "bf16":
        assert torch.equal(unpacked, values.bfloat16().float())
        return
    size, entries = {"int8": 256, "int4": 128}[form], build_map({"int8": 8, "int4": 4}[form], signed=signed)
    for block, found in zip(values.flatten().split(size), unpacked.flatten().split(size), strict=True):
        largest = block[block.abs().argmax()]
        best = (block[:, None] / largest - entries).abs().min(1).values * largest.abs()
        assert torch.allclose((found - block).abs(), best, rtol=1e-4, atol=float(largest.abs()) * 1e-6)
        assert largest in found  # exact, so that repacking changes nothing


def test_zeros_stay_zero() -> None:
    for form in FORMATS:
        packed = pack(torch.zeros(300), form, signed=False)  # type: ignore[arg-type]
        assert not packed.unpack().any()


def test_error_is_no_worse_than_torchao() -> None:
    """torchao has the same maps, but always positive scales."""
    optim = pytest.importorskip("torchao.optim.subclass_8bit", reason="torchao is not installed")
    four = pytest.importorskip("torchao.optim.subclass_4bit")
    for form, peer, block in (("int8", optim.OptimState8bit, 256), ("int4", four.OptimState4bit, 128)):
        for signed in (False, True):
            values = random_values(64, 256, signed=signed)
            peer_state = peer.zeros(values.shape, signed, block)
            peer_state.copy_(values)
            if form == "int8" or not signed:
                assert torch.allclose(build_map(8 if form == "int8" else 4, signed=signed), peer_state.qmap)
            mine = pack(values, form, signed=signed).unpack()  # type: ignore[arg-type]
            assert (mine - values).norm() <= 1.001 * (peer_state.dequantize() - values).norm()


@pytest.mark.parametrize("form", FORMATS)
def test_operations_and_views_of_packed_tensors(form: Any) -> None:
    values = random_values(40, 256, signed=True)
    packed = pack(values, form, signed=True)
    unpacked = packed.unpack()
    assert torch.equal(packed + 1, unpacked + 1)
    assert torch.equal(packed[3:5].clone(), unpacked[3:5])
    assert torch.equal(packed.narrow(1, 8, 16) * 2, unpacked[:, 8:24] * 2)
    assert torch.equal(packed.chunk(2)[1].clone(), unpacked[20:])
    rows = random_values(2, 256, signed=True)
    packed[7:9].copy_(rows)
    unpacked[7:9] = rows
    assert torch.equal(packed.unpack(), pack(unpacked, form, signed=True).unpack())
    packed.mul_(0)
    assert not packed.unpack().any()


def parameters_of(count: int, *shape: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("form", FORMATS)
def test_state_bytes_match_formula(form: Any, tmp_path: Path) -> None:
    """Bytes between updates match the formula; an update needs one more chunk in float32."""
    parameters = [*parameters_of(24, 64, 128), nn.Parameter(torch.ones(SMALLEST - 1))]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    quantize_states(optimizer, form)
    large = 24 * 64 * 128
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with StorageBytes().track(parameters, optimizer.state) as live:
            before = live.current
            chunked_step(optimizer, chunk_bytes=large * 4 // 12)
        if step:
            assert live.peak - before <= 2.5 * large * 4 * 2 / 12  # unpacked states, and temporaries of packing
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    held = sum(part.nbytes for value in states for part in plain_parts(value))
    expected = 2 * large * bytes_per_state_element(Precision(optimizer_state_dtype=form)) + 2 * 4 * (SMALLEST - 1)
    assert held == expected


@pytest.mark.parametrize("form", FORMATS)
def test_offload_of_quantized_states_is_bit_equal(form: Any, tmp_path: Path) -> None:
    plain, moved = parameters_of(8, 64, 128), parameters_of(8, 64, 128)
    optimizers = [torch.optim.AdamW(side, fused=True) for side in (plain, moved)]
    for optimizer in optimizers:
        quantize_states(optimizer, form)
    pool = Pool(mapped_files(tmp_path))
    OffloadedStates(optimizers[1], detect(), pool)
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        for one, other in zip(plain, moved, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            chunked_step(optimizer, chunk_bytes=3 * 64 * 128 * 4)
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    states = [value for state in optimizers[1].state.values() for value in state.values() if value.ndim]
    assert all(isinstance(value, PackedTensor) for value in states)
    assert all(part.untyped_storage().is_shared() for value in states for part in plain_parts(value))
    assert (
        pool.live < 1.2 * 2 * 8 * 64 * 128 * bytes_per_state_element(Precision(optimizer_state_dtype=form)) + 32 * 4096
    )  # blocks have at least 4 KiB


# In training

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 2}),
    "pp2": (2, {"pp": 2, "zero": 1}),
    "ep2": (2, {"ep": 2, "zero": 3}),
}
WIDE = {**family("llama"), "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256}
"""Config whose matrices are large enough to be quantized, even if sharded over four ranks."""
DISTANCE = {"bf16": 0.01, "int8": 0.05, "int4": 0.2}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_close_to_float32_states_in_any_layout(layout: str, form: Any) -> None:
    """Three steps, at a high learning rate, of a model whose matrices are large enough to be quantized."""
    ranks, parallel = LAYOUTS[layout]
    config = {**family("qwen3_moe" if "ep" in layout else "qwen3"), "hidden_size": 128, "intermediate_size": 256}
    plan = Plan(parallel=Parallel(**parallel))  # type: ignore[arg-type]
    quantized = plan.model_copy(update={"precision": Precision(optimizer_state_dtype=form, weights="split")})
    plain = plan.model_copy(update={"precision": Precision(weights="split")})
    assert_near(config, ranks, 1, plain, quantized, DISTANCE[form])


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


@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_resume_with_quantized_states(form: str, tmp_path: Path) -> None:
    """Resume is bit-equal under the same layout; under another layout the losses are close."""
    through = train(tmp_path, "zero 3 on 4", "whole", form)
    assert losses_of(through) != losses_of(train(tmp_path, "zero 3 on 4", "plain", "update"))  # states are quantized
    (pool,) = (read_metrics(through / "metrics.jsonl")[-1].pools or {}).values()
    assert 0 < pool["live"] == pool["peak"] <= pool["held"]  # of the states on the disk
    train(tmp_path, "zero 3 on 4", "stopped", form, fault=stop_after_5)
    resumed = train(tmp_path, "zero 3 on 4", "stopped", form, resume="auto")
    assert losses_of(resumed) == losses_of(through)
    ends = [tensors_of(list_checkpoints(run)[0]) for run in (through, resumed)]
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    train(tmp_path, "zero 3 on 4", "other", form, fault=stop_after_5)
    other = train(tmp_path, "tp2 x dp2", "other", form, resume="auto")
    assert losses_of(other)[5] == pytest.approx(losses_of(through)[5], rel=1e-3)
    assert all(math.isfinite(loss) for loss in losses_of(other))


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(PlanError, match="optimizer_state_dtype without update = fp32"):
        resolved(Plan(precision=Precision(optimizer_state_dtype="int8", update="bf16")), 1)
    tables = {"model": {"config": "c.json"}, "plan": {"precision": {"optimizer_state_dtype": "bf16"}}}
    with pytest.raises(JobError, match=r"betas\[1\] = 0.999 with plan.precision.optimizer_state_dtype = bf16"):
        Job.parse({**tables, "optimizer": {"betas": [0.9, 0.999]}})
    assert Job.parse({**tables, "optimizer": {"betas": [0.9, 0.99]}})
