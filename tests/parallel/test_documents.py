"""Rows of one document use the masks of the model; packing and splitting that would change its masks are refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lab.families import family
from tests.lab.parity import compare, plan_for, run_plan
from tests.lab.plans import resolved, resolved_job
from tests.lab.pool import run_ranks
from tests.lab.shrink import shrunk
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.data import MicroBatch
from weft.errors import JobError, PlanError
from weft.job import Job, Model
from weft.parallel.choices import check_axes
from weft.training.job_checks import check_model

BIDIRECTIONAL = {**family("gemma3_text"), "use_bidirectional_attention": True}
ROWS = 4


def one_document_batches(steps: int = 3, seq_len: int = 16) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 96, (steps, ROWS, seq_len + 1), generator=generator)
    positions = torch.arange(seq_len).repeat(ROWS, 1)
    return [MicroBatch(row[:, :-1].contiguous(), positions, row[:, 1:].contiguous()) for row in tokens]


def untouched(source: Model, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of the mean loss of the unmodified eager model, row by row, without masks and positions."""
    model = build_plain(source, read_config(source), torch.float32).train()
    model.set_attn_implementation("eager")
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in batch.input_ids])
    F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (BIDIRECTIONAL, {"zero": 3}),
        (BIDIRECTIONAL, {"pp": 2, "zero": 1}),
        (shrunk("moshi"), {"zero": 1}),
        (shrunk("inkling_text"), {"zero": 2}),
        (shrunk("inkling_text"), {"pp": 2, "zero": 1}),
        (shrunk("mamba"), {"zero": 1}),
        (family("gemma3_text"), {"tp": 2, "zero": 1}),
        (family("gemma3_text"), {"cp": 2, "zero": 1}),
        (family("gpt_oss"), {"pp": 2, "zero": 1}),
    ],
    ids=lambda value: value.get("model_type", "-".join(f"{k}{v}" for k, v in value.items())),
)
def test_rows_of_one_document_equal_the_untouched_model(config: dict[str, Any], axes: dict[str, int]) -> None:
    source, batches = Model(config=config), one_document_batches()
    logits, gradients = untouched(source, batches[0])
    traces = run_ranks(2, run_plan, source, plan_for("fp32", **axes), batches, 2, timeout=120)
    shares = {trace.data_rank: trace.logits for trace in traces if len(trace.logits)}
    compare("logits", torch.cat([shares[rank] for rank in sorted(shares)]), logits, 1e-5)
    tied = next(iter(gradients.values()))  # gradient of the embedding, which a pipeline replicates in the head
    for trace in traces:
        for name, gradient in trace.gradients.items():
            compare(f"gradient of {name}", gradient, gradients.get(name, tied), 2e-5)
    assert {name for trace in traces for name in trace.gradients} >= set(gradients)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_masks_that_an_axis_would_lose_are_refused(axis: str) -> None:
    model = build_on_meta(read_config(Model(config=BIDIRECTIONAL)), torch.float32)
    plan = resolved(plan_for("fp32", **{axis: 2}), 2)
    with pytest.raises(PlanError, match=f"are lost under {axis}") as refusal:
        check_axes(model, read_anatomy(model), plan)
    assert f"set plan.parallel.{axis} = 1" in str(refusal.value)


@pytest.mark.parametrize(
    "name", ["minimax", "kimi_linear", "bailing_hybrid", "zaya", "deepseek_v4", "inkling_text", "inkling2_text"]
)
def test_packed_documents_that_leak_are_refused(name: str) -> None:
    refusal = assert_packing_refused(shrunk(name))
    assert "replacing the first document changes the logits" in refusal
    assert "set data.packing = false" in refusal


@pytest.mark.parametrize("config", [BIDIRECTIONAL, shrunk("moshi"), shrunk("bart")], ids=lambda c: c["model_type"])
def test_packed_documents_that_differ_from_each_alone_are_refused(config: dict[str, Any]) -> None:
    assert "from its logits without packing" in assert_packing_refused(config)


def test_packed_documents_of_a_model_that_cannot_be_tried_are_refused() -> None:
    assert "no small copy of blt can be built" in assert_packing_refused(shrunk("blt"))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "afmoe", "mpt", "opt"])
def test_packed_documents_that_stay_apart_are_accepted(name: str) -> None:
    check_model(job_of(shrunk(name)))


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_models_that_return_router_logits_are_accepted(axis: str) -> None:
    config = read_config(Model(config={**family("gpt_oss"), "output_router_logits": True}))
    model = build_on_meta(config, torch.float32)
    check_axes(model, read_anatomy(model), resolved(plan_for("fp32", **{axis: 2}), 2))


def test_limits_above_the_row_length_have_no_effect() -> None:
    """Sliding window, top-k of sparse attention, and the length at which rotary embeddings change."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    phi = {**family("phi3"), "rope_parameters": longrope, "original_max_position_embeddings": 16}
    for config in (
        {**shrunk("moshi"), "sliding_window": 16},
        *({**shrunk(name), "index_topk": 16, "index_n_heads": 2} for name in ("glm_moe_dsa", "deepseek_v32", "axk2")),
        phi,
    ):
        check_model(job_of(config, seq_len=16))
        assert_packing_refused(config, seq_len=32)


def assert_packing_refused(config: dict[str, Any], seq_len: int = 32) -> str:
    with pytest.raises(JobError, match="cannot keep packed documents apart") as refusal:
        check_model(job_of(config, seq_len))
    check_model(job_of(config, seq_len, packing=False))  # the suggested fix is accepted
    return str(refusal.value)


def job_of(config: dict[str, Any], seq_len: int = 32, packing: bool = True) -> Job:
    data = {"source": "python", "seq_len": seq_len, "packing": packing}
    job = Job.parse({"model": {"config": config}, "data": data})
    return resolved_job(job, 1)
