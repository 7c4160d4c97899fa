"""Activation offload leaves steps bit-equal, and frees the device memory between forward and backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lab.bits import assert_same_bits_with
from tests.lab.families import FAMILIES, family
from tests.lab.parity import plan_for
from tests.lab.pool import RankError
from tests.memory.test_recompute import HIDDEN, LLAMA, saved
from weft.device.cpu import Cpu
from weft.device.detect import detect
from weft.memory.offload import Offload
from weft.memory.pool import Pool, mapped_files
from weft.plan import Memory, Pipeline, Precision

MEMORIES = (
    Memory(offload=("block",)),
    Memory(offload=("attention",), offload_to="disk", offload_prefetch=3),
    Memory(offload=("attention",), recompute=("mlp",)),
    Memory(offload=("attention", "mlp"), recompute=("activation", "norm"), offload_bytes=50_000),
    Memory(offload=("block",), recompute=("block",)),
)
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
    "tp2 sp": (2, {"tp": 2, "zero": 1}),
    "cp2 ring": (2, {"cp": 2, "zero": 2}),
    "pp2": (2, {"pp": 2, "zero": 1}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_offload_is_bit_equal(name: str) -> None:
    assert_same_bits_with(family(name), plan_for("fp32", zero=0), 1, *MEMORIES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_offload_is_bit_equal_in_any_layout(name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    assert_same_bits_with(family(name), plan_for("fp32", **parallel), ranks, *MEMORIES)


@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 3}, {"zero": 0, "tp": 2}])
def test_offload_is_bit_equal_with_bf16_and_split_weights(parallel: dict[str, int]) -> None:
    precision = Precision(weights="split")
    plan = plan_for("fp32", **parallel).model_copy(update={"precision": precision})
    assert_same_bits_with(family("llama"), plan, 2, *MEMORIES, micro_batch=1)


def test_offload_of_experts_is_bit_equal() -> None:
    assert_same_bits_with(family("qwen3_moe"), plan_for("fp32", ep=2, zero=3), 2, Memory(offload=("mlp",)), MEMORIES[3])


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_offload_is_bit_equal_with_pipeline_schedules(schedule: str) -> None:
    pipeline = Pipeline(schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    plan = plan_for("fp32", pipeline, pp=2, zero=1)
    config = {**family("llama"), "num_hidden_layers": 4}
    assert_same_bits_with(config, plan, 2, *MEMORIES[1:4], micro_batch=1)


# Memory

GATED = ("llama", "qwen3", "olmo2")
EXPERTS = ("qwen3_moe", "mixtral", "granitemoe", "olmoe")
NORMED = ("qwen3", "qwen3_moe", "olmo2", "olmoe")  # queries and keys


def formulas(name: str) -> tuple[int, int]:
    """Elements per token that an attention, and a feed-forward part, saves for backward."""
    config = family(name)
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    queries, keys = heads * size, config["num_key_value_heads"] * size
    attention = hidden + queries + 2 * keys + queries  # its input, queries, keys, values and output
    if name in NORMED:  # inputs and normalized inputs of the norms
        attention += 2 * (queries + keys)
    if name in GATED:  # its input, gate and up projections, activation and gated output
        return attention, hidden + 4 * config["intermediate_size"]
    inner, chosen = config.get("moe_intermediate_size", config["intermediate_size"]), config["num_experts_per_tok"]
    return attention, hidden + chosen * (4 * inner + 2 * hidden)  # per expert also its input and output


@pytest.mark.parametrize("name", GATED + EXPERTS)
def test_offloaded_bytes_match_formula(name: str) -> None:
    """Bytes saved per token and block match a formula; roles add up."""
    config, (attention, mlp) = family(name), formulas(name)
    assert saved(config, offload=("attention",), offload_to="disk") == 4 * attention
    assert saved(config, offload=("mlp",), offload_to="disk") == 4 * mlp
    assert saved(config, offload=("attention", "mlp"), offload_to="disk") == 4 * (attention + mlp)


def test_savings_of_offload_and_recompute_add_up() -> None:
    recomputed = saved(LLAMA, recompute=("mlp",))
    attention, mlp = formulas("llama")
    assert saved(LLAMA, recompute=("mlp",), offload=("attention",), offload_to="disk") == recomputed + 4 * attention
    # Outputs recomputed from offloaded inputs: neither is on the device.
    both = saved(LLAMA, recompute=("activation", "norm"), offload=("attention", "mlp"), offload_to="disk")
    assert both > max(4 * (attention + mlp), saved(LLAMA, recompute=("activation", "norm")))
    # Offloaded inputs of recomputed blocks.
    entries = saved(LLAMA, recompute=("block",), offload=("block",), offload_to="disk")
    assert entries == saved(LLAMA, recompute=("block",)) + 4 * HIDDEN


def test_budget_bounds_offloaded_bytes() -> None:
    """64 tokens, 4 blocks."""
    attention, _ = formulas("llama")
    full = 4 * attention * 64
    some = saved(LLAMA, offload=("attention",), offload_to="disk", offload_bytes=2 * full)
    assert 1.5 * full / 64 / 4 < some <= 2 * full / 64 / 4


def test_budget_below_one_tensor_is_refused() -> None:
    with pytest.raises(RankError, match=r"10000 bytes cannot hold one activation of \d+ bytes"):
        saved(LLAMA, offload=("mlp",), offload_to="disk", offload_bytes=10_000)


# Parts of the implementation


def offload_on_disk(folder: Path, **settings: Any) -> Offload:
    return Offload(detect(), Pool(mapped_files(folder)), **settings)


class SaveWithView(torch.autograd.Function):
    """Function that saves a tensor and a view of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y, y[3:].t())
        return y.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        full, view = ctx.saved_tensors
        assert torch.equal(full[3:].t(), view)
        assert view.stride() == (1, 64)
        assert view.untyped_storage()._cdata == full.untyped_storage()._cdata
        return gradient * full


def test_views_share_one_copy_and_graph_can_run_twice(tmp_path: Path) -> None:
    offload = offload_on_disk(tmp_path)
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(offload.begin_module(nn.Identity()), lambda kept: kept.restore()):
        y = SaveWithView.apply(x)
    assert offload.pool.live == 64 * 64 * 4
    for _ in range(2):
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(gradient, 2 * x)
    del y
    assert offload.pool.live == 0
    assert offload.pool.held == 64 * 64 * 4


def test_in_place_change_after_offload_does_not_affect_saved_values(tmp_path: Path) -> None:
    offload = offload_on_disk(tmp_path)
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(offload.begin_module(nn.Identity()), lambda kept: kept.restore()):
        y = x * 1
        first = y.square().sum()
        with torch.no_grad():
            y += 1
        second = y.square().sum()
    (gradient,) = torch.autograd.grad(first, x, retain_graph=True)
    assert torch.equal(gradient, 2 * x)
    (gradient,) = torch.autograd.grad(second, x)
    assert torch.equal(gradient, 2 * (x + 1))


def test_weights_and_small_tensors_are_not_offloaded(tmp_path: Path) -> None:
    offload, layer = offload_on_disk(tmp_path), nn.Linear(64, 64)
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(offload.begin_module(layer), lambda kept: kept):
        layer(x)
    assert offload.pool.requested == 0


class LoggedStream:
    """Stream that writes down what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

    def wait_stream(self, stream: "LoggedStream") -> None:
        self.waits.append(stream)

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)

    def record_event(self) -> Any:
        return object()


class LoggedDevice(Cpu):
    def __init__(self) -> None:
        self.computing = LoggedStream()

    def stream(self) -> Any:
        return LoggedStream()

    def current_stream(self) -> Any:
        return self.computing


def test_a_copy_to_the_host_waits_for_the_fetch_from_its_own_block_alone(tmp_path: Path) -> None:
    """So that copies run in both directions at once, where backward and forward alternate."""
    device = LoggedDevice()
    offload: Any = Offload(device, Pool(mapped_files(tmp_path)))
    hooks = torch.autograd.graph.saved_tensors_hooks
    x = torch.randn(64, 64, requires_grad=True)

    def forward() -> torch.Tensor:
        offload.outgoing.waits.clear()
        with hooks(offload.begin_module(nn.Identity()), lambda kept: kept.restore()):
            return (x * 1).square().sum()

    first, second = forward(), forward()
    assert offload.outgoing.waits == [device.computing]  # a new block
    fetched = []
    for loss in (first, second):
        loss.backward()
        fetched.append(offload.reads[next(reversed(offload.reads))])
    third = forward()  # in the block that was released last
    assert offload.outgoing.waits == [device.computing, fetched[1]]
    fourth = forward()
    assert offload.outgoing.waits == [device.computing, fetched[0]]
    assert third == fourth
