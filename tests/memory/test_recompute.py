"""Recompute leaves steps bit-equal in any layout, and frees memory between forward and backward."""

from typing import Any

import pytest
import torch

from tests.lab.bits import assert_same_bits_with
from tests.lab.families import FAMILIES, family
from tests.lab.live import StorageBytes
from tests.lab.parity import plan_for
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.plan import Memory, Pipeline, Plan, Precision
from weft.topology.mesh import build_mesh

ROLES = (
    ("block",),
    ("attention",),
    ("mlp",),
    ("activation",),
    ("norm",),
    ("activation", "norm"),
    ("attention", "activation"),
)
ALL = ("attention", "activation", "norm")
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
    "tp2 sp": (2, {"tp": 2, "zero": 1}),
    "cp2 ring": (2, {"cp": 2, "zero": 2}),
    "pp2": (2, {"pp": 2, "zero": 1}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 3}),
}
EXPERT_LAYOUTS = {"ep2": (2, {"ep": 2, "zero": 3}), "tp2 x ep2, replicated": (2, {"tp": 2, "ep": 2, "zero": 0})}


@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_is_bit_equal(name: str) -> None:
    memories = [Memory(recompute=roles) for roles in ROLES]
    assert_same_bits_with(family(name), plan_for("fp32", zero=0), 1, *memories)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recompute_is_bit_equal_in_any_layout(name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    memories = [Memory(recompute=("block",)), Memory(recompute=ALL, recompute_interval=2), Memory(recompute=ALL)]
    assert_same_bits_with(family(name), plan_for("fp32", **parallel), ranks, *memories)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_recompute_of_experts_with_auxiliary_loss_is_bit_equal(name: str, layout: str) -> None:
    """A recomputed router does not count its tokens twice."""
    ranks, parallel = EXPERT_LAYOUTS[layout]
    config = {**family(name), "output_router_logits": True, "router_aux_loss_coef": 0.1}
    assert_same_bits_with(
        config, plan_for("fp32", **parallel), ranks, Memory(recompute=("block",)), Memory(recompute=("mlp", "norm"))
    )


def test_shared_experts_are_recomputed_in_the_same_order() -> None:
    """Shared experts overlap with the all-to-all of the routed experts, in forward and when it is recomputed."""
    memories = [Memory(recompute=("mlp",)), Memory(recompute=("block",))]
    assert_same_bits_with(family("deepseek_v3"), plan_for("fp32", ep=2, zero=1), 2, *memories)


@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 2}, {"zero": 0, "tp": 2}, {"pp": 2, "zero": 1}])
def test_recompute_with_dropout_and_bf16_is_bit_equal(parallel: dict[str, int]) -> None:
    """Recomputed forwards drop the same elements, and use the weights in the forward dtype."""
    precision = Precision(param_dtype="bf16", update="fp32", reduce_dtype="fp32")
    plan = plan_for("fp32", **parallel).model_copy(update={"precision": precision})
    config = {**family("gpt2"), **DROPOUT}
    memories = [Memory(recompute=roles) for roles in (("block",), ("attention", "mlp"), ("activation", "norm"))]
    assert_same_bits_with(config, plan, 2, *memories, micro_batch=1)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_recompute_is_bit_equal_with_pipeline_schedules(schedule: str) -> None:
    pipeline = Pipeline(schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    plan = plan_for("fp32", pipeline, pp=2, zero=1)
    config = {**family("llama"), "num_hidden_layers": 4}
    assert_same_bits_with(config, plan, 2, Memory(recompute=("block",)), Memory(recompute=ALL), micro_batch=1)


# Memory


def held_bytes(rank: int, world_size: int, config: dict[str, Any], memory: Memory, dtype: torch.dtype) -> int:
    """Bytes that a forward saves for backward."""
    source = Model(config=config)
    plan = Plan(parallel=plan_for("fp32", zero=0).parallel, memory=memory, precision=plan_for("fp32").precision)
    plan = resolved(plan, world_size)
    plain: Any = build_plain(source, read_config(source), dtype)
    model = parallelize(plain, plan, build_mesh(plan, "cpu", world_size))
    model.train()
    tokens = torch.randint(0, 96, (2, 32))
    with StorageBytes().track(model) as live:
        before = live.current
        inside = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        held = live.current - before
    inside.sum().backward()
    return held


def saved(config: dict[str, Any], dtype: torch.dtype = torch.float32, **settings: Any) -> float:
    """Bytes per token and block that are saved for backward without, but not with, the given settings."""
    blocks = config["num_hidden_layers"]
    plain, less = (run_ranks(1, held_bytes, config, memory, dtype)[0] for memory in (Memory(), Memory(**settings)))
    return (plain - less) / 64 / blocks


LLAMA = {**family("llama"), "num_hidden_layers": 4}
HIDDEN, INNER = LLAMA["hidden_size"], LLAMA["intermediate_size"]


def test_outputs_of_activation_functions_are_freed_after_forward() -> None:
    """In a gated feed-forward part: silu(gate), and its product with the up projection."""
    assert saved(LLAMA, recompute=("activation",)) == 2 * INNER * 4
    assert saved(LLAMA, torch.bfloat16, recompute=("activation",)) == 2 * INNER * 2
    assert saved(LLAMA, recompute=("activation",), recompute_interval=2) == INNER * 4


def test_outputs_of_norms_are_freed_after_forward() -> None:
    """For each of two norms: x / rms, its product with the weight, and the rms."""
    assert saved(LLAMA, recompute=("norm",)) == pytest.approx(2 * (2 * HIDDEN + 1) * 4, abs=8)


def test_recomputed_blocks_save_only_their_input() -> None:
    plain = run_ranks(1, held_bytes, LLAMA, Memory(), torch.float32)[0]
    less = run_ranks(1, held_bytes, LLAMA, Memory(recompute=("block",)), torch.float32)[0]
    assert less < plain / 5
    assert saved(LLAMA, recompute=("block",), recompute_interval=2) < saved(LLAMA, recompute=("block",)) * 0.6


def test_every_family_has_mlp_and_norm_modules() -> None:
    for name in FAMILIES:
        source = Model(config=family(name))
        anatomy = read_anatomy(build_plain(source, read_config(source), torch.float32))
        assert all(block.mlp and block.norms for block in anatomy.blocks), name
