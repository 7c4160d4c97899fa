"""FP8 matmuls: quantization, gradients, axes, loss beside bf16 over seeds, refusals."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lab.families import family
from tests.lab.parity import packed_batches, plan_for, reference_of_config, run_plan
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.compute.fp8 import fp8_linear
from weft.compute.fp8_cast import TENSOR, dequantize, quantize
from weft.device.cpu import Cpu
from weft.device.detect import detect
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.choices import check_axes, choose
from weft.parallel.operators import explain_operators
from weft.parallel.precision.fp8_layers import find_fp8_layers
from weft.plan import Comm, Compute, Memory, Parallel, Pipeline, Plan, Precision
from weft.precision.dtypes import check_dtypes

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("block", [TENSOR, (1, 128), (128, 128)])
def test_quantization(dtype: torch.dtype, block: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 384, generator=generator) * torch.logspace(-2, 2, 384)
    x[:128, :128] = 0
    values, scale = quantize(x, dtype, block)
    back = dequantize(values, scale, block)
    step = 2.0**-4 if dtype == torch.float8_e4m3fn else 2.0**-3  # half of the distance of neighbouring values
    smallest = scale.max() * torch.finfo(dtype).smallest_normal
    assert values.dtype == dtype
    assert values.is_contiguous()
    assert torch.isfinite(values.float()).all()
    assert ((back - x).abs() <= step * x.abs() + smallest).all()
    assert values.float().abs().max() == torch.finfo(dtype).max
    transposed, _ = quantize(x.T, dtype, block[::-1])
    assert torch.equal(transposed, values.T)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("shape", [(2, 5), (256,)])  # five tokens are padded
def test_linear(in_blocks: bool, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, gradient = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((*shape, 128), (256, 128), 256, (*shape, 256))
    )

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [value.to(dtype, copy=True).requires_grad_() for value in (x, weight, bias)]
        out = function(*inputs)
        out.backward(gradient.to(dtype))
        return [out.detach(), *(value.grad for value in inputs if value.grad is not None)]

    expected = run(torch.nn.functional.linear, torch.float64)
    found = run(lambda *inputs: fp8_linear(*inputs, in_blocks), torch.float32)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).norm() <= 0.07 * exact.norm()  # e5m2 has two bits after the point
    assert (found[0] - expected[0]).norm() > 1e-3 * expected[0].norm()
    assert torch.allclose(found[3].double(), expected[3], rtol=1e-5, atol=1e-4)  # the bias has no matmul


CASES: dict[str, tuple[str, int, dict[str, int], dict[str, Any]]] = {
    "zero 3": ("llama", 2, {"zero": 3}, {}),
    "zero 0, recompute": ("qwen3", 1, {"zero": 0}, {"memory": Memory(recompute=("block",))}),
    "tp": ("llama", 2, {"tp": 2, "zero": 1}, {"comm": Comm(overlap_chunks=1)}),
    "cp": ("llama", 2, {"cp": 2, "zero": 3}, {}),
    "pp": ("llama", 2, {"pp": 2, "zero": 1}, {}),
    "ep": ("qwen3_moe", 2, {"ep": 2, "zero": 1}, {}),
    "compiled": ("llama", 1, {"zero": 3}, {"compute": Compute(compile="blocks")}),
}


@pytest.mark.must("parity: FP8", case="fp8-tp")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("matmul", ["fp8", "fp8_block"])
def test_training_is_near_that_in_float32(name: str, matmul: str) -> None:
    kind, ranks, parallel, settings = CASES[name]
    source = Model(config={**family(kind), **SIZES})
    plan = plan_for("fp32", **parallel).model_copy(update=settings)
    precision = plan.precision.model_copy(update={"matmul": matmul, "emulate_fp8": True})
    plan = plan.model_copy(update={"precision": precision})
    expected = reference_of_config(json.dumps(source.config), "fp32", 4, None)
    batches = packed_batches(96)
    for found in run_ranks(ranks, run_plan, source, plan, batches, 2):
        assert found.losses == pytest.approx(expected.losses, rel=5e-3)
        assert found.losses != pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=0.1)
        for key, gradient in found.gradients.items():
            exact = expected.gradients.get(key)
            if exact is not None:  # a router chooses other experts for some tokens
                near = 0.9 if kind == "qwen3_moe" else 0.97
                assert torch.cosine_similarity(gradient.flatten(), exact.flatten(), 0) > near, key


def test_heads_narrower_than_a_block_keep_their_forward() -> None:
    config = {
        **family("llama"),
        **SIZES,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    precision = Precision(param_dtype="fp32", matmul="fp8_block", emulate_fp8=True)
    plan = Plan(
        parallel=Parallel(tp=4), precision=precision, comm=Comm(overlap_chunks=1)
    )  # half of a 128-wide key each
    expected = reference_of_config(json.dumps(config), "fp32", 4, None)
    for found in run_ranks(4, run_plan, Model(config=config), plan, packed_batches(96), 4):
        assert found.losses == pytest.approx(expected.losses, rel=5e-3)


def test_layers() -> None:
    model = build_on_meta(read_config(Model(config={**family("deepseek_v3"), "hidden_size": 64})), torch.float32)
    names = find_fp8_layers(model, read_anatomy(model), resolved(Plan(precision=Precision(matmul="fp8")), 1))
    kinds = {name.split(".", 3)[3] for name in names}
    assert "self_attn.o_proj" in kinds
    assert "mlp.shared_experts.gate_proj" not in kinds  # 24 features
    assert not any(name.endswith("gate") or "lm_head" in name for name in names)
    plain = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = resolved(Plan(precision=Precision(matmul="fp8", emulate_fp8=True)), 1)
    rows = {row.operator: row for row in explain_operators(plain, choose(plain, plan, "cpu", detect()), "cpu")}
    assert rows["matmul"].detail.startswith("14 linear layers")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (
            {"precision": Precision(matmul="fp8", param_dtype="fp16", loss_scale="dynamic")},
            "matmul with param_dtype",
        ),
        ({"precision": Precision(matmul="fp8"), "parallel": Parallel(tp=2)}, "overlapped matmuls"),
        ({"precision": Precision(emulate_fp8=True)}, "emulate_fp8 without matmul"),
    ],
)
def test_rules(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(PlanError, match=word):
        resolved(Plan(**settings), 2)


@pytest.mark.must("refusal: FP8")
def test_refusals() -> None:
    with pytest.raises(PlanError, match="no FP8 matmuls"):
        check_dtypes(Precision(matmul="fp8", param_dtype="fp32"), Cpu())
    check_dtypes(Precision(matmul="fp8", param_dtype="fp32", emulate_fp8=True), Cpu())
    model = build_on_meta(read_config(Model(config=family("gpt2"))), torch.float32)
    with pytest.raises(PlanError, match=r"no nn\.Linear"):  # GPT-2 has another class of layers
        find_fp8_layers(model, read_anatomy(model), resolved(Plan(precision=Precision(matmul="fp8")), 1))
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = plan_for("fp32", Pipeline(schedule="zb-h1"), pp=2)
    precision = plan.precision.model_copy(update={"matmul": "fp8", "emulate_fp8": True})
    with pytest.raises(PlanError, match="defers weight gradients"):
        check_axes(model, read_anatomy(model), resolved(plan.model_copy(update={"precision": precision}), 2))
