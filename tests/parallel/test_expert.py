"""Expert parallelism compared with the unmodified module in one process: outputs and all gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.backends.test_hierarchical import make_group
from tests.lab.experts import mixture_of_experts, split_experts
from tests.lab.families import COMMON, EXPERTS, family
from tests.lab.parity import compare
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.backends.hierarchical import register_backend
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm import collectives
from weft.comm.recorder import Message, Recorder
from weft.errors import PlanError, raise_if_refused
from weft.job import Model
from weft.parallel.experts import late_gradients
from weft.parallel.experts.checks import reason_against_ep
from weft.parallel.experts.dispatch import Channel, combine, dispatch, dispatch_to_hosts
from weft.parallel.experts.groups import levels_of_group
from weft.parallel.experts.router_stats import load_imbalance
from weft.parallel.parallelize import parallelize
from weft.plan import Memory, Parallel, Plan, Precision
from weft.topology.mesh import build_mesh

NUM_EXPERTS, HIDDEN = 4, 32
TABLES: dict[str, dict[str, Any]] = {
    **{name: family(name) for name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")},
    "olmoe": {"model_type": "olmoe", **COMMON, "num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"model_type": "glm4_moe", **COMMON, **EXPERTS, "n_routed_experts": 4},
    "granitemoe": {"model_type": "granitemoe", **COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

HOSTS = (0, 0, 1, 1)


@dataclass(frozen=True)
class Case:
    """Numbers of tokens of each rank, and options of the routing."""

    sizes: tuple[int, ...]
    top_k: int = 2
    allowed: tuple[int, ...] = (0, 1, 2, 3)
    """Experts that the router may choose."""
    dtype: torch.dtype = torch.float64
    implementation: str = "eager"
    hosts: tuple[int, ...] = (0, 0, 0, 0)
    """Host of each rank; empty for a gloo group, which has no hosts."""
    is_late: bool = False
    """True if weight gradients are computed late."""

    def tokens(self, seed: int = 5) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Hidden states, expert indices, router weights and output gradient of each rank."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        tokens = []
        for size in self.sizes:
            chosen = torch.rand(size, len(self.allowed), generator=generator).topk(self.top_k).indices
            index, weights = torch.tensor(self.allowed)[chosen], draw(size, self.top_k).requires_grad_()
            tokens.append((draw(size, HIDDEN).requires_grad_(), index, weights, draw(size, HIDDEN)))
        return tokens


def build_model(name: str, dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    """Tiny model with random parameters, including biases and norms."""
    config = AutoConfig.for_model(**TABLES[name])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def experts_of(model: PreTrainedModel) -> list[Any]:
    return [model.get_submodule(name) for block in read_anatomy(model).blocks for name in block.experts]


def split_module(
    experts: Any,
    group: dist.ProcessGroup,
    recompute: bool = False,
    is_late: bool = False,
    groups: tuple[dist.ProcessGroup, ...] | None = None,
) -> None:
    """Apply expert parallelism to a module, and keep the part of each parameter of this rank."""
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach().chunk(group.size())[group.rank()].clone()))
    channels = tuple(Channel(level, is_recomputed=recompute) for level in groups or levels_of_group(group))
    split_experts(experts, channels, is_late)


def gradients(experts: Any, tokens: tuple[Tensor, Tensor, Tensor, Tensor], recompute: bool = False) -> dict[str, Any]:
    """Outputs and all gradients of an experts module."""
    hidden, index, weights, gradient = tokens
    for _ in range(2):  # the second pass must not depend on the first pass
        hidden.grad, weights.grad = None, None
        experts.zero_grad()
        run = partial(checkpoint, experts, use_reentrant=False) if recompute else experts
        out = run(hidden, index, weights)
        out.backward(gradient)
    parameter_gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"outputs": out.detach(), "hidden": hidden.grad, "weights": weights.grad, **parameter_gradients}


def on_rank(rank: int, ranks: int, name: str, case: Case, recompute: bool) -> dict[str, Any]:
    group = make_group(rank, case.hosts) if case.hosts else dist.new_group(backend="gloo")
    experts = experts_of(build_model(name, case.dtype, case.implementation))[-1]
    split_module(experts, group, recompute, case.is_late)
    return gradients(experts, case.tokens()[rank], recompute)


def assert_parity(name: str, case: Case, recompute: bool = False) -> None:
    """Check that the concatenated results of all ranks equal the unmodified module on all tokens."""
    untouched = experts_of(build_model(name, case.dtype, case.implementation))[-1]
    hidden, index, weights, gradient = (torch.cat(parts).detach() for parts in zip(*case.tokens(), strict=True))
    expected = gradients(untouched, (hidden.requires_grad_(), index, weights.requires_grad_(), gradient))
    found = run_ranks(len(case.sizes), on_rank, name, case, recompute)
    for key, value in expected.items():
        compare(f"{name}: {key}", torch.cat([part[key] for part in found]), value, TOLERANCE[case.dtype])


@pytest.mark.parametrize("sizes", [(5, 9), (5, 9, 0, 3)])
@pytest.mark.parametrize("name", TABLES)
def test_families(name: str, sizes: tuple[int, ...]) -> None:
    assert_parity(name, Case(sizes))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", TABLES)
def test_fast_implementations(name: str, implementation: str) -> None:
    """Implementations that Transformers chooses by default, in float32."""
    assert_parity(name, Case((7, 4), dtype=torch.float32, implementation=implementation))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("sizes", "hosts"), [((7, 0), (0, 0)), ((5, 9, 0, 3), HOSTS)])
def test_late_weight_gradients(sizes: tuple[int, ...], hosts: tuple[int, ...], recompute: bool) -> None:
    for name in ("mixtral", "deepseek_v3"):
        assert_parity(name, Case(sizes, dtype=torch.float32, hosts=hosts, is_late=True), recompute)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize(
    ("sizes", "allowed", "top_k"),
    [
        ((5, 9), (2,), 1),  # all tokens to one expert: rank 0 computes nothing
        ((5, 9, 2, 4), (1,), 1),  # three ranks compute nothing
        ((0, 6), (0, 1), 2),  # the rank with tokens holds no expert of its tokens
        ((6, 0), (0, 3), 2),  # experts without tokens on both ranks
        ((4, 3), (0, 1, 2, 3), 1),
        ((4, 3), (0, 1, 2, 3), 3),
        ((4, 3), (0, 1, 2, 3), 4),  # every token to every expert
    ],
)
def test_any_token_distribution(
    sizes: tuple[int, ...], allowed: tuple[int, ...], top_k: int, implementation: str
) -> None:
    dtype = torch.float64 if implementation == "eager" else torch.float32
    for name in ("gpt_oss", "qwen3_moe"):
        assert_parity(name, Case(sizes, top_k, allowed, dtype, implementation))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_no_tokens_on_any_rank(implementation: str) -> None:
    """Backward runs on every rank and parameters get zero gradients; the unmodified module would have no graph."""
    case = Case((0, 0), dtype=torch.float32, implementation=implementation)
    for found in run_ranks(2, on_rank, "gpt_oss", case, False):
        assert {key: int(value.count_nonzero()) for key, value in found.items()} == dict.fromkeys(found, 0)
        assert found["down_proj"].shape == (2, 48, HIDDEN)


@pytest.mark.parametrize("allowed", [(0, 1, 2, 3), (2, 3)])
def test_recompute(allowed: tuple[int, ...]) -> None:
    assert_parity("mixtral", Case((5, 9), allowed=allowed), recompute=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_repeats_dispatch_alone(recompute: bool) -> None:
    """Rows travel to the experts and back, and so do their gradients; a recompute does not send outputs again."""
    case = Case((5, 9))
    sent = [int((index // 2 != rank).sum()) for rank, (_, index, *_) in enumerate(case.tokens())]
    assert min(sent) > 0
    expected = [(3 if recompute else 2) * own + 2 * other for own, other in zip(sent, sent[::-1], strict=True)]
    assert run_ranks(2, rows_sent, case, recompute) == expected


def rows_sent(rank: int, ranks: int, case: Case, recompute: bool) -> int:
    experts, group = experts_of(build_model("mixtral", case.dtype, "eager"))[-1], make_group(rank, (0, 0))
    split_module(experts, group, recompute)
    hidden, index, weights, gradient = case.tokens()[rank]
    run = partial(checkpoint, experts, use_reentrant=False) if recompute else experts
    with Recorder() as recorder:
        run(hidden, index, weights).backward(gradient)
    row_bytes = 8 * HIDDEN
    return sum(message.bytes for message in recorder.messages if message.bytes % row_bytes == 0) // row_bytes


def test_gloo() -> None:
    assert_parity("mixtral", Case((5, 0, 2, 4), hosts=()))


@pytest.mark.parametrize("name", TABLES)
def test_two_hosts(name: str) -> None:
    assert_parity(name, Case((5, 9, 0, 3), hosts=HOSTS))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize(
    ("sizes", "allowed", "top_k"),
    [
        ((5, 9, 2, 4), (1,), 1),  # one host has no tokens
        ((0, 6, 0, 0), (0, 1), 2),
        ((3, 0, 0, 0), (2, 3), 2),  # all tokens go to the other host, once
        ((4, 3, 1, 2), (0, 1, 2, 3), 4),
        ((0, 0, 0, 0), (0, 1, 2, 3), 2),
    ],
)
def test_any_token_distribution_on_two_hosts(
    sizes: tuple[int, ...], allowed: tuple[int, ...], top_k: int, implementation: str
) -> None:
    dtype = torch.float64 if implementation == "eager" else torch.float32
    if sum(sizes):
        assert_parity("qwen3_moe", Case(sizes, top_k, allowed, dtype, implementation, HOSTS))
        return
    for found in run_ranks(4, on_rank, "qwen3_moe", Case(sizes, hosts=HOSTS), False):
        assert {key: int(value.count_nonzero()) for key, value in found.items()} == dict.fromkeys(found, 0)


def test_recompute_on_two_hosts() -> None:
    assert_parity("mixtral", Case((5, 9, 3, 1), hosts=HOSTS), recompute=True)


def between_hosts(rank: int, ranks: int, top_k: int) -> tuple[int, int]:
    """Tokens sent to the other host, and copies of tokens for experts of the other host."""
    group = make_group(rank, HOSTS)
    hidden = torch.ones(64, HIDDEN)
    index = torch.stack([torch.randperm(NUM_EXPERTS)[:top_k] for _ in range(64)])
    with Recorder() as recorder:
        *_, route = dispatch_to_hosts(hidden, index, torch.ones(64, top_k), NUM_EXPERTS, Channel(group.outer))
    rows = [message.bytes for message in recorder.messages if message.dtype == torch.float32]
    other = 1 - rank // 2
    copies = int((index // (NUM_EXPERTS // 2) == other).sum())
    tokens = int((index // (NUM_EXPERTS // 2) == other).any(1).sum())
    assert route.input_splits[other] == tokens
    assert rows == [4 * top_k * tokens, 4 * HIDDEN * tokens]
    return tokens, copies


def test_token_is_sent_once_per_host() -> None:
    for tokens, copies in run_ranks(4, between_hosts, NUM_EXPERTS):
        assert (tokens, copies) == (64, 64 * NUM_EXPERTS // 2)


# Random routings compared with the reference


def dispatch_and_combine(
    rank: int, ranks: int, case: Case, matrices: Tensor, is_recomputed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and gradients of dispatch, one matrix per expert, and combine."""
    group, tokens = dist.group.WORLD, case.tokens()[rank]
    assert group is not None
    hidden, index, weights, gradient = tokens
    rows, local_index, route = dispatch(
        hidden, index, weights, len(matrices), Channel(group, is_recomputed=is_recomputed)
    )
    mine = matrices.chunk(ranks)[rank]
    assert local_index.shape == (len(rows), 1)
    out = combine(torch.einsum("rh,rhg->rg", rows, mine[local_index[:, 0]]), weights, route)
    out.backward(gradient)
    assert hidden.grad is not None
    assert weights.grad is not None
    return out.detach(), hidden.grad, weights.grad


@st.composite
def cases(draw: Any) -> tuple[Case, int]:
    """Random tokens, experts and routings of two ranks; expert `num_experts` means that a copy is not sent."""
    num_experts = 2 * draw(st.integers(1, 4))
    allowed = draw(st.lists(st.integers(0, num_experts), min_size=1, unique=True))
    sizes = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    return Case(sizes, draw(st.integers(1, min(4, len(allowed)))), tuple(allowed)), num_experts


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_routings(drawn: tuple[Case, int], is_recomputed: bool) -> None:
    case, num_experts = drawn
    matrices = torch.randn(num_experts, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(2)).double()
    hidden, index, weights, gradient = (torch.cat(parts).detach() for parts in zip(*case.tokens(), strict=True))
    hidden.requires_grad_()
    weights.requires_grad_()
    functions: list[Callable[[Tensor], Tensor]] = [matrix.__rmatmul__ for matrix in matrices]
    out = mixture_of_experts(hidden, index, weights, functions)
    out.backward(gradient)
    parts = [
        torch.cat(part) for part in zip(*run_ranks(2, dispatch_and_combine, case, matrices, is_recomputed), strict=True)
    ]
    for found, expected in zip(parts, (out.detach(), hidden.grad, weights.grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_reference_equals_untouched_module() -> None:
    experts = experts_of(build_model("mixtral", torch.float64, "eager"))[0]
    ((hidden, index, weights, _),) = Case((9,)).tokens()

    def expert(expert_id: int) -> Callable[[Tensor], Tensor]:
        def compute(x: Tensor) -> Tensor:
            gate, up = (x @ experts.gate_up_proj[expert_id].T).chunk(2, -1)
            return (nn.functional.silu(gate) * up) @ experts.down_proj[expert_id].T

        return compute

    plain = mixture_of_experts(hidden, index, weights, [expert(expert_id) for expert_id in range(NUM_EXPERTS)])
    torch.testing.assert_close(plain, experts(hidden, index, weights), rtol=0, atol=1e-10)


def dispatch_dtypes(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    group = dist.new_group(backend=register_backend())
    index = (
        torch.tensor([[3, 0], [1, 2]], dtype=torch.int32) if rank == 0 else torch.tensor([[3, 2]], dtype=torch.int32)
    )
    hidden = torch.full((len(index), 4), 1.0 + rank, dtype=torch.bfloat16)
    rows, local_index, _ = dispatch(hidden, index, torch.ones_like(index), 4, Channel(group))
    return rows[:, 0], local_index[:, 0]


def test_received_rows_are_sorted_and_keep_their_dtypes() -> None:
    first, second = run_ranks(2, dispatch_dtypes)
    assert first[0].dtype == torch.bfloat16
    assert (first[1].tolist(), second[1].tolist()) == ([0, 1], [0, 1, 0, 1])
    assert second[0].tolist() == [1, 1, 2, 2]


def saved_elements(rank: int, ranks: int) -> int:
    """Number of floating-point elements that dispatch and combine save for backward."""
    group, (hidden, index, weights, _) = dist.group.WORLD, Case((64, 64)).tokens()[rank]
    weights = weights.detach()
    assert group is not None
    saved: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.is_floating_point())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        rows, _, route = dispatch(hidden, index, weights, NUM_EXPERTS, Channel(group))
        combine(rows, weights, route)
    return sum(saved)


def test_combine_saves_returned_rows_and_weights() -> None:
    """For the gradients of router weights; the experts save their outputs no more."""
    copies = 64 * 2
    assert run_ranks(2, saved_elements) == [copies * (HIDDEN + 1)] * 2


# Full model


def model_gradients(model: PreTrainedModel, rows: Tensor) -> dict[str, Tensor]:
    """Gradients of the sum of losses over rows of tokens."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_on_rank(rank: int, ranks: int, name: str, rows: Tensor, recompute: bool) -> dict[str, Tensor]:
    group = dist.new_group(backend=register_backend())
    model = build_model(name, torch.float64, "eager").train()
    before = type(experts_of(model)[0]), set(model.state_dict())
    for experts in experts_of(model):
        split_module(experts, group)
    assert before == (type(experts_of(model)[0]), set(model.state_dict()))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model_gradients(model, rows.chunk(ranks)[rank])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_full_model(name: str, recompute: bool) -> None:
    """Gradients of experts cover all rows; gradients of replicated parameters are summed over ranks."""
    rows = torch.randint(3, 96, (4, 13), generator=torch.Generator().manual_seed(3))
    model = build_model(name, torch.float64, "eager").train()
    expected = model_gradients(model, rows)
    first, second = run_ranks(2, train_on_rank, name, rows, recompute)
    assert set(first) == set(expected)
    for key, gradient in expected.items():
        split = ".experts." in key
        found = torch.cat([first[key], second[key]]) if split else first[key] + second[key]
        compare(key, found, gradient, 1e-10)


def order_of_events(rank: int, ranks: int, name: str, recompute: bool) -> list[str]:
    """Order of all-to-alls, shared experts and weight gradients of a layer, in forward and backward."""
    events: list[str] = []
    model, _ = build_split(rank, ranks, name, Memory(recompute=("block",) if recompute else ()))
    wait, start = collectives.AsyncAllToAll.wait, collectives.AsyncAllToAll.start
    shared = next(module for key, module in model.named_modules() if key.endswith("shared_experts"))
    shared.down_proj.register_forward_hook(lambda *_: events.append("shared"))
    shared.down_proj.register_full_backward_hook(lambda *_: events.append("shared"))

    def started(self: Any, *args: Any) -> Any:
        events.append("start")
        return start(self, *args)

    def waited(self: Any) -> None:
        events.append("wait")
        wait(self)

    def computed(*args: Any) -> Any:
        events.append("weight")
        return compute(*args)

    compute = late_gradients._Late.backward
    with (
        mock.patch.multiple(collectives.AsyncAllToAll, start=started, wait=waited),
        mock.patch.object(late_gradients._Late, "backward", staticmethod(computed)),
    ):
        model_gradients(model, torch.randint(3, 96, (2, 13), generator=torch.Generator().manual_seed(3)))
    return events


def build_split(rank: int, ranks: int, name: str, memory: Memory = Memory()) -> tuple[Any, Any]:  # noqa: B008, frozen
    precision = Precision(param_dtype="fp32")
    plan = resolved(Plan(parallel=Parallel(ep=ranks, zero=0), precision=precision, memory=memory), ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    config = {**family(name), "num_hidden_layers": 2, "first_k_dense_replace": 1}
    source = Model(config=config)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh).train()
    materialize(model, source, torch.device("cpu"))
    return model, mesh


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_shared_experts_and_weight_gradients_overlap_with_dispatch(name: str) -> None:
    for events in run_ranks(2, order_of_events, name, False):
        dispatched, combined = ["start", "shared", "wait"], ["start", "wait"]
        assert events == dispatched + combined + combined + ["start", "weight", "weight", "shared", "wait"]


def test_the_gradient_of_combine_overlaps_with_the_recompute() -> None:
    """In the recompute, combine is missing; router weights travel with the rows."""
    for events in run_ranks(2, order_of_events, "deepseek_v3", True):
        dispatched = ["start", "start", "shared", "wait", "wait"]
        back = ["start", "start", "weight", "weight", "shared", "wait", "wait"]
        assert events == [*dispatched, "start", "wait", "start", *dispatched, "wait", *back]


# Traffic and load


def traffic(rank: int, ranks: int, index: Tensor) -> list[Message]:
    mesh = build_mesh(Plan(parallel=Parallel(zero=1)), "cpu", ranks)
    experts = experts_of(build_model("mixtral", torch.float32, "eager"))[0]
    split_module(experts, mesh.get_group("dp_shard"))
    hidden = torch.ones(len(index), HIDDEN, requires_grad=True)
    with Recorder() as recorder:
        experts(hidden, index, torch.ones(index.shape, requires_grad=True)).sum().backward()
    return recorder.messages


def test_bytes_are_the_textbook_volume() -> None:
    """Balanced routing: T K (ep - 1) / ep rows leave each rank, in dispatch and in combine, forward and backward."""
    ranks, num_tokens, top_k = 4, 8, 2
    index = torch.arange(num_tokens * top_k).view(num_tokens, top_k) % NUM_EXPERTS
    copies = num_tokens * top_k * (ranks - 1) // ranks
    counts, rows = 8 * NUM_EXPERTS * (ranks - 1) // ranks, 4 * HIDDEN * copies
    for messages in run_ranks(ranks, traffic, index):
        assert {(message.operation, message.axis) for message in messages} == {("all_to_all", "dp_shard")}
        assert [message.bytes for message in messages] == [counts, *[rows] * 4]


def test_bytes_of_any_routing() -> None:
    """A rank sends the copies for experts of other ranks, and sends back the copies received from other ranks."""
    index = torch.tensor([[0, 1], [0, 2], [0, 3]])  # 4 copies for rank 0, 2 for rank 1, on both ranks
    sent = [2, 4]
    for rank, messages in enumerate(run_ranks(2, traffic, index)):
        sent_copies, received_copies = sent[rank], sent[1 - rank]
        rows = 4 * HIDDEN
        forward, backward = (
            [2 * 8, rows * sent_copies, rows * received_copies],
            [rows * sent_copies, rows * received_copies],
        )
        assert [message.bytes for message in messages] == forward + backward


def test_load_imbalance() -> None:
    assert load_imbalance(torch.tensor([3, 3, 3])) == 1
    assert load_imbalance(torch.tensor([0, 8, 0, 0])) == 4
    assert load_imbalance(torch.tensor([1, 2, 3])) == 1.5
    assert load_imbalance(torch.tensor([0, 0])) == 1


# Refusals


def check(table: dict[str, Any], ep: int) -> None:
    model = build_on_meta(AutoConfig.for_model(**table), torch.float32)
    raise_if_refused(reason_against_ep(model, read_anatomy(model), ep))


@pytest.mark.parametrize("name", TABLES)
def test_accepted(name: str) -> None:
    check(TABLES[name], 4)


def test_one_rank_is_always_accepted() -> None:
    check(family("llama"), 1)


LLAMA4 = {"model_type": "llama4_text", **COMMON, "num_local_experts": 4, "intermediate_size_mlp": 48}
LONGCAT = {
    **{key: TABLES["deepseek_v3"][key] for key in (*COMMON, "q_lora_rank", "kv_lora_rank", "num_experts_per_tok")},
    **{key: size for key, size in TABLES["deepseek_v3"].items() if key.endswith("_head_dim")},
    "model_type": "longcat_flash",
    "num_layers": 1,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "expert_ffn_hidden_size": 24,
}


@pytest.mark.parametrize(
    ("table", "ep", "what"),
    [
        (family("llama"), 2, "no block of this llama has an experts module"),
        (family("mixtral"), 3, "ep = 3 does not divide 4 experts"),
        (LLAMA4, 2, r"Llama4TextExperts is called with \(hidden_states\)"),
        (LONGCAT, 2, "LongcatFlashExperts has no num_experts"),
    ],
)
def test_refused(table: dict[str, Any], ep: int, what: str) -> None:
    with pytest.raises(PlanError, match=what) as error:
        check(table, ep)
    assert error.value.where
    assert error.value.rule
    assert error.value.fix


def test_a_parameter_that_is_not_stacked_by_expert_is_refused() -> None:
    """Examples are the shared norm of the experts of Muse Spark, and the flattened matrices of DBRX."""
    model = build_on_meta(AutoConfig.for_model(**TABLES["mixtral"]), torch.float32)
    experts_of(model)[0].post_expert_norm = nn.RMSNorm(NUM_EXPERTS, device="meta")
    with pytest.raises(PlanError, match=r"not stacked by expert: post_expert_norm\.weight"):
        raise_if_refused(reason_against_ep(model, read_anatomy(model), 2))
