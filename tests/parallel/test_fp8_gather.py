"""Gathers of ZeRO 3 in FP8: the same bits as gathers in the dtype of forward, and fewer bytes."""

from typing import Any

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import packed_batches, plan_for, run_plan, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.recorder import Recorder
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.parallel.weights import to_local
from weft.plan import Plan
from weft.topology.mesh import build_mesh
from weft.training.forward_backward import forward_backward

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MOE = {**family("qwen3_moe"), **SIZES, "moe_intermediate_size": 32}
DENSE = {**family("llama"), **SIZES}


def plan_of(precision: dict[str, Any] | None = None, **parallel: Any) -> Plan:
    plan = plan_for("fp32", **parallel)
    settings = {"param_dtype": "bf16", "matmul": "fp8", "emulate_fp8": True, **(precision or {})}
    return plan.model_copy(update={"precision": plan.precision.model_copy(update=settings)})


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bf16": (2, DENSE, {}, {}),
    "fp32": (2, DENSE, {"param_dtype": "fp32"}, {}),
    "split weights": (2, DENSE, {"weights": "split"}, {}),
    "experts, three ranks": (3, MOE, {}, {}),  # which pads the shards
    "ep": (4, MOE, {}, {"ep": 2}),
    "replicas": (4, DENSE, {}, {"dp_replicate": 2}),
    "pp": (4, DENSE, {}, {"pp": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_other_gathers(name: str) -> None:
    """ZeRO 2 gathers the same weights in the dtype of forward; its layers round them to FP8."""
    ranks, config, precision, parallel = CASES[name]
    source, rows = Model(config=config), 12 if ranks == 3 else 4
    batches = packed_batches(96, rows)
    runs = [
        run_ranks(ranks, run_plan, source, plan_of(precision, zero=zero, **parallel), batches, 1) for zero in (2, 3)
    ]
    for expected, found in zip(*runs, strict=True):
        assert found.losses == expected.losses
        assert torch.equal(found.logits, expected.logits)
        for key, gradient in found.gradients.items():
            assert torch.equal(gradient, expected.gradients[key]), key
        assert all(torch.equal(weight, expected.weights[key]) for key, weight in found.weights.items())


def gathered_bytes(rank: int, world_size: int, plan: Plan) -> tuple[int, int, bool]:
    """Bytes gathered in a forward and backward, those of 16-bit weights of linear layers, and whether parameters are plain."""
    source, plan = Model(config=DENSE), resolved(plan, world_size)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, build_mesh(plan, "cpu", world_size))
    materialize(model, source, torch.device("cpu"))
    linear = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_proj.weight"))
    are_plain = all(type(to_local(p.detach())) is torch.Tensor for p in model.parameters())
    with Recorder() as recorder:
        forward_backward(model, share(packed_batches(96)[0], rank, world_size, 2), 1.0)
    return recorder.bytes_by("operation")["all_gather"], 2 * linear * (world_size - 1) // world_size, are_plain


def test_a_weight_is_gathered_in_one_byte() -> None:
    (in_16_bits, linear, _), (in_fp8, _, are_plain) = (
        run_ranks(2, gathered_bytes, plan_of({"matmul": matmul, "emulate_fp8": matmul == "fp8"}, zero=3))[0]
        for matmul in ("forward", "fp8")
    )
    assert in_16_bits - in_fp8 == linear  # half of it in forward, and half in backward
    assert are_plain
