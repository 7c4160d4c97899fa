"""Split weights: two 16-bit planes hold exactly a float32 value, and the bfloat16 value for forward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults.test_runs import LAYOUTS as RUNS
from tests.faults.test_runs import job_of, losses_of, stop_after_5
from tests.lab.bits import assert_same_bits
from tests.lab.checkpoints import tensors_of
from tests.lab.families import FAMILIES, family
from tests.lab.live import StorageBytes
from tests.lab.pool import close_pools
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import list_checkpoints
from weft.memory.chunked_step import chunked_step
from weft.memory.weights import SplitWeight
from weft.plan import Memory, Parallel, Pipeline, Plan, Precision

EDGES = (0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)
BOTH = pytest.mark.parametrize("even", [False, True], ids=["away", "even"])


def from_bits(bits: Tensor) -> Tensor:
    """float32 values with the given bit patterns, [...] int64 from 0 to 2^32 - 1."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def planes_of(values: Tensor, even: bool) -> SplitWeight:
    weight = SplitWeight.empty(values.shape, values.device, even=even)
    weight.pack_(values)
    return weight


def assert_exact(values: Tensor, even: bool) -> None:
    """Unpacking restores every value (a NaN as a NaN), and the upper plane is the correctly rounded value."""
    weight = planes_of(values, even)
    unpacked, nan = weight.unpack(), values.isnan()
    assert torch.equal(bits_of(unpacked)[~nan], bits_of(values)[~nan])
    assert torch.equal(unpacked.isnan(), nan)
    assert torch.equal(weight.high.isnan(), nan)
    assert torch.equal(weight.high.isinf(), values.to(torch.bfloat16).isinf())
    high = weight.high.view(torch.int16)[~nan]
    if even:
        assert torch.equal(high, values.to(torch.bfloat16).view(torch.int16)[~nan])
    else:  # on the magnitude as an integer: add half of the last place, then truncate
        bits = bits_of(values)[~nan].long() & 0xFFFFFFFF
        rounded = (((bits & 0x7FFFFFFF) + 0x8000) >> 16) | (bits >> 31 << 15)
        assert torch.equal(high.long() & 0xFFFF, rounded)


@BOTH
def test_split_is_exact_for_edge_cases(even: bool) -> None:
    """Ties, largest and smallest values, infinities, zeros, subnormals and NaNs of all kinds."""
    assert_exact(from_bits((torch.arange(2**16)[:, None] << 16) | torch.tensor(EDGES)), even)


@BOTH
def test_split_is_exact_for_random_bit_patterns(even: bool) -> None:
    assert_exact(from_bits(torch.randint(2**32, (2**22,), generator=torch.Generator().manual_seed(0))), even)


@BOTH
def test_split_is_exact_for_many_random_bit_patterns(even: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2**28 // 2**22):
        assert_exact(from_bits(torch.randint(2**32, (2**22,), generator=generator)), even)


@BOTH
@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 4), (3, 5, 2)])
def test_split_is_exact_for_every_shape(shape: tuple[int, ...], even: bool) -> None:
    values = torch.full(shape, 1.00390625)  # a tie
    assert torch.equal(planes_of(values, even).unpack(), values)


@BOTH
def test_views_are_views_of_the_planes(even: bool) -> None:
    """Writes through a view change the base, including ties, and nothing else."""
    ties = from_bits(torch.arange(0x3F80, 0x3F80 + 512).repeat(64, 1) << 16 | 0x8000)
    weight = planes_of(ties, even)
    view: Any = weight[5:60, 3:411:2].t()
    assert isinstance(view, SplitWeight)
    assert view.high.untyped_storage()._cdata == weight.high.untyped_storage()._cdata
    assert torch.equal(view.unpack(), ties[5:60, 3:411:2].t())
    expected = ties.clone()
    for changed in (ties.flip(1), torch.randn(ties.shape)):
        view.copy_(changed[5:60, 3:411:2].t())
        expected[5:60, 3:411:2] = changed[5:60, 3:411:2]
        assert torch.equal(weight.unpack(), expected)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "Adam": torch.optim.Adam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, nesterov=True),
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
}


@BOTH
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_split_weights_are_bit_equal_for_any_optimizer(name: str, even: bool) -> None:
    """Weights of ten steps are bit-equal, with plain and with chunked steps."""
    generator = torch.Generator().manual_seed(0)
    plain = [nn.Parameter(torch.randn(33, 17, generator=generator)) for _ in range(4)]
    split = [nn.Parameter(planes_of(parameter.detach(), even)) for parameter in plain]
    parts = [nn.Parameter(planes_of(parameter.detach(), even)) for parameter in plain]
    optimizers = [OPTIMIZERS[name](parameters) for parameters in (plain, split, parts)]
    for step in range(10):
        for trio in zip(plain, split, parts, strict=True):
            gradient = torch.randn(33, 17, generator=generator)
            for parameter in trio:
                parameter.grad = gradient.clone()
        if step == 3:  # a parameter without a gradient
            for parameters in (plain, split, parts):
                parameters[2].grad = None
        optimizers[0].step()
        optimizers[1].step()
        chunked_step(optimizers[2], chunk_bytes=2 * 33 * 17 * 4)
    for parameter, one, other in zip(plain, split, parts, strict=True):
        assert torch.equal(parameter.detach(), one.detach() + 0)
        assert torch.equal(parameter.detach(), other.detach() + 0)
        assert all(type(value) is Tensor for value in optimizers[1].state[one].values())


@BOTH
def test_chunked_step_unpacks_one_chunk_at_a_time(even: bool) -> None:
    parameters = [nn.Parameter(planes_of(torch.randn(64, 1024), even)) for _ in range(16)]
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def peak_of_a_step() -> int:
        for parameter in parameters:
            parameter.grad = torch.randn(64, 1024)
        with StorageBytes().track(parameters, optimizer.state) as live:
            before = live.current
            chunked_step(optimizer, chunk_bytes=2**18)
        return live.peak - before

    peak_of_a_step()
    # The unpacked chunk, and the blocks of the conversion.
    assert 2**18 <= peak_of_a_step() < 2 * 2**18 + 4 * 2**17 * 4


# In training

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 1": (2, {"zero": 1}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3}),
    "zero 3 on 4, uneven": (4, {"zero": 3}),
    "dp_replicate 2": (4, {"zero": 3, "dp_replicate": 2}),
    "tp 2": (2, {"tp": 2, "zero": 0}),
    "tp 2, zero 3": (4, {"tp": 2, "zero": 3}),
    "cp 2": (2, {"cp": 2, "zero": 2}),
    "pp 2": (2, {"pp": 2, "zero": 1}),
    "pp 2, zero 0": (2, {"pp": 2, "zero": 0}),
}
EXPERT_LAYOUTS = {"ep 2": (2, {"ep": 2, "zero": 3}), "tp 2 x ep 2": (2, {"tp": 2, "ep": 2, "zero": 0})}


def plan_of(weights: str, memory: Memory | None = None, pipeline: Pipeline | None = None, **parallel: int) -> Plan:
    return Plan(
        parallel=Parallel(**parallel),  # type: ignore[arg-type]
        precision=Precision(param_dtype="bf16", weights=weights),  # type: ignore[arg-type]
        memory=memory or Memory(),
        pipeline=pipeline or Pipeline(),
    )


def assert_split_is_whole(config: dict[str, Any], ranks: int, **settings: Any) -> None:
    """Losses, norms, gradients and weights of three steps are bit-equal to plain float32 weights."""
    assert_same_bits(config, ranks, 1, plan_of("whole", **settings), plan_of("split_even", **settings))


@pytest.mark.parametrize("name", FAMILIES)
def test_split_even_is_bit_equal(name: str) -> None:
    assert_split_is_whole(family(name), 1, zero=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])  # tied embeddings; biases and packed matrices
def test_split_even_is_bit_equal_in_any_layout(name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    assert_split_is_whole({**family(name), "vocab_size": 97}, ranks, **parallel)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_split_even_is_bit_equal_with_experts(layout: str) -> None:
    ranks, parallel = EXPERT_LAYOUTS[layout]
    assert_split_is_whole(family("qwen3_moe"), ranks, **parallel)


@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 3}, {"tp": 2, "zero": 0}, {"pp": 2, "zero": 1}])
def test_split_even_is_bit_equal_with_recompute(parallel: dict[str, int]) -> None:
    memory = Memory(recompute=("attention", "activation", "norm"))
    assert_split_is_whole(family("llama"), 2, memory=memory, **parallel)


def train(folder: Path, layout: str, out: str, steps: int, tables: dict[str, Any], **settings: Any) -> Path:
    """Train on fresh ranks; returns the run's folder.

    Args:
        folder: folder of the training text.
        layout: key of `RUNS` in `tests.faults.test_runs`.
        out: name of the run.
        steps: number of training steps.
        tables: tables of the plan, besides bf16 forward.
        settings: arguments of `train_in_the_pool`.
    """
    precision = {"param_dtype": "bf16", **tables.get("precision", {})}
    plan = {"parallel": RUNS[layout][1], **tables, "precision": precision}
    job, ranks = job_of(folder, layout, out, train={"steps": steps}, plan=plan, checkpoint={"every": 50})
    close_pools()
    return train_in_the_pool(job, ranks, **settings)[0]


def test_200_steps_are_bit_equal(tmp_path: Path) -> None:
    """Every loss, and every weight and moment of the last checkpoint, is bit-equal."""
    plain = train(tmp_path, "one rank", "whole", 200, {})
    split = train(tmp_path, "one rank", "split", 200, {"precision": {"weights": "split_even"}})
    assert losses_of(split) == losses_of(plain)
    expected, found = (tensors_of(list_checkpoints(run)[0]) for run in (plain, split))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("first", "then"), [("zero 3 on 4", "tp2 x dp2"), ("pp2 x dp2", "zero 0 on 3")])
def test_resume_under_another_layout_has_equal_losses(tmp_path: Path, first: str, then: str) -> None:
    """With plain weights, with split weights, and between the two, with moments on a disk."""
    plain: dict[str, Any] = {}
    split: dict[str, Any] = {"precision": {"weights": "split_even"}}
    disk: dict[str, Any] = {**split, "memory": {"optimizer_device": "disk", "offload_dir": str(tmp_path / "states")}}
    curves = []
    for index, (one, other) in enumerate([(plain, plain), (split, split), (plain, disk), (disk, plain)]):
        train(tmp_path, first, str(index), 12, one, fault=stop_after_5)
        curves.append(losses_of(train(tmp_path, then, str(index), 12, other, resume="auto")))
    assert len(curves[0]) == 12
    assert curves == [curves[0]] * 4
