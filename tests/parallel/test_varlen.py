"""Attention of packed rows by documents: the documents alone, masks of callers, refusals, and no wait of the host."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lab.families import FAMILIES, family
from tests.lab.parity import SETTINGS, packed_batches, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.lab.shrink import shrunk
from tests.lab.waits import counted
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.device.detect import detect
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.parallel.sequence.attention_plan import AttentionPlans
from weft.parallel.sequence.forward_pass import ForwardSlot
from weft.parallel.sequence.varlen import IMPLEMENTATION, install_varlen, run_documents, uses_varlen
from weft.plan import Compute, Plan
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

LENGTHS = (5, 1, 30, 12)
aten = torch.ops.aten


def config_of(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {**(family(name) if name in FAMILIES else shrunk(name)), **changes}


def plain(name: str, **changes: Any) -> Any:
    source = Model(config=config_of(name, changes))
    return build_plain(source, read_config(source), torch.float64)


def packed_row() -> tuple[Tensor, Tensor]:
    """Two rows of documents, and their positions."""
    tokens = torch.randint(3, 96, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return tokens, torch.stack([positions, torch.arange(sum(LENGTHS))])  # the second row is one document


@pytest.mark.must("parity: attention of packed rows")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gemma3_text", {"sliding_window": 8}),
        ("mistral", {"sliding_window": 8}),
        ("qwen3_moe", {}),
    ],
)
def test_documents_of_a_row_equal_each_alone(name: str, changes: dict[str, Any]) -> None:
    model = plain(name, **changes)
    tokens, positions = packed_row()
    alone = [model(input_ids=part, use_cache=False).logits for part in tokens[:1].split(LENGTHS, 1)]
    expected = torch.cat([torch.cat(alone, 1), model(input_ids=tokens[1:], use_cache=False).logits])
    expected.square().sum().backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad()
    found = run_documents(model, tokens, positions)
    found.square().sum().backward()
    assert model.config._attn_implementation == IMPLEMENTATION
    # Norms and rotary embeddings of some families are in float32.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[key], rtol=1e-4, atol=1e-5)


def test_masks_and_positions_of_a_caller_are_those_of_transformers() -> None:
    tokens, positions = packed_row()
    padding = torch.ones_like(tokens)
    padding[0, :7] = 0
    calls: list[dict[str, Any]] = [{}, {"position_ids": positions}, {"attention_mask": padding}]
    model = plain("llama")
    model.set_attn_implementation("sdpa")
    expected = [model(input_ids=tokens, use_cache=False, **call).logits for call in calls]
    install_varlen(model, read_anatomy(model), AttentionPlans("cpu"), ForwardSlot())
    found = [model(input_ids=tokens, use_cache=False, **call).logits for call in calls]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    generated = model.generate(input_ids=tokens[1:], max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, sum(LENGTHS) + 3)


@pytest.mark.parametrize(
    ("name", "changes", "plan", "expected"),
    [
        ("llama", {}, {}, True),
        ("gemma3_text", {}, {}, True),
        ("gemma2", {}, {}, False),  # softcaps: Transformers computes them in eager attention
        ("gemma3_text", {"use_bidirectional_attention": True}, {}, False),
        ("bloom", {}, {}, False),
        ("llama", {"attention_dropout": 0.1}, {}, False),
        ("llama", {}, {"cp": 2}, False),
    ],
)
def test_auto_takes_it_where_the_result_is_kept(
    name: str, changes: dict[str, Any], plan: dict[str, Any], expected: bool
) -> None:
    model = build_on_meta(read_config(Model(config=config_of(name, changes))), torch.float32)
    anatomy = read_anatomy(model)
    assert uses_varlen(model, anatomy, plan_for("fp32", **plan), "cpu") is expected
    assert not uses_varlen(model, anatomy, plan_for("fp32", **plan), "cuda")


def test_asked_for_where_it_does_not_apply() -> None:
    model = build_on_meta(read_config(Model(config=shrunk("bloom"))), torch.float32)
    plan = Plan(compute=Compute(attention="varlen"))
    with pytest.raises(PlanError, match='attention = "varlen" for bloom') as refusal:
        uses_varlen(model, read_anatomy(model), plan, "cpu")
    assert 'set plan.compute.attention = "auto"' in str(refusal.value)
    with pytest.raises(PlanError, match="cp with attention = sdpa or eager or flex"):
        resolved(plan_for("fp32", cp=2).model_copy(update={"compute": Compute(attention="sdpa")}), 2)


ON_THE_HOST = ("attention_plan.", "rows.encode_documents", "batches.")
"""Functions that read documents, which are in host memory."""


def waits_of_a_step(rank: int, world_size: int, name: str, zero: int, cp: int = 1) -> dict[str, int]:
    source = Model(config=family(name))
    plan = resolved(plan_for("fp32", zero=zero, cp=cp), world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    assert runtime(model).attention_plans is not None
    first, second, _ = packed_batches(96, rows=4)
    train_step(model, optimizer, [first, second], 1.0)
    with counted() as calls:
        train_step(model, optimizer, [first, second], 1.0)
    assert calls["attention_plan._diagonal: tolist"] == 2  # once a micro-batch, for all layers
    return {where: count for where, count in calls.items() if not where.startswith(ON_THE_HOST)}


@pytest.mark.parametrize("zero", [0, 3])
def test_the_host_waits_once_in_a_step(zero: int) -> None:
    (calls,) = run_ranks(1, waits_of_a_step, "llama", zero)
    assert calls == {"step.read: tolist": 1}


def test_context_parallelism_adds_no_waits() -> None:
    for calls in run_ranks(2, waits_of_a_step, "llama", 3, 2):
        assert calls == {"step.read: tolist": 1}


def test_only_the_router_adds_waits() -> None:
    (calls,) = run_ranks(1, waits_of_a_step, "qwen3_moe", 3)
    assert calls.pop("step.read: tolist") == 1
    assert not calls
