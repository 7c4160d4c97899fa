"""fp16 backward: equal forward, gradients closer to exact gradients in any layout, stored and sent as float16."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.lab.bits import records_of
from tests.lab.families import FAMILIES, family
from tests.lab.parity import ParityRecord, logits_of, packed_batches
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.comm.collectives import gather
from weft.comm.recorder import Recorder
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.parallel.weights import to_local
from weft.plan import Memory, Parallel, Pipeline, Plan, Precision
from weft.precision.fp16_backward import Fp16Grad, begin_fp16_backward, from_message, to_message
from weft.topology.mesh import build_mesh

HALF = Precision(param_dtype="bf16", backward="fp16", loss_scale=2.0**12)
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


def distance(found: ParityRecord, exact: ParityRecord) -> float:
    """Relative distance of all gradients of the first step."""
    pairs = [(found.gradients[name].double(), exact.gradients[name].double()) for name in exact.gradients]
    return float(
        (sum((one - other).norm() ** 2 for one, other in pairs) / sum(other.norm() ** 2 for _, other in pairs)) ** 0.5
    )


def chosen_experts(config: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """Per MoE layer: number of copies of each token for each expert, on the rows of the first step."""
    source = Model(config=config)
    model: Any = build_plain(source, read_config(source), torch.float32).to(dtype)
    model.config.output_router_logits = False  # no auxiliary loss
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
    """True if bfloat16 and float32 forwards route any token to different experts."""
    exact, rounded = (chosen_experts(config, dtype) for dtype in (torch.float32, torch.bfloat16))
    return any(not torch.equal(one, other) for one, other in zip(exact, rounded, strict=True))


def assert_nearer(config: dict[str, Any], ranks: int, parallel: dict[str, Any], memory: Memory, **more: Any) -> None:
    """Check that the gradient error is smaller than with bf16 backward.

    Half of the error of a bf16 step comes from forward and stays; fp16 backward removes nearly all of the other half. If
    rounding in forward changes the routing, as in GPT-OSS, nearly all of the error comes from forward.
    """
    plan = Plan(parallel=Parallel(**parallel), memory=memory, **more)

    def run(precision: Precision) -> ParityRecord:
        return records_of(config, plan.model_copy(update={"precision": precision}), ranks, 1)[0]

    exact, bf16, fp16 = run(Precision(param_dtype="fp32")), run(Precision(param_dtype="bf16")), run(HALF)
    assert fp16.losses[0] == bf16.losses[0]
    limit = 1.02 if rounding_chooses_other_experts(config) else 0.9
    assert distance(fp16, exact) < limit * distance(bf16, exact)
    assert fp16.losses == pytest.approx(exact.losses, rel=5e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_closer_to_exact_for_every_family(name: str) -> None:
    assert_nearer(family(name), 1, {"zero": 0}, Memory())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_closer_to_exact_in_any_layout(layout: str) -> None:
    ranks, parallel, memory = LAYOUTS[layout]
    assert_nearer(family("llama"), ranks, parallel, memory)


@pytest.mark.parametrize("layout", EXPERTS)
def test_gradients_are_closer_to_exact_with_experts(layout: str) -> None:
    ranks, parallel = EXPERTS[layout]
    assert_nearer({**family("qwen3_moe"), "output_router_logits": True}, ranks, parallel, Memory())


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_gradients_are_closer_to_exact_with_pipeline_schedules(schedule: str) -> None:
    pipeline = Pipeline(schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    assert_nearer({**family("llama"), "num_hidden_layers": 4}, 2, {"pp": 2, "zero": 1}, Memory(), pipeline=pipeline)


def plain_training_loop(rank: int, world_size: int, zero: int) -> tuple[set[type], set[type]]:
    """Types of the gradients of a block's output, and of the gradients for the optimizer."""
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
def test_optimizer_gets_plain_gradients_in_a_plain_training_loop(zero: int) -> None:
    for inside, outside in run_ranks(2, plain_training_loop, zero):
        assert inside == {Fp16Grad}
        assert outside == {torch.Tensor}


# Fp16Grad


class GradientRecorder(nn.Module):
    """Linear layer that records its output gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.gradients: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(x.bfloat16() @ self.weight.bfloat16())
        y.register_hook(self.gradients.append)
        return (y.float() / y.float().norm()).bfloat16()


def test_gradients_are_stored_in_float16_end_to_end() -> None:
    """Also through a float32 norm; accumulated in float32."""
    torch.manual_seed(0)
    first, second = GradientRecorder(), GradientRecorder()
    loss = begin_fp16_backward(second(first(torch.randn(4, 8))).float()).square().sum() * 1024
    loss.backward()
    for module in (first, second):
        (gradient,) = module.gradients
        assert isinstance(gradient, Fp16Grad)
        assert (gradient.dtype, gradient.stored.dtype) == (torch.bfloat16, torch.float16)
        assert isinstance(module.weight.grad, Fp16Grad)  # after parallelize, it is added to a plain bucket
        sums = module.weight.grad.stored
        assert sums.dtype == torch.float32
        assert not torch.equal(sums, sums.bfloat16().float())


def test_in_place_operations_write_through_to_plain_tensors() -> None:
    gradient, plain = Fp16Grad(torch.full((4,), 1.5, dtype=torch.float16)), torch.ones(4, dtype=torch.bfloat16)
    assert plain.add_(gradient) is plain
    assert plain.tolist() == [2.5] * 4
    assert gradient.add_(plain) is gradient
    assert gradient.stored.tolist() == [4.0] * 4


def test_message_roundtrip_is_bit_equal() -> None:
    """A message has the size of a bfloat16 tensor, as the receiver expects."""
    gradient = Fp16Grad(torch.randn(5, 3).half())
    message = to_message(gradient)
    assert (message.dtype, message.shape) == (torch.bfloat16, (5, 3))
    assert torch.equal(from_message(message).stored, gradient.stored)  # type: ignore[attr-defined]
    sums = torch.randn(3)
    assert to_message(sums) is sums
    assert from_message(sums) is sums


def send_both_ways(rank: int, world_size: int) -> list[torch.dtype]:
    """Dtypes of the messages of a gather along tp, and of its backward."""
    mesh = build_mesh(Plan(parallel=Parallel(tp=world_size)), "cpu", world_size)
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    with Recorder() as recorder:
        begin_fp16_backward(gather(x, mesh.get_group("tp"), 0).float()).sum().backward()
    return [message.dtype for message in recorder.messages]


def test_gradients_are_sent_as_float16() -> None:
    assert run_ranks(2, send_both_ways) == [[torch.bfloat16, torch.float16]] * 2


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(PlanError, match="backward = fp16 without loss_scale"):
        resolved(Plan(precision=Precision(backward="fp16")), 1)
    with pytest.raises(PlanError, match="backward = fp16 without param_dtype = bf16"):
        resolved(Plan(precision=Precision(backward="fp16", param_dtype="fp32", loss_scale="dynamic")), 1)
