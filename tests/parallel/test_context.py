"""Context-parallel attention compared with masked attention over the full sequence: outputs and all gradients."""

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.lab.families import FAMILIES
from tests.lab.parity import logits_of
from tests.lab.pool import run_ranks
from weft.backends.hierarchical import register_backend
from weft.compute.attention import PLAIN
from weft.compute.sequences import VarlenKernel
from weft.compute.varlen_blocks import STRIP, blocks_kernel
from weft.data import MicroBatch
from weft.errors import ModelError, PlanError
from weft.parallel.sequence.attention_interface import AttentionSettings, context_attention, replace_attention
from weft.parallel.sequence.attention_plan import AttentionPlans
from weft.parallel.sequence.context import attend
from weft.parallel.sequence.context_grid import (
    ContextParallel,
    natural_positions,
    reason_against_heads,
    reason_against_length,
    zigzag_indices,
)

SCALE = 0.3
ROWS = 2


@dataclass(frozen=True)
class Case:
    """Shapes and options of one attention."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    seq_len: int = 32
    documents: tuple[tuple[int, ...], ...] | None = None
    """Lengths of the documents of each row."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    kernel: VarlenKernel | None = None
    dropout: float = 0.0
    ulysses_chunks: int = 1

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """q, k, v and sinks of the full sequence, and the gradient of the output."""
        generator = torch.Generator().manual_seed(11)
        shapes = [(ROWS, self.heads, self.seq_len, self.head_dim), (ROWS, self.kv_heads, self.seq_len, self.head_dim)]
        shapes += [(ROWS, self.kv_heads, self.seq_len, self.value_dim), (self.heads,)]
        q, k, v, sinks = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes
        )
        grad = torch.randn((*q.shape[:-1], self.value_dim), generator=generator, dtype=torch.float64).to(self.dtype)
        return [q, k, v, sinks], grad

    def document_ids(self) -> Tensor | None:
        if self.documents is None:
            return None
        rows = [[index for index, length in enumerate(row) for _ in range(length)] for row in self.documents]
        return torch.tensor(rows)


def full_attention(case: Case) -> list[Tensor]:
    """Output and gradients from the definition of attention, in float64."""
    tensors, grad = case.tensors()
    leaves = [x.double().requires_grad_() for x in tensors]
    q, k, v, sinks = leaves
    positions = torch.arange(case.seq_len)
    distance = positions[:, None] - positions
    visible = (distance >= 0)[None]
    if case.window is not None:
        visible = visible & (distance < case.window)
    documents = case.document_ids()
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None])
    groups = case.heads // case.kv_heads
    scores = q @ k.repeat_interleave(groups, 1).mT * SCALE
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if case.sinks:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(ROWS, -1, case.seq_len, 1)], -1)
    out = torch.softmax(scores, -1)[..., : case.seq_len] @ v.repeat_interleave(groups, 1)
    gradients = torch.autograd.grad(out, leaves[: 4 if case.sinks else 3], grad.double())
    return [out.detach(), *gradients]


def make_context(rank: int, ulysses: int, ring: int, ulysses_chunks: int = 1) -> ContextParallel:
    """Process groups of the grid, with consecutive Ulysses ranks."""
    ranks = torch.arange(ulysses * ring).view(ring, ulysses)

    def group(rows: Tensor, size: int) -> dist.ProcessGroup | None:
        groups = [dist.new_group(row.tolist(), backend=register_backend()) for row in rows] if size > 1 else []
        return next((group for row, group in zip(rows, groups, strict=False) if rank in row.tolist()), None)

    return ContextParallel(group(ranks, ulysses), group(ranks.T, ring), ulysses, ring, rank, ulysses_chunks)


class CountCalls(TorchDispatchMode):
    """Counter of query-key pairs computed by the flash operators, by direction."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if "flash_attention" in name:
            q, k = args[1:3] if name.endswith("backward") else args[:2]
            direction = "backward" if name.endswith("backward") else "forward"
            self.pairs[direction] += len(q) * q.shape[2] * k.shape[2]
        return func(*args, **(kwargs or {}))


def run_case(
    rank: int, world_size: int, case: Case, ulysses: int, ring: int
) -> tuple[list[Tensor], Tensor, Counter[str]]:
    """Output and gradients for the tokens of one rank, positions of the tokens, and counted pairs."""
    context = make_context(rank, ulysses, ring, case.ulysses_chunks)
    positions = natural_positions(case.seq_len, ulysses, ring, rank)
    tensors, grad = case.tensors()
    *local, sinks = tensors
    # with the memory layout of models: tokens before heads
    leaves = [x[:, :, positions].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in local]
    sinks.requires_grad_()
    with CountCalls() as count:
        out = attend(
            *leaves,
            case.document_ids(),
            context,
            scale=SCALE,
            window=case.window,
            softcap=case.softcap,
            sinks=sinks if case.sinks else None,
            dropout=case.dropout,
            seed=5,
            kernel=case.kernel,
        )
        out.backward(grad[:, :, positions].transpose(2, 3).contiguous().transpose(2, 3))
    gradients = [x.grad for x in (*leaves, *([sinks] if case.sinks else []))]
    assert all(gradient is not None for gradient in gradients)
    return [out.detach(), *gradients], positions, count.pairs


def gather_results(case: Case, ulysses: int, ring: int) -> tuple[list[Tensor], list[Counter[str]]]:
    """Output and gradients of the full sequence, gathered from all ranks; gradients of sinks are summed."""
    results = run_ranks(ulysses * ring, run_case, case, ulysses, ring)
    positions = torch.cat([positions for _, positions, _ in results])
    assert torch.equal(positions.sort().values, torch.arange(case.seq_len))
    parts = list(zip(*(tensors for tensors, _, _ in results), strict=True))
    full = [torch.cat(part, 2)[:, :, positions.argsort()] for part in parts[:4]]
    return full + [torch.stack(part).sum(0) for part in parts[4:]], [pairs for _, _, pairs in results]


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def assert_parity(case: Case, ulysses: int, ring: int) -> list[Counter[str]]:
    found, pairs = gather_results(case, ulysses, ring)
    expected = full_attention(case)
    for name, x, reference in zip(("out", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
        assert x.dtype == case.dtype
        error = (x.double() - reference).abs().max() / reference.abs().max()
        assert error <= TOLERANCE[case.dtype], f"{name} is off by {error:.3g}"
    assert len(found) == len(expected)
    return pairs


REFERENCE = blocks_kernel("reference", PLAIN, strip=3, largest=40)
"""Definition of attention, for a few queries at a time."""
GRIDS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
PACKED = ((5, 1, 20, 6), (32,))
CASES = {
    "plain causal": Case(),
    "packed": Case(documents=PACKED),
    "window": Case(window=7),
    "window as long as a chunk": Case(window=4),
    "window, packed, sinks": Case(window=5, documents=PACKED, sinks=True),
    "one head of keys, short values": Case(kv_heads=1, value_dim=5),
    "as many heads of keys, long values": Case(kv_heads=4, head_dim=4),
    "softcap": Case(softcap=0.7, documents=PACKED),
    "float32": Case(dtype=torch.float32, documents=PACKED, sinks=True),
    "bf16": Case(dtype=torch.bfloat16, documents=PACKED, sinks=True),
}


@pytest.mark.parametrize(("ulysses", "ring"), GRIDS)
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, ulysses: int, ring: int) -> None:
    assert_parity(CASES[name], ulysses, ring)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == torch.float64])
def test_parity_of_the_definition(name: str) -> None:
    """The leaf alone differs: plan, ring and merge are those of every kernel."""
    assert_parity(replace(CASES[name], kernel=REFERENCE), 1, 4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses_chunks", "ulysses", "ring"),
    [
        (8, 4, 2, 2, 1),
        (8, 8, 2, 2, 2),
        (8, 8, 4, 2, 1),
        (12, 12, 3, 4, 1),
        (8, 4, 4, 2, 1),
        (4, 2, 2, 2, 1),
        (8, 2, 2, 2, 2),
    ],
)
def test_ulysses_chunks(heads: int, kv_heads: int, ulysses_chunks: int, ulysses: int, ring: int) -> None:
    case = Case(heads=heads, kv_heads=kv_heads, ulysses_chunks=ulysses_chunks, sinks=True, documents=PACKED)
    assert_parity(case, ulysses, ring)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses", "ring"), [(6, 2, 2, 1), (6, 3, 2, 2), (12, 3, 4, 1), (8, 2, 4, 1)]
)
def test_kv_heads_that_ulysses_does_not_divide(heads: int, kv_heads: int, ulysses: int, ring: int) -> None:
    assert_parity(Case(heads=heads, kv_heads=kv_heads), ulysses, ring)


def test_one_rank() -> None:
    """On one rank, documents, windows and sinks are computed without one large mask."""
    case = Case(documents=PACKED, window=9, sinks=True)
    found, _, _ = run_case(0, 1, case, 1, 1)
    for x, reference in zip(found, full_attention(case), strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.must("parity: ring and Ulysses together", case="2-2")
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (2, 1), (2, 2)])
def test_dropout_is_equal_on_every_grid(ulysses: int, ring: int) -> None:
    case = Case(dropout=0.3, documents=PACKED, window=9)
    expected, _, _ = run_case(0, 1, case, 1, 1)
    found, _ = gather_results(case, ulysses, ring)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    kept, _, _ = run_case(0, 1, Case(documents=PACKED, window=9), 1, 1)
    assert not torch.allclose(kept[0], expected[0])


# Computed pairs


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (2, 2), (1, 4)])
def test_work_is_balanced_and_hidden_chunks_are_skipped(ulysses: int, ring: int) -> None:
    """Chunks hidden by causality are skipped, and every rank computes the same number of pairs."""
    seq_len = 64
    pairs = assert_parity(Case(seq_len=seq_len), ulysses, ring)
    chunk = seq_len // (2 * ring)
    visible = 4 + 2 * (ring - 1)  # pairs of chunks: own chunks as one causal sequence, and two at each further step
    assert [count["forward"] for count in pairs] == [ROWS * visible * chunk**2] * (ulysses * ring)
    assert [count["backward"] for count in pairs] == [count["forward"] for count in pairs]


def test_documents_and_windows_reduce_the_computed_pairs() -> None:
    """Documents cost only their own squares of pairs, and a window costs a band."""
    documents = ((16, 16, 16, 16),) * ROWS
    for pairs in assert_parity(Case(seq_len=64, documents=documents), 2, 1):
        assert pairs["forward"] == pairs["backward"] == ROWS * 4 * 16**2
    for pairs in assert_parity(Case(seq_len=3 * STRIP, window=4, kv_heads=1), 2, 1):
        assert pairs["forward"] == ROWS * (STRIP + 2 * (STRIP + 3)) * STRIP


@given(ring=st.integers(1, 8), ulysses=st.integers(1, 4), size=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_parts_are_a_permutation_with_balanced_work(ring: int, ulysses: int, size: int) -> None:
    seq_len = 2 * ring * ulysses * size
    parts = [natural_positions(seq_len, ulysses, ring, rank) for rank in range(ring * ulysses)]
    assert sorted(torch.cat(parts).tolist()) == list(range(seq_len))
    assert {len(part) for part in parts} == {seq_len // (ring * ulysses)}
    rings = [torch.cat(parts[start : start + ulysses]) for start in range(0, len(parts), ulysses)]
    for rank, part in enumerate(rings):  # Ulysses ranks are consecutive, and hold a zigzag part together
        assert torch.equal(part, zigzag_indices(seq_len, ring, rank))
    assert len({int((part + 1).sum()) for part in rings}) == 1  # the token at i attends to i + 1 keys


# Refusals


@pytest.mark.parametrize(("seq_len", "ulysses", "ring"), [(12, 1, 4), (30, 4, 1), (24, 2, 4)])
def test_sequences_that_do_not_fit(seq_len: int, ulysses: int, ring: int) -> None:
    refusal = reason_against_length(seq_len, ulysses, ring)
    assert refusal is not None
    assert f"{seq_len} tokens" in refusal.what


def test_heads_that_do_not_fit() -> None:
    assert reason_against_heads(6, 2, 3) is None
    refusal = reason_against_heads(6, 2, 4)
    assert refusal is not None
    assert refusal.what.startswith("6 query heads")
    assert refusal.fix == "set plan.parallel.cp_ulysses to 2, for a longer ring"


def test_documents_of_partial_rows_are_refused() -> None:
    q = torch.zeros(1, 2, 8, 4)
    context = ContextParallel(None, None, 1, 2, 0)
    with pytest.raises(PlanError, match=r"documents of shape \(1, 8\)"):
        attend(q, q, q, torch.zeros(1, 8, dtype=torch.int64), context, scale=1.0)


# Attention function of Transformers


def attention_module(**config: Any) -> Any:
    module: Any = torch.nn.Module()
    module.config, module.layer_idx, module.is_causal = SimpleNamespace(**config), 0, True
    module.register_forward_pre_hook(
        AttentionSettings("attention", ContextParallel(None, None, 1, 1, 0), AttentionPlans("cpu"))
    )
    return module


def test_context_attention_supports_all_its_arguments() -> None:
    case = Case(documents=PACKED, window=9, sinks=True, softcap=0.7)
    (q, k, v, sinks), _ = case.tensors()
    documents = case.document_ids()
    assert documents is not None
    out, probabilities = context_attention(
        attention_module(), q, k, v, documents[:, None, None], SCALE, sliding_window=9, softcap=0.7, s_aux=sinks
    )
    assert probabilities is None
    torch.testing.assert_close(out.transpose(1, 2), full_attention(case)[0], rtol=1e-10, atol=1e-10)


def test_context_attention_dropout_uses_the_generator_of_torch() -> None:
    (q, k, v, _), _ = Case().tensors()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(context_attention(attention_module(), q, k, v, None, SCALE, 0.5)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.must("refusal: ring and Ulysses together")
@pytest.mark.parametrize(
    ("config", "arguments", "named"),
    [
        ({}, {"position_bias": torch.zeros(1)}, "position_bias"),
        ({}, {"is_causal": False}, "not causal"),
        ({"layer_types": ["chunked_attention"]}, {}, "chunked_attention layers"),
        ({"layer_types": ["sliding_attention"]}, {}, "sliding window"),
        ({"sliding_window": 8}, {}, "sliding window"),
    ],
)
def test_unsupported_attention_features_are_refused(config: Any, arguments: Any, named: str) -> None:
    q = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ModelError, match=named):
        context_attention(attention_module(**config), q, q, q, None, **arguments)


def test_disabled_attention_features_are_accepted() -> None:
    q = torch.zeros(1, 2, 8, 4)
    for config in ({"sliding_window": 8, "use_sliding_window": False}, {"layer_types": ["full_attention"]}):
        context_attention(attention_module(**config), q, q, q, None, sliding_window=None, is_causal=None)


# Unmodified models


MODELS = {
    **FAMILIES,
    "gemma2": {**FAMILIES["gemma3_text"], "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "glm4_moe": {**FAMILIES["qwen3_moe"], "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "granitemoe": {**FAMILIES["mixtral"], "attention_multiplier": 0.2},
}


def model_and_tokens(name: str) -> tuple[PreTrainedModel, Tensor, Tensor, Tensor]:
    """A tiny float64 model, tokens, positions that restart in each document, and a gradient of the logits."""
    settings = MODELS[name]
    config = AutoConfig.for_model(name, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).double()
    if name == "gpt_oss":  # empty until weights are loaded; and sinks are not to be small beside the scores
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(3, 96, (ROWS, 32))
    positions = torch.tensor([[p for length in row for p in range(length)] for row in PACKED])
    return model, tokens, positions, torch.randn(ROWS, 32, 96, dtype=torch.float64)


def run_model(rank: int, world_size: int, name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of one rank's tokens, their positions, and the gradients they give to the weights."""
    model, tokens, positions, grad = model_and_tokens(name)
    context = make_context(rank, 1, 2)
    is_attention = {
        name: hasattr(module, "layer_idx") and hasattr(module, "config") for name, module in model.named_modules()
    }
    replace_attention(model, [name for name, found in is_attention.items() if found], context, AttentionPlans("cpu"))
    mine = natural_positions(32, 1, 2, rank)
    documents = Case(documents=PACKED).document_ids()
    assert documents is not None
    logits = model(
        input_ids=tokens[:, mine],
        position_ids=positions[:, mine],
        attention_mask=documents[:, None, None],
        use_cache=False,
    ).logits
    logits.backward(grad[:, mine])
    return logits.detach(), mine, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_unmodified_models(name: str) -> None:
    """Logits and the gradient of every weight, summed over the ranks; models round to float32 inside."""
    model, tokens, positions, grad = model_and_tokens(name)
    expected = logits_of(model, MicroBatch(tokens, positions, tokens))
    expected.backward(grad)
    results = run_ranks(2, run_model, name)
    order = torch.cat([mine for _, mine, _ in results]).argsort()
    found = torch.cat([logits for logits, _, _ in results], 1)[:, order]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
    for n, parameter in model.named_parameters():
        if parameter.grad is not None:
            total = sum(gradients[n] for *_, gradients in results if n in gradients)
            error = (total - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(min=1e-12)
            assert error < 1e-5, f"gradient of {n} is off by {error:.3g}"
