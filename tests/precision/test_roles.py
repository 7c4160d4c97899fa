"""Modules that compute in float32 inside a bfloat16 forward."""

from typing import Any

import pytest
import torch

from tests.lab.bits import records_of
from tests.lab.families import family
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.job import Model
from weft.plan import Memory, Parallel, Plan, Precision
from weft.precision.roles import compute_in_float32

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
    "tp2": (2, {"tp": 2, "zero": 1}),
    "pp2": (2, {"pp": 2, "zero": 1}),
    "ep2": (2, {"ep": 2, "zero": 3}),
}
ROLES = ("router", "norm", "head")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_module_computes_in_float32(name: str, role: str) -> None:
    """The output is the rounded output of a float32 module; outside the module, no dtype changes."""
    source = Model(config=family(name))
    model = build_plain(source, read_config(source), torch.bfloat16)
    anatomy = read_anatomy(model)
    block = next(block for block in anatomy.blocks if block.is_moe)
    module = model.get_submodule({"router": block.router[0], "norm": block.norms[0], "head": anatomy.head}[role])
    x = torch.randn(6, next(module.parameters()).shape[-1], dtype=torch.bfloat16, requires_grad=True)
    plain = module(x)
    exact = module.float()(x.detach().float())
    module.bfloat16()
    compute_in_float32(model, anatomy, [role])
    found = module(x)
    outputs, exact_outputs, plain_outputs = (
        value if isinstance(value, tuple) else (value,) for value in (found, exact, plain)
    )
    for one, other, before in zip(outputs, exact_outputs, plain_outputs, strict=True):
        if one.is_floating_point():
            assert one.dtype == torch.bfloat16
            assert torch.equal(one, other.bfloat16())
        else:
            assert (one.dtype, one.shape) == (before.dtype, before.shape)
            assert torch.equal(one, other)  # chosen experts
    assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}
    sum(one.float().sum() for one in outputs if one.requires_grad).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert all(weight.grad is not None for weight in module.parameters() if weight.requires_grad and weight.ndim > 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_closer_to_float32_in_any_layout(layout: str) -> None:
    """Closer to float32 than without, together with other precision and memory settings."""
    ranks, parallel = LAYOUTS[layout]
    config = {**family("qwen3_moe"), "output_router_logits": True}
    memory = Memory(recompute=("activation", "norm"))
    settings = {"weights": "split", "backward": "fp16", "loss_scale": 4096.0}

    def run(**precision: Any) -> list[float]:
        plan = Plan(parallel=Parallel(**parallel), precision=Precision(**precision), memory=memory)
        return records_of(config, plan, ranks, 1)[0].losses

    exact = run(param_dtype="fp32")
    plain, found = run(**settings), run(**settings, fp32_modules=ROLES)
    assert found != plain
    assert found == pytest.approx(exact, rel=2e-3)
    assert abs(found[0] - exact[0]) < abs(plain[0] - exact[0]) + 1e-4
