"""Products in chunks beside their communication: the same numbers as the plain form, and on an emulated wire the time of the
longer of the two in place of their sum."""

from functools import partial
from typing import Any, NamedTuple

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
from weft.comm.chunks import GatherMatmul, Line, MatmulReduce, MatmulScatter, MessageCosts, cut_rows, fewest_chunks
from weft.comm.collectives import Recorder
from weft.comm.overlap import (
    Overlap,
    can_overlap,
    multiply_copied,
    multiply_gathered,
    multiply_reduced,
    multiply_scattered,
)
from weft.comm.symmetric import Fused, find_fused
from weft.errors import PlanError
from weft.precision.fp16_backward import HELD, Fp16Grad, carry_gradient

FORMS = ("gathered", "copied", "scattered", "reduced")
FORMATS = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """One product on all ranks of a group."""

    form: str
    chunks: int | str
    fan: int = 1
    dim: int = 1
    dtype: torch.dtype = torch.float32
    bias: bool = False
    whole: bool = True
    """Small whole numbers, whose sums are exact in every format and order: any row in another place changes bits."""
    batch: int = 2
    tokens: int = 12
    """Along `dim`, of all ranks."""
    again: bool = False
    """Computed once more in backward."""
    transposed: bool = False
    """The weight is a view of its transpose."""


def tensors(case: Case, rank: int, ranks: int) -> tuple[Tensor, list[Tensor], list[Tensor | None], list[Tensor]]:
    """Input, matrices, biases and output gradients of one rank; the gradients are permuted in memory."""
    generator = torch.Generator().manual_seed(10 * ranks)

    def draw(*shape: int) -> Tensor:
        """Other numbers on each rank."""
        if case.whole:
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
    matrices = [draw(5 + number, 6) for number in range(case.fan)]
    if case.transposed:
        matrices = [matrix.T.contiguous() for matrix in matrices]
    biases = [draw(5 + number) if case.bias else None for number in range(case.fan)]
    gradients = [draw(5 + number, *out_shape[::-1]).permute(2, 1, 0) for number in range(case.fan)]
    if case.form == "reduced":
        for number, gradient in enumerate(gradients):
            same = gradient.contiguous()
            dist.broadcast(same, 0)
            gradients[number] = same.transpose(0, 1).contiguous().transpose(0, 1)
    return x, matrices, biases, gradients


def plain(case: Case, x: Tensor, matrices: Any, biases: Any, group: dist.ProcessGroup) -> list[Tensor]:
    """The form by single collectives."""
    if case.form in ("gathered", "copied"):
        x = collectives.gather(x, group, case.dim) if case.form == "gathered" else collectives.copy(group, x)[0]
        return [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
    out = F.linear(x, matrices[0], biases[0])
    return [
        collectives.reduce_scatter(out, group, case.dim) if case.form == "scattered" else collectives.reduce(out, group)
    ]


def in_chunks(case: Case, x: Tensor, matrices: Any, biases: Any, overlap: Overlap) -> list[Tensor]:
    if case.form == "gathered":
        return list(multiply_gathered(x, matrices, biases, overlap, case.dim))
    if case.form == "copied":
        return list(multiply_copied(x, matrices, biases, overlap))
    if case.form == "scattered":
        return [multiply_scattered(x, matrices[0], biases[0], overlap, case.dim)]
    return [multiply_reduced(x, matrices[0], biases[0], overlap)]


def run(
    case: Case, rank: int, ranks: int, group: dist.ProcessGroup, *, overlapped: bool, fused: Fused | None = None
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

    outs = checkpoint(forward, x, use_reentrant=False) if case.again else forward(x)
    torch.autograd.backward(outs, gradients)
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


def compare(rank: int, ranks: int, cases: list[Case], backend: str) -> None:
    group = dist.new_group(backend=register_backend() if backend == "shared memory" else "gloo")
    for case in cases:
        found, expected = (run(case, rank, ranks, group, overlapped=overlapped) for overlapped in (True, False))
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert mine.shape == theirs.shape
            error, largest = (mine - theirs).abs().max().item(), theirs.abs().max().item()
            tolerance = 0 if case.whole else TOLERANCE[case.dtype] * largest
            assert error <= tolerance, (case, number, error, largest)


def fans(form: str) -> tuple[int, ...]:
    return (1, 2, 3) if form in ("gathered", "copied") else (1,)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_of_sums_that_are_exact(form: str, ranks: int) -> None:
    """Every number of chunks, even and not, along both dims, with every fan, with biases and without."""
    cases = [
        Case(form, chunks, fan, dim, dtype, bias, tokens=tokens * ranks)
        for chunks in (1, 2, 3, 4, 8)
        for fan in fans(form)
        for dim, dtype, bias in ((1, torch.float32, True), (0, torch.bfloat16, False), (1, torch.float64, False))
        for tokens in (8, 11)
    ]
    run_ranks(ranks, compare, cases, "shared memory")


@pytest.mark.parametrize("form", FORMS)
def test_within_rounding(form: str) -> None:
    cases = [
        Case(form, chunks, fan, dtype=dtype, bias=True, whole=False, tokens=16)
        for chunks in (1, 3, 8)
        for fan in fans(form)
        for dtype in FORMATS
    ]
    run_ranks(2, compare, cases, "shared memory")


@pytest.mark.parametrize("form", FORMS)
def test_over_gloo_computed_again_and_with_transposed_matrices(form: str) -> None:
    cases = [
        Case(form, chunks, fans(form)[-1], dim, again=True, transposed=True, bias=True)
        for dim in (0, 1)
        for chunks in (3, "auto")
    ]
    run_ranks(2, compare, cases, "gloo")
    run_ranks(4, compare, cases, "gloo")


def fused(rank: int, ranks: int) -> list[str]:
    """The fused products by torch's own reference of them, which runs anywhere; what a recorder has seen of forward."""
    group = dist.new_group(backend="gloo")

    def matmul_reduce_scatter(left: Tensor, right: Tensor, op: str, dim: int, name: str) -> Tensor:
        assert (op, name) == ("sum", group.group_name)
        return collectives.reduce_scatter_dim(left @ right, group, dim)

    forms = Fused(group, symmetric_memory._fused_all_gather_matmul_fallback, matmul_reduce_scatter)
    for form in ("gathered", "scattered"):
        for dim in (0, 1):
            case = Case(form, "auto", fans(form)[-1], dim, bias=form == "gathered")
            found, expected = (
                run(case, rank, ranks, group, overlapped=overlapped, fused=forms) for overlapped in (True, False)
            )
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    x, matrices, _, _ = tensors(Case("scattered", 1), rank, ranks)
    with Recorder() as recorder:
        multiply_scattered(x, matrices[0], None, Overlap(group, "auto", fused=forms), 1)
    return [message.operation for message in recorder.messages]


def test_fused_forms() -> None:
    for operations in run_ranks(2, fused):
        assert operations == ["reduce_scatter"] * 2  # the fused form's, and its reference's


def test_fused_forms_are_of_cuda() -> None:
    assert run_ranks(2, find_none) == [None, None]


def find_none(rank: int, ranks: int) -> Any:
    return find_fused(dist.group.WORLD, "cpu")


# What is kept, left out, or held in another format


def frozen(rank: int, ranks: int) -> list[int]:
    """Messages of forward and backward where only the input, or only the matrices, have gradients; and of one unused output."""
    group, found = dist.new_group(backend="gloo"), []
    for trained in ("input", "matrices", "one output"):
        for form in FORMS:
            case = Case(form, 2, fans(form)[-1], tokens=8)
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
            for mine, theirs in zip(*results, strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs)
    return found


def test_only_what_is_wanted_is_sent() -> None:
    found = run_ranks(2, frozen)[0]
    chunked, plainly = found[::2], found[1::2]
    #                 gathered copied scattered reduced
    assert chunked == [*(4, 2, 4, 2), *(3, 0, 4, 2), *(5, 2, 4, 2)]
    assert plainly == [*(2, 1, 2, 1), *(1, 0, 2, 1), *(2, 1, 2, 1)]


def saved_bytes(rank: int, ranks: int, form: str, chunks: int | None) -> int:
    """Bytes that a form keeps for backward, matrices apart."""
    group = dist.new_group(backend=register_backend())
    case = Case(form, chunks or 1, fans(form)[-1], tokens=16)
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
    return sum(size for place, size in seen.items() if place not in storages)


def test_the_gathered_input_is_not_kept() -> None:
    whole = 2 * 16 * 6 * 4  # batch x tokens x features, float32
    assert run_ranks(2, saved_bytes, "gathered", None) == [whole, whole]
    assert run_ranks(2, saved_bytes, "gathered", 4) == [whole // 2, whole // 2]
    for form in FORMS[1:]:
        assert run_ranks(2, saved_bytes, form, None) == run_ranks(2, saved_bytes, form, 4)


def carried(rank: int, ranks: int, form: str) -> None:
    """Backward in float16 behind a forward in bfloat16: gradients hold float16, sums over ranks and chunks too."""
    group = dist.new_group(backend=register_backend())
    case = Case(form, 3, fans(form)[-1], dtype=torch.bfloat16, bias=True, whole=False, tokens=16)
    x, matrices, biases, gradients = tensors(case, rank, ranks)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    for overlapped in (0, 1):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *matrices, *biases)]
        views = [leaf.view_as(leaf) for leaf in leaves]
        for view in views:
            view.register_hook(lambda gradient, place=overlapped: seen[place].append(gradient))
        own, mats, bs = views[0], views[1 : 1 + case.fan], views[1 + case.fan :]
        outs = in_chunks(case, own, mats, bs, Overlap(group, 3)) if overlapped else plain(case, own, mats, bs, group)
        torch.autograd.backward([carry_gradient(out) for out in outs], gradients)
    assert len(seen[0]) == len(seen[1]) == 1 + 2 * case.fan
    for theirs, mine in zip(
        sorted(seen[0], key=lambda g: str(g.shape)), sorted(seen[1], key=lambda g: str(g.shape)), strict=True
    ):
        assert isinstance(mine, Fp16Grad)
        assert isinstance(theirs, Fp16Grad)
        assert mine.carried.dtype == HELD
        torch.testing.assert_close(mine.carried, theirs.carried, rtol=2e-3, atol=2e-3 * theirs.carried.abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_another_format_than_they_say(form: str) -> None:
    run_ranks(2, carried, form)


def multiply_later(found: dict[int, Tensor], number: int, left: Tensor, right: Tensor) -> None:
    assert number not in found
    found[number] = left.T @ right


def left_for_later(rank: int, ranks: int, form: str) -> None:
    wire = new_wire()
    for dim, chunks in ((0, 3), (1, 3), (1, "auto")):
        case = Case(form, chunks, fans(form)[-1], dim, tokens=16)
        x, matrices, biases, gradients = tensors(case, rank, ranks)
        found: dict[int, Tensor] = {}
        later = [partial(multiply_later, found, number) for number in range(case.fan)]
        overlap = Overlap(wire, chunks)  # type: ignore[arg-type]
        x.requires_grad_()
        if form == "gathered":
            outs = list(multiply_gathered(x, matrices, biases, overlap, dim, later))
        elif form == "copied":
            outs = list(multiply_copied(x, matrices, biases, overlap, later))
        elif form == "scattered":
            outs = [multiply_scattered(x, matrices[0], None, overlap, dim, later[0])]
        else:
            outs = [multiply_reduced(x, matrices[0], None, overlap, later[0])]
        torch.autograd.backward(outs, gradients)
        expected = run(case, rank, ranks, wire, overlapped=False)[case.fan + 1 :]
        for number, gradient in enumerate(expected):
            assert torch.equal(found[number], gradient)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_matrices_that_are_computed_later(form: str) -> None:
    run_ranks(2, left_for_later, form)
    run_ranks(4, left_for_later, form)


def too_many(rank: int, ranks: int) -> None:
    group = dist.new_group(backend=register_backend())
    for form in FORMS:
        case = Case(form, 13, tokens=12, batch=1)
        with pytest.raises(PlanError, match=r"13 chunks of (6|12) rows"):
            in_chunks(case, *tensors(case, rank, ranks)[:3], Overlap(group, 13))


def test_more_chunks_than_rows_are_refused() -> None:
    run_ranks(2, too_many)


# On an emulated wire, by a clock that only products and waiting move on


class Times(NamedTuple):
    """Seconds of one direction of one form."""

    total: float
    computed: float
    on_the_wire: float
    messages: int


def times(wire: Wire, form: str, direction: str, chunks: int | None, seconds_per_byte: float, alpha: float) -> Times:
    """Of a rank; None is the plain form."""
    case = Case(form, chunks or 1, fans(form)[-1], tokens=128, batch=1)
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
    """By number of chunks, where all messages of the form take `ratio` times as long as its products."""
    wire = new_wire()
    alone = times(wire, form, direction, 1, 1.0, 0.0)
    rate = ratio * alone.computed / alone.on_the_wire if alone.on_the_wire else 0.0
    found = {chunks: times(wire, form, direction, chunks, rate, 0.0) for chunks in (None, 1, 2, 8, 16)}
    return found


SENDS = [("gathered", "forward"), ("gathered", "backward"), ("copied", "backward"), ("scattered", "forward")]
SENDS += [("scattered", "backward"), ("reduced", "forward")]


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("form", "direction"), SENDS)
def test_the_longer_hides_the_shorter(form: str, direction: str, ratio: float) -> None:
    """With 16 chunks, nine tenths of what can be hidden are; one message alone, nothing or what waits for no chunk."""
    for found in run_ranks(2, overlapped_times, form, direction, ratio):
        many = found[16]
        in_turn, hideable = many.computed + many.on_the_wire, min(many.computed, many.on_the_wire)
        assert many.computed == pytest.approx(found[None].computed)
        assert many.on_the_wire == pytest.approx(ratio * many.computed)
        assert in_turn - many.total >= 0.9 * hideable
        assert found[16].total <= found[8].total <= found[2].total <= found[1].total
        assert found[None].total == pytest.approx(found[None].computed + found[None].on_the_wire)


@pytest.mark.parametrize(("form", "direction"), [("gathered", "forward"), ("reduced", "backward")])
def test_what_a_direction_does_not_send_takes_no_time(form: str, direction: str) -> None:
    other = {"gathered": "copied", "reduced": "reduced"}[form]
    for found in run_ranks(2, overlapped_times, other, direction, 1.0):
        assert found[8].total == found[8].computed
        assert found[8].messages == 0


def predicted(rank: int, ranks: int) -> None:
    """The model of each order says what the wire does, message by message."""
    wire, alpha, rate = new_wire(), 40.0, 3.0
    for chunks in (1, 2, 4, 8):
        taken = times(wire, "gathered", "forward", chunks, rate, alpha)
        message = Line(alpha, (taken.on_the_wire - chunks * alpha))
        costs = MessageCosts(Line(0, 0), message, {chunks: taken.computed / 2 / chunks}, own=taken.computed / 2)
        assert GatherMatmul.predict(costs, chunks) == pytest.approx(taken.total)
        taken = times(wire, "scattered", "forward", chunks, rate, alpha)
        message = Line(alpha, taken.on_the_wire - chunks * alpha)
        costs = MessageCosts(Line(0, 0), message, {chunks: taken.computed / 2 / chunks}, own=taken.computed / 2)
        assert MatmulScatter.predict(costs, chunks) == pytest.approx(taken.total)
        taken = times(wire, "gathered", "backward", chunks, rate, alpha)
        both = (taken.on_the_wire - (chunks + 1) * alpha) / 2
        products = taken.computed / 2
        costs = MessageCosts(
            Line(0, 0), Line(alpha, both), {chunks: products / chunks}, ahead=alpha + both, last=products
        )
        assert MatmulReduce.predict(costs, chunks) == pytest.approx(taken.total)


def test_the_model_says_what_the_wire_does() -> None:
    run_ranks(2, predicted)


def test_chunks_differ_by_one_row() -> None:
    for rows in range(1, 20):
        for count in range(1, rows + 1):
            sizes = [chunk.stop - chunk.start for chunk in cut_rows(rows, count)]
            assert sum(sizes) == rows
            assert len(sizes) == count
            assert sorted(sizes, reverse=True) == sizes
            assert sizes[0] - sizes[-1] <= 1


def test_the_fewest_chunks_that_are_as_good() -> None:
    assert fewest_chunks({1: 2.0, 2: 1.005, 4: 1.0, 8: 1.2}) == 2
    assert fewest_chunks({1: 1.0, 2: 1.0}) == 1


def chosen(rank: int, ranks: int) -> list[tuple[dict[Any, int], int, int]]:
    """Of a first and a second use of one shape, and of another shape: what was chosen so far; messages, and those recorded."""
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


def test_ranks_choose_the_same_once_for_each_shape() -> None:
    first, second = run_ranks(2, chosen)
    for (counts, sent, recorded), (again, sent_again, recorded_again), (more, *_) in (first, second):
        assert len(counts) == 2  # forward and backward
        assert again == counts
        assert sent_again == recorded_again == recorded == sum(counts.values())
        assert sent > recorded  # what was measured
        assert len(more) == 4
    assert first == second


def test_shared_memory_cannot_overlap() -> None:
    assert run_ranks(2, overlaps) == [(False, True, True)] * 2


def overlaps(rank: int, ranks: int) -> tuple[bool, bool, bool]:
    shared = dist.new_group(backend=register_backend())
    return can_overlap(shared), can_overlap(new_wire()), can_overlap(dist.group.WORLD)
