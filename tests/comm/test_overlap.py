"""Overlapped matmuls equal their form with plain collectives; on an emulated wire, matmuls and messages overlap."""

from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.utils.checkpoint import checkpoint

from tests.lab.pool import run_ranks
from tests.lab.wire import Wire, new_wire, virtual_seconds
from weft.backends.hierarchical import register_backend
from weft.comm import collectives
from weft.comm.chunks import (
    AlphaBeta,
    GatherMatmul,
    MatmulReduce,
    MatmulScatter,
    MessageCosts,
    fewest_chunks,
    split_rows,
)
from weft.comm.overlap import (
    Overlap,
    all_gather_matmul,
    can_overlap,
    copy_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from weft.comm.recorder import Recorder
from weft.comm.symmetric import FusedMatmuls, _can_map_memory, find_fused_matmuls
from weft.errors import PlanError
from weft.precision.fp16_backward import STORED_DTYPE, Fp16Grad, begin_fp16_backward

FORMS = ("gathered", "copied", "scattered", "reduced")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """One matmul on all ranks of a group."""

    form: str
    chunks: int | str
    matrices: int = 1
    dim: int = 1
    dtype: torch.dtype = torch.float32
    bias: bool = False
    integers: bool = True
    """Small integer values, whose sums are exact in every dtype and order, so that a misplaced row changes bits."""
    batch: int = 2
    tokens: int = 12
    """Number of tokens of all ranks along `dim`."""
    recompute: bool = False
    """True to recompute in backward."""
    transposed: bool = False
    """True if the matrix is a view of its transpose."""


def tensors(case: Case, rank: int, ranks: int) -> tuple[Tensor, list[Tensor], list[Tensor | None], list[Tensor]]:
    """Input, matrices, biases and output gradients of one rank; the gradients are non-contiguous."""
    generator = torch.Generator().manual_seed(10 * ranks)

    def draw(*shape: int) -> Tensor:
        """Random values that differ between ranks."""
        if case.integers:
            return torch.randint(-2, 3, (ranks, *shape), generator=generator)[rank].to(case.dtype)
        return torch.randn((ranks, *shape), generator=generator, dtype=torch.float64)[rank].to(case.dtype)

    part = case.tokens // ranks
    shape = [case.batch, case.tokens]
    if case.form == "gathered":
        shape = [case.batch, part] if case.dim == 1 else [part, case.batch]
    elif case.dim == 0:
        shape = shape[::-1]
    x = draw(*shape, 6)
    if case.form == "copied":
        dist.broadcast(x, 0)
    out_shape = [case.batch, case.tokens] if case.dim == 1 else [case.tokens, case.batch]
    if case.form == "scattered":
        out_shape[case.dim] //= ranks
    matrices = [draw(5 + number, 6) for number in range(case.matrices)]
    if case.transposed:
        matrices = [matrix.T.contiguous() for matrix in matrices]
    biases = [draw(5 + number) if case.bias else None for number in range(case.matrices)]
    gradients = [draw(5 + number, *out_shape[::-1]).permute(2, 1, 0) for number in range(case.matrices)]
    if case.form == "reduced":
        for number, gradient in enumerate(gradients):
            same = gradient.contiguous()
            dist.broadcast(same, 0)
            gradients[number] = same.transpose(0, 1).contiguous().transpose(0, 1)
    return x, matrices, biases, gradients


def plain(case: Case, x: Tensor, matrices: Any, biases: Any, group: dist.ProcessGroup) -> list[Tensor]:
    """Reference form with plain collectives."""
    if case.form in ("gathered", "copied"):
        x = collectives.gather(x, group, case.dim) if case.form == "gathered" else collectives.copy(group, x)[0]
        return [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
    out = F.linear(x, matrices[0], biases[0])
    return [
        collectives.reduce_scatter(out, group, case.dim) if case.form == "scattered" else collectives.reduce(out, group)
    ]


def in_chunks(case: Case, x: Tensor, matrices: Any, biases: Any, overlap: Overlap) -> list[Tensor]:
    if case.form == "gathered":
        return list(all_gather_matmul(x, matrices, biases, overlap, case.dim))
    if case.form == "copied":
        return list(copy_matmul(x, matrices, biases, overlap))
    if case.form == "scattered":
        return [matmul_reduce_scatter(x, matrices[0], biases[0], overlap, case.dim)]
    return [matmul_all_reduce(x, matrices[0], biases[0], overlap)]


def run(
    case: Case, rank: int, ranks: int, group: dist.ProcessGroup, *, overlapped: bool, fused: FusedMatmuls | None = None
) -> list[Any]:
    """Outputs and all gradients."""
    x, matrices, biases, gradients = tensors(case, rank, ranks)
    leaves = [x, *matrices, *(bias for bias in biases if bias is not None)]
    for leaf in leaves:
        leaf.requires_grad_()

    def forward(x: Tensor) -> list[Tensor]:
        seen = [matrix.T if case.transposed else matrix for matrix in matrices]
        if overlapped:
            return in_chunks(case, x, seen, biases, Overlap(group, case.chunks, fused=fused))  # type: ignore[arg-type]
        return plain(case, x, seen, biases, group)

    outs = checkpoint(forward, x, use_reentrant=False) if case.recompute else forward(x)
    torch.autograd.backward(outs, gradients)
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


def compare(rank: int, ranks: int, cases: list[Case], backend: str) -> None:
    group = dist.new_group(backend=register_backend() if backend == "shared memory" else "gloo")
    for case in cases:
        found, expected = (run(case, rank, ranks, group, overlapped=overlapped) for overlapped in (True, False))
        for number, (actual, reference) in enumerate(zip(found, expected, strict=True)):
            assert actual.shape == reference.shape
            error, largest = (actual - reference).abs().max().item(), reference.abs().max().item()
            tolerance = 0 if case.integers else TOLERANCE[case.dtype] * largest
            assert error <= tolerance, (case, number, error, largest)


def matrix_counts(form: str) -> tuple[int, ...]:
    return (1, 2, 3) if form in ("gathered", "copied") else (1,)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_exact_sums_are_bit_equal(form: str, ranks: int) -> None:
    """All numbers of chunks, equal or not, both dims, all numbers of matrices, with and without biases."""
    cases = [
        Case(form, chunks, count, dim, dtype, bias, tokens=tokens * ranks)
        for chunks in (1, 2, 3, 4, 8)
        for count in matrix_counts(form)
        for dim, dtype, bias in ((1, torch.float32, True), (0, torch.bfloat16, False), (1, torch.float64, False))
        for tokens in (8, 11)
    ]
    run_ranks(ranks, compare, cases, "shared memory")


@pytest.mark.parametrize("form", FORMS)
def test_random_values_are_equal_within_rounding(form: str) -> None:
    cases = [
        Case(form, chunks, count, dtype=dtype, bias=True, integers=False, tokens=16)
        for chunks in (1, 3, 8)
        for count in matrix_counts(form)
        for dtype in DTYPES
    ]
    run_ranks(2, compare, cases, "shared memory")


@pytest.mark.parametrize("form", FORMS)
def test_gloo_with_recompute_and_transposed_matrices(form: str) -> None:
    cases = [
        Case(form, chunks, matrix_counts(form)[-1], dim, recompute=True, transposed=True, bias=True)
        for dim in (0, 1)
        for chunks in (3, "auto")
    ]
    run_ranks(2, compare, cases, "gloo")
    run_ranks(4, compare, cases, "gloo")


def fused(rank: int, ranks: int) -> list[str]:
    """Test fused matmuls with torch's reference implementation on CPU, and return the recorded messages of forward."""
    group = dist.new_group(backend="gloo")

    def reference_matmul_reduce_scatter(left: Tensor, right: Tensor, op: str, dim: int, name: str) -> Tensor:
        assert (op, name) == ("sum", group.group_name)
        return collectives.reduce_scatter_dim(left @ right, group, dim)

    forms = FusedMatmuls(group, symmetric_memory._fused_all_gather_matmul_fallback, reference_matmul_reduce_scatter)
    for form in ("gathered", "scattered"):
        for dim in (0, 1):
            case = Case(form, "auto", matrix_counts(form)[-1], dim, bias=form == "gathered")
            found, expected = (
                run(case, rank, ranks, group, overlapped=overlapped, fused=forms) for overlapped in (True, False)
            )
            assert all(torch.equal(actual, reference) for actual, reference in zip(found, expected, strict=True))
    x, matrices, _, _ = tensors(Case("scattered", 1), rank, ranks)
    with Recorder() as recorder:
        matmul_reduce_scatter(x, matrices[0], None, Overlap(group, "auto", fused=forms), 1)
    return [message.operation for message in recorder.messages]


def test_fused_matmuls() -> None:
    for operations in run_ranks(2, fused):
        assert operations == ["reduce_scatter"] * 2  # one of the fused matmul, and one of its reference


def test_fused_matmuls_need_cuda() -> None:
    assert run_ranks(2, find_none) == [None, None]


def find_none(rank: int, ranks: int) -> Any:
    return find_fused_matmuls(dist.group.WORLD, "cpu")


def map_memory(rank: int, ranks: int, without: tuple[str, int]) -> tuple[bool, list[str]]:
    """Result of the ranks, and the calls of this rank, where one rank fails in one part."""
    called: list[str] = []

    def call(name: str) -> Any:
        def run(*_: Any, **options: Any) -> Any:
            called.append(name)
            if (name, rank) == without:
                raise RuntimeError
            return torch.empty(1)

        return run

    module = symmetric_memory
    with (
        mock.patch.object(module, "empty", call("empty")),
        mock.patch.object(module, "rendezvous", call("rendezvous")),
        mock.patch("torch.cuda.current_device", return_value=0),
    ):
        return _can_map_memory(dist.group.WORLD), called


def test_ranks_agree_on_memory_before_they_wait_for_each_other() -> None:
    assert run_ranks(2, map_memory, ("empty", 1)) == [(False, ["empty"])] * 2
    assert run_ranks(2, map_memory, ("rendezvous", 0)) == [(False, ["empty", "rendezvous"])] * 2
    assert run_ranks(2, map_memory, ("", 0)) == [(True, ["empty", "rendezvous"])] * 2


# Saved tensors, missing gradients, and fp16 gradients


def frozen(rank: int, ranks: int) -> list[int]:
    """Number of messages if only the input, only the matrices, or only one output have gradients."""
    group, found = dist.new_group(backend="gloo"), []
    for trained in ("input", "matrices", "one output"):
        for form in FORMS:
            case = Case(form, 2, matrix_counts(form)[-1], tokens=8)
            x, matrices, biases, gradients = tensors(case, rank, ranks)
            wanted = [x] if trained == "input" else matrices if trained == "matrices" else [x, *matrices]
            for leaf in wanted:
                leaf.requires_grad_()
            results = []
            for overlapped in (True, False):
                with Recorder() as recorder:
                    outs = (
                        in_chunks(case, x, matrices, biases, Overlap(group, 2))
                        if overlapped
                        else plain(case, x, matrices, biases, group)
                    )
                    used = slice(1) if trained == "one output" else slice(None)
                    torch.autograd.backward(outs[used], gradients[used])
                found.append(len(recorder.messages))
                results.append([leaf.grad for leaf in wanted])
                for leaf in wanted:
                    leaf.grad = None
            for actual, reference in zip(*results, strict=True):
                assert (actual is None) == (reference is None)
                assert actual is None or torch.equal(actual, reference)
    return found


def test_only_needed_gradients_are_sent() -> None:
    found = run_ranks(2, frozen)[0]
    chunked, plainly = found[::2], found[1::2]
    #                 gathered copied scattered reduced
    assert chunked == [*(4, 2, 4, 2), *(3, 0, 4, 2), *(5, 2, 4, 2)]
    assert plainly == [*(2, 1, 2, 1), *(1, 0, 2, 1), *(2, 1, 2, 1)]


def saved_bytes(rank: int, ranks: int, form: str, chunks: int | None) -> int:
    """Bytes saved for backward, without matrices."""
    group = dist.new_group(backend=register_backend())
    case = Case(form, chunks or 1, matrix_counts(form)[-1], tokens=16)
    x, matrices, biases, _ = tensors(case, rank, ranks)
    for leaf in (x, *matrices):
        leaf.requires_grad_()
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not any(tensor.untyped_storage() is matrix.untyped_storage() for matrix in matrices):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if chunks is None:
            plain(case, x, matrices, biases, group)
        else:
            in_chunks(case, x, matrices, biases, Overlap(group, chunks))
    storages = {matrix.untyped_storage().data_ptr() for matrix in matrices}
    return sum(size for address, size in seen.items() if address not in storages)


def test_gathered_input_is_not_saved() -> None:
    full = 2 * 16 * 6 * 4  # batch x tokens x features, float32
    assert run_ranks(2, saved_bytes, "gathered", None) == [full, full]
    assert run_ranks(2, saved_bytes, "gathered", 4) == [full // 2, full // 2]
    for form in FORMS[1:]:
        assert run_ranks(2, saved_bytes, form, None) == run_ranks(2, saved_bytes, form, 4)


def fp16_backward(rank: int, ranks: int, form: str) -> None:
    """Backward in float16 after a forward in bfloat16: gradients and their sums over ranks and chunks are stored in float16."""
    group = dist.new_group(backend=register_backend())
    case = Case(form, 3, matrix_counts(form)[-1], dtype=torch.bfloat16, bias=True, integers=False, tokens=16)
    x, matrices, biases, gradients = tensors(case, rank, ranks)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    for overlapped in (0, 1):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *matrices, *biases)]
        views = [leaf.view_as(leaf) for leaf in leaves]
        for view in views:
            view.register_hook(lambda gradient, key=overlapped: seen[key].append(gradient))
        own, mats, bs = views[0], views[1 : 1 + case.matrices], views[1 + case.matrices :]
        outs = in_chunks(case, own, mats, bs, Overlap(group, 3)) if overlapped else plain(case, own, mats, bs, group)
        torch.autograd.backward([begin_fp16_backward(out) for out in outs], gradients)
    assert len(seen[0]) == len(seen[1]) == 1 + 2 * case.matrices
    for reference, actual in zip(
        sorted(seen[0], key=lambda g: str(g.shape)), sorted(seen[1], key=lambda g: str(g.shape)), strict=True
    ):
        assert isinstance(actual, Fp16Grad)
        assert isinstance(reference, Fp16Grad)
        assert actual.stored.dtype == STORED_DTYPE
        torch.testing.assert_close(actual.stored, reference.stored, rtol=2e-3, atol=2e-3 * reference.stored.abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_fp16_gradients(form: str) -> None:
    run_ranks(2, fp16_backward, form)


def multiply_queued(found: dict[int, Tensor], index: int, left: Tensor, right: Tensor) -> None:
    assert index not in found
    found[index] = left.T @ right


def deferred(rank: int, ranks: int, form: str) -> None:
    wire = new_wire()
    for dim, chunks in ((0, 3), (1, 3), (1, "auto")):
        case = Case(form, chunks, matrix_counts(form)[-1], dim, tokens=16)
        x, matrices, biases, gradients = tensors(case, rank, ranks)
        found: dict[int, Tensor] = {}
        defer = [partial(multiply_queued, found, index) for index in range(case.matrices)]
        overlap = Overlap(wire, chunks)  # type: ignore[arg-type]
        x.requires_grad_()
        if form == "gathered":
            outs = list(all_gather_matmul(x, matrices, biases, overlap, dim, defer))
        elif form == "copied":
            outs = list(copy_matmul(x, matrices, biases, overlap, defer))
        elif form == "scattered":
            outs = [matmul_reduce_scatter(x, matrices[0], None, overlap, dim, defer[0])]
        else:
            outs = [matmul_all_reduce(x, matrices[0], None, overlap, defer[0])]
        torch.autograd.backward(outs, gradients)
        expected = run(case, rank, ranks, wire, overlapped=False)[case.matrices + 1 :]
        for number, gradient in enumerate(expected):
            assert torch.equal(found[number], gradient)


@pytest.mark.parametrize("form", FORMS)
def test_deferred_weight_gradients(form: str) -> None:
    run_ranks(2, deferred, form)
    run_ranks(4, deferred, form)


def too_many(rank: int, ranks: int) -> None:
    group = dist.new_group(backend=register_backend())
    for form in FORMS:
        case = Case(form, 13, tokens=12, batch=1)
        with pytest.raises(PlanError, match=r"13 chunks of (6|12) rows"):
            in_chunks(case, *tensors(case, rank, ranks)[:3], Overlap(group, 13))


def test_more_chunks_than_rows_are_refused() -> None:
    run_ranks(2, too_many)


# On an emulated wire, with a virtual clock that only matmuls and waits advance


class Times(NamedTuple):
    """Times of one direction of one form, in seconds."""

    total: float
    computed: float
    on_the_wire: float
    messages: int


def times(wire: Wire, form: str, direction: str, chunks: int | None, seconds_per_byte: float, alpha: float) -> Times:
    """Times of a rank; chunks = None: plain collectives."""
    case = Case(form, chunks or 1, matrix_counts(form)[-1], tokens=128, batch=1)
    x, matrices, biases, gradients = tensors(case, wire.rank(), wire.size())
    for leaf in (x, *matrices):
        leaf.requires_grad_()

    def forward() -> list[Tensor]:
        if chunks is None:
            return plain(case, x, matrices, biases, wire)
        return in_chunks(case, x, matrices, biases, Overlap(wire, chunks))

    if direction == "forward":
        with virtual_seconds(wire, 1.0, alpha, seconds_per_byte) as clock:
            forward()
            sent = wire.transfers
    else:
        outs = forward()
        with virtual_seconds(wire, 1.0, alpha, seconds_per_byte) as clock:
            torch.autograd.backward(outs, gradients)
            sent = wire.transfers
    return Times(clock.time, clock.computed, sum(one.ended - one.began for one in sent), len(sent))


def overlapped_times(rank: int, ranks: int, form: str, direction: str, ratio: float) -> dict[int | None, Times]:
    """Times by number of chunks, with messages that take `ratio` times as long as the matmuls."""
    wire = new_wire()
    alone = times(wire, form, direction, 1, 1.0, 0.0)
    rate = ratio * alone.computed / alone.on_the_wire if alone.on_the_wire else 0.0
    found = {chunks: times(wire, form, direction, chunks, rate, 0.0) for chunks in (None, 1, 2, 8, 16)}
    return found


SENDS = [("gathered", "forward"), ("gathered", "backward"), ("copied", "backward"), ("scattered", "forward")]
SENDS += [("scattered", "backward"), ("reduced", "forward")]


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("form", "direction"), SENDS)
def test_matmuls_overlap_with_messages(form: str, direction: str, ratio: float) -> None:
    """With 16 chunks, at least nine tenths of the shorter of matmuls and messages are hidden."""
    for found in run_ranks(2, overlapped_times, form, direction, ratio):
        many = found[16]
        in_turn, hideable = many.computed + many.on_the_wire, min(many.computed, many.on_the_wire)
        assert many.computed == pytest.approx(found[None].computed)
        assert many.on_the_wire == pytest.approx(ratio * many.computed)
        assert in_turn - many.total >= 0.9 * hideable
        assert found[16].total <= found[8].total <= found[2].total <= found[1].total
        assert found[None].total == pytest.approx(found[None].computed + found[None].on_the_wire)


@pytest.mark.parametrize(("form", "direction"), [("gathered", "forward"), ("reduced", "backward")])
def test_direction_without_messages_takes_only_matmul_time(form: str, direction: str) -> None:
    other = {"gathered": "copied", "reduced": "reduced"}[form]
    for found in run_ranks(2, overlapped_times, other, direction, 1.0):
        assert found[8].total == found[8].computed
        assert found[8].messages == 0


def predicted(rank: int, ranks: int) -> None:
    """The cost model of each schedule predicts the time on the emulated wire."""
    wire, alpha, rate = new_wire(), 40.0, 3.0
    for chunks in (1, 2, 4, 8):
        taken = times(wire, "gathered", "forward", chunks, rate, alpha)
        message = AlphaBeta(alpha, (taken.on_the_wire - chunks * alpha))
        costs = MessageCosts(AlphaBeta(0, 0), message, {chunks: taken.computed / 2 / chunks}, own=taken.computed / 2)
        assert GatherMatmul.predict(costs, chunks) == pytest.approx(taken.total)
        taken = times(wire, "scattered", "forward", chunks, rate, alpha)
        message = AlphaBeta(alpha, taken.on_the_wire - chunks * alpha)
        costs = MessageCosts(AlphaBeta(0, 0), message, {chunks: taken.computed / 2 / chunks}, own=taken.computed / 2)
        assert MatmulScatter.predict(costs, chunks) == pytest.approx(taken.total)
        taken = times(wire, "gathered", "backward", chunks, rate, alpha)
        both = (taken.on_the_wire - (chunks + 1) * alpha) / 2
        products = taken.computed / 2
        costs = MessageCosts(
            AlphaBeta(0, 0), AlphaBeta(alpha, both), {chunks: products / chunks}, prefetch=alpha + both, last=products
        )
        assert MatmulReduce.predict(costs, chunks) == pytest.approx(taken.total)


def test_cost_model_predicts_the_emulated_wire() -> None:
    run_ranks(2, predicted)


def test_chunk_sizes_differ_by_at_most_one_row() -> None:
    for rows in range(1, 20):
        for count in range(1, rows + 1):
            sizes = [chunk.stop - chunk.start for chunk in split_rows(rows, count)]
            assert sum(sizes) == rows
            assert len(sizes) == count
            assert sorted(sizes, reverse=True) == sizes
            assert sizes[0] - sizes[-1] <= 1


def test_fewest_chunks_within_the_minimum_gain() -> None:
    assert fewest_chunks({1: 2.0, 2: 1.005, 4: 1.0, 8: 1.2}) == 2
    assert fewest_chunks({1: 1.0, 2: 1.0}) == 1


def chosen(rank: int, ranks: int) -> list[tuple[dict[Any, int], int, int]]:
    """Chosen counts, sent and recorded messages for the first and second use of a shape, and for another shape."""
    wire = new_wire()
    wire.reset(wire.clock, 1e-5, 1e-7)
    overlap, found = Overlap(wire, "auto"), []
    for tokens in (16, 16, 32):
        case = Case("gathered", "auto", 3, tokens=tokens)
        x, matrices, biases, gradients = tensors(case, rank, ranks)
        x.requires_grad_()
        before = len(wire.transfers)
        with Recorder() as recorder:
            torch.autograd.backward(in_chunks(case, x, matrices, biases, overlap), gradients)
        found.append((dict(overlap.counts), len(wire.transfers) - before, len(recorder.messages)))
    return found


def test_ranks_choose_the_same_count_once_per_shape() -> None:
    first, second = run_ranks(2, chosen)
    for (counts, sent, recorded), (again, sent_again, recorded_again), (more, *_) in (first, second):
        assert len(counts) == 2  # forward and backward
        assert again == counts
        assert sent_again == recorded_again == recorded == sum(counts.values())
        assert sent > recorded  # messages of the measurement are not recorded
        assert len(more) == 4
    assert first == second


def test_shared_memory_cannot_overlap() -> None:
    assert run_ranks(2, overlaps) == [(False, True, True)] * 2


def overlaps(rank: int, ranks: int) -> tuple[bool, bool, bool]:
    shared = dist.new_group(backend=register_backend())
    return can_overlap(shared), can_overlap(new_wire()), can_overlap(dist.group.WORLD)
