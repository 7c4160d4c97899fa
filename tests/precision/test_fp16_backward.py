"""Backward in float16: the same forward, gradients nearer to exact ones, in any layout, held and sent as float16."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.lab.bits import traces_of
from tests.lab.families import FAMILIES, family
from tests.lab.parity import Trace, logits_of, packed_batches
from tests.lab.pool import run_ranks
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import build_plain
from weft.checkpoint.model_config import read_config
from weft.comm.collectives import Recorder, gather
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.parallel.weights import to_local
from weft.plan import Memory, Parallel, Pipeline, Plan, Precision
from weft.precision.fp16_backward import Fp16Grad, carry_gradient, from_message, to_message
from weft.topology.mesh import build_mesh

HALF = Precision(backward="fp16", loss_scale=2.0**12)
LAYOUTS: dict[str, tuple[int, dict[str, Any], Memory]] = {
    "zero 0": (2, {"zero": 0}, Memory()),
    "zero 3": (2, {"zero": 3}, Memory()),
    "tp2 sp": (2, {"tp": 2, "zero": 1}, Memory()),
    "tp2, zero 0": (2, {"tp": 2, "sp": False, "zero": 0}, Memory()),
    "cp2 ring": (2, {"cp": 2, "zero": 2}, Memory()),
    "cp2 ulysses": (2, {"cp": 2, "cp_ulysses": 2, "zero": 0}, Memory()),
    "pp2": (2, {"pp": 2, "zero": 1}, Memory()),
    "recompute block": (2, {"zero": 3}, Memory(recompute=("block",))),
    "recompute parts": (2, {"zero": 0}, Memory(recompute=("attention", "activation", "norm"))),
    "offload": (2, {"zero": 3}, Memory(offload=("block",), offload_to="disk")),
}
EXPERTS = {"ep2": (2, {"ep": 2, "zero": 3}), "tp2 x ep2": (2, {"tp": 2, "ep": 2, "zero": 0})}


def distance(found: Trace, exact: Trace) -> float:
    """Of all gradients of the first step, relative."""
    pairs = [(found.gradients[name].double(), exact.gradients[name].double()) for name in exact.gradients]
    return float(
        (sum((one - other).norm() ** 2 for one, other in pairs) / sum(other.norm() ** 2 for _, other in pairs)) ** 0.5
    )


def chosen_experts(config: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each layer with experts, the copies of each token for each expert, on the rows of the first step."""
    source = Model(config=config)
    model: Any = build_plain(source, read_config(source), torch.float32).to(dtype)
    model.config.output_router_logits = False  # its loss is not wanted
    found: list[torch.Tensor] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = args[1] if len(args) > 1 else next(value for key, value in kwargs.items() if "ind" in key)
        found.append(nn.functional.one_hot(index).sum(-2))

    for name in (name for block in read_anatomy(model).blocks for name in block.experts):
        model.get_submodule(name).register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        logits_of(model, packed_batches(96)[0])
    return found


def rounding_chooses_other_experts(config: dict[str, Any]) -> bool:
    """Whether forward in bfloat16 sends a token to other experts than forward in float32."""
    exact, rounded = (chosen_experts(config, dtype) for dtype in (torch.float32, torch.bfloat16))
    return any(not torch.equal(one, other) for one, other in zip(exact, rounded, strict=True))


def assert_nearer(config: dict[str, Any], ranks: int, parallel: dict[str, Any], memory: Memory, **more: Any) -> None:
    """Half of a bf16 step's error is that of forward, which stays; of the other half nearly nothing is left.

    Where rounding in forward chooses other experts, as in GPT-OSS, nearly all of the error is that of forward.
    """
    plan = Plan(parallel=Parallel(**parallel), memory=memory, **more)

    def run(precision: Precision) -> Trace:
        return traces_of(config, plan.model_copy(update={"precision": precision}), ranks, 1)[0]

    exact, brain, half = run(Precision(param_dtype="fp32")), run(Precision()), run(HALF)
    assert half.losses[0] == brain.losses[0]
    limit = 1.02 if rounding_chooses_other_experts(config) else 0.9
    assert distance(half, exact) < limit * distance(brain, exact)
    assert half.losses == pytest.approx(exact.losses, rel=5e-3)


@pytest.mark.thin(9)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    assert_nearer(family(name), 1, {"zero": 0}, Memory())


@pytest.mark.thin(7)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    ranks, parallel, memory = LAYOUTS[layout]
    assert_nearer(family("llama"), ranks, parallel, memory)


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts(layout: str) -> None:
    ranks, parallel = EXPERTS[layout]
    assert_nearer({**family("qwen3_moe"), "output_router_logits": True}, ranks, parallel, Memory())


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_schedules(schedule: str) -> None:
    pipeline = Pipeline(schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    assert_nearer({**family("llama"), "num_hidden_layers": 4}, 2, {"pp": 2, "zero": 1}, Memory(), pipeline=pipeline)


def loop_of_ones_own(rank: int, world_size: int, zero: int) -> tuple[set[type], set[type]]:
    """Types of the gradients of a block's output, and of those that the optimizer gets."""
    plan = Plan(parallel=Parallel(zero=zero), precision=HALF)
    source = Model(config=family("llama"))
    mesh = build_mesh(plan, "cpu", world_size)
    model: Any = parallelize(build_plain(source, read_config(source), torch.float32), plan, mesh)
    seen: list[type] = []

    def look(module: nn.Module, args: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda gradient: seen.append(type(gradient)))

    model.model.layers[0].register_forward_hook(look)
    tokens = torch.arange(32).view(2, 16)
    (model(input_ids=tokens, labels=tokens).loss * 4096).backward()
    return set(seen), {type(to_local(parameter.grad)) for parameter in model.parameters()}


@pytest.mark.parametrize("zero", [0, 3])
def test_a_loop_of_ones_own(zero: int) -> None:
    for inside, outside in run_ranks(2, loop_of_ones_own, zero):
        assert inside == {Fp16Grad}
        assert outside == {torch.Tensor}


# What a gradient is


class Seen(nn.Module):
    """Multiplies, and keeps what backward brings."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.gradients: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(x.bfloat16() @ self.weight.bfloat16())
        y.register_hook(self.gradients.append)
        return (y.float() / y.float().norm()).bfloat16()


def test_held_in_float16_from_end_to_end() -> None:
    """Through a norm in float32 too, and float32 where it is added up."""
    torch.manual_seed(0)
    first, second = Seen(), Seen()
    loss = carry_gradient(second(first(torch.randn(4, 8))).float()).square().sum() * 1024
    loss.backward()
    for module in (first, second):
        (gradient,) = module.gradients
        assert isinstance(gradient, Fp16Grad)
        assert (gradient.dtype, gradient.carried.dtype) == (torch.bfloat16, torch.float16)
        assert isinstance(module.weight.grad, Fp16Grad)  # in a model of ours it goes into a bucket, which is plain
        sums = module.weight.grad.carried
        assert sums.dtype == torch.float32
        assert not torch.equal(sums, sums.bfloat16().float())


def test_what_is_written_into_a_plain_tensor_is_there() -> None:
    gradient, plain = Fp16Grad(torch.full((4,), 1.5, dtype=torch.float16)), torch.ones(4, dtype=torch.bfloat16)
    assert plain.add_(gradient) is plain
    assert plain.tolist() == [2.5] * 4
    assert gradient.add_(plain) is gradient
    assert gradient.carried.tolist() == [4.0] * 4


def test_a_message_has_all_its_bits() -> None:
    """As many as bfloat16 has, so that the receiver's room fits."""
    gradient = Fp16Grad(torch.randn(5, 3).half())
    message = to_message(gradient)
    assert (message.dtype, message.shape) == (torch.bfloat16, (5, 3))
    assert torch.equal(from_message(message).carried, gradient.carried)  # type: ignore[attr-defined]
    sums = torch.randn(3)
    assert to_message(sums) is sums
    assert from_message(sums) is sums


def send_both_ways(rank: int, world_size: int) -> list[torch.dtype]:
    """Formats on the wire of a gather along tp, and of its transpose."""
    mesh = build_mesh(Plan(parallel=Parallel(tp=world_size)), "cpu", world_size)
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    with Recorder() as recorder:
        carry_gradient(gather(x, mesh.get_group("tp"), 0).float()).sum().backward()
    return [message.dtype for message in recorder.messages]


def test_gradients_travel_as_float16() -> None:
    assert run_ranks(2, send_both_ways) == [[torch.bfloat16, torch.float16]] * 2


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="fp16 backward without a loss scale"):
        Plan(precision=Precision(backward="fp16")).resolve(1)
    with pytest.raises(PlanError, match="fp16 backward behind another forward than bf16"):
        Plan(precision=Precision(backward="fp16", param_dtype="fp32", loss_scale="dynamic")).resolve(1)
