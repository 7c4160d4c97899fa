"""Compressed reductions: equal bits on all ranks, error feedback, momenta, and bytes sent."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lab.pool import run_ranks
from weft.comm.compression.codecs import CODECS, build_feedback
from weft.comm.compression.feedback import Feedback
from weft.comm.compression.reduce import AllReduce, Levels, reduce_scatter
from weft.comm.recorder import Recorder
from weft.plan import Comm

STEPS = 6


def levels_for(world_size: int, hosts: int) -> Levels:
    """Groups of a flat reduction (hosts = 0), or of a hierarchical one."""
    if hosts == 0:
        return Levels(None, dist.group.WORLD)
    inside, rank = world_size // hosts, dist.get_rank()
    inner = [dist.new_group(list(range(host * inside, (host + 1) * inside))) for host in range(hosts)]
    outer = [dist.new_group(list(range(local, world_size, inside))) for local in range(inside)]
    return Levels(inner[rank // inside], outer[rank % inside])


def gradient(rank: int, step: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * step + rank))


def all_reduces(
    rank: int, world_size: int, codec: str, length: int, hosts: int = 0, keeps_errors: bool = True
) -> tuple[Tensor, Tensor, int]:
    """Sum of the results, the final error over all ranks, and the bytes of one reduction."""
    levels, feedback = (
        levels_for(world_size, hosts),
        build_feedback(Comm(compression=codec, error_feedback=keeps_errors)),
    )
    feedback.takes_momentum = False
    total = torch.zeros(length)
    for step in range(STEPS):
        feedback.begin(loss_scale=2.0 ** (step % 3))
        flat = gradient(rank, step, length) * feedback.loss_scale
        with Recorder() as recorder:
            AllReduce("all", flat, levels, feedback).wait()
        total += flat / feedback.loss_scale
        feedback.commit()
    owed = torch.zeros(length)
    if keeps_errors:  # each rank has the errors of the part that it owns inside its host
        error, inside = feedback.tensors()["error/all"].flatten(), levels.inner_size
        padded = torch.zeros(inside, len(error))
        padded[rank % inside] = error / levels.outer_size
        owed = padded.flatten()[:length]
        dist.all_reduce(owed)
    return total, owed, recorder.total_bytes


def expected_total(world_size: int, length: int) -> Tensor:
    return sum(gradient(rank, step, length) for rank in range(world_size) for step in range(STEPS)) / world_size


@pytest.mark.must("parity: compressed gradients", case="4-2-2:4")
@pytest.mark.must("parity: compressed gradients", case="3-0-int8")
@pytest.mark.must("composition: compressed gradients", case="3-3-bf16")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("world_size", "hosts"), [(2, 0), (3, 0), (4, 0), (4, 2), (3, 3)])
def test_all_reduce_loses_only_the_last_error(codec: str, world_size: int, hosts: int) -> None:
    length = 5003
    results = run_ranks(world_size, all_reduces, codec, length, hosts)
    for total, owed, _ in results:
        assert torch.equal(total, results[0][0])
        torch.testing.assert_close(total + owed, expected_total(world_size, length), rtol=1e-4, atol=1e-4)


def test_all_reduce_without_error_feedback_loses_more() -> None:
    total, _, _ = run_ranks(2, all_reduces, "2:4", 5003, 0, False)[0]
    assert (total - expected_total(2, 5003)).norm() > 0.2 * expected_total(2, 5003).norm()


@pytest.mark.parametrize(("codec", "against", "saving"), [("2:4", 4, 0.70), ("2:4", 2, 0.43), ("1-bit", 4, 0.90)])
def test_bytes_sent(codec: str, against: int, saving: float) -> None:
    """Saving compared with a ring all-reduce of elements with `against` bytes."""
    length = 2**16
    for world_size in (2, 4):
        ring = 2 * (world_size - 1) * length * against // world_size
        for _, _, sent in run_ranks(world_size, all_reduces, codec, length):
            assert sent <= (1 - saving) * ring


def scatters(rank: int, world_size: int, codec: str, length: int, hosts: int) -> tuple[Tensor, Tensor]:
    """Sum of this rank's results, and its full error."""
    levels, feedback = levels_for(world_size, hosts), Feedback(CODECS[codec])
    total, output = torch.zeros(length), torch.empty(length)
    for step in range(STEPS):
        feedback.begin()
        reduce_scatter("all", output, gradient(rank, step, world_size * length), levels, feedback)
        total += output
        feedback.commit()
    return total, feedback.tensors()["error/all"]


@pytest.mark.must("parity: compressed gradients", case="3-0-bf16")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("world_size", "hosts"), [(2, 0), (3, 0), (4, 2)])
def test_reduce_scatter_loses_only_the_last_error(codec: str, world_size: int, hosts: int) -> None:
    length = 1001
    results = run_ranks(world_size, scatters, codec, length, hosts)
    expected = expected_total(world_size, world_size * length).view(world_size, length)
    inside = world_size // hosts if hosts else 1
    for rank, (total, error) in enumerate(results):
        assert not error[rank // inside].any()  # the rank's own part is not sent
        peers = [results[peer][1] for peer in range(world_size) if peer % inside == rank % inside]
        owed = torch.stack([peer[rank // inside] for peer in peers]).mean(0)
        torch.testing.assert_close(total + owed, expected[rank], rtol=1e-4, atol=1e-4)


def skips(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means before and after an uncommitted step with a non-finite gradient, and the mean of that step."""
    feedback, levels = Feedback(CODECS["1-bit"], takes_momentum=True), Levels(None, dist.group.WORLD)

    def reduce(bad: bool) -> Tensor:
        feedback.begin(decay=0.9)
        flat = gradient(rank, 0, 1000)
        if bad and rank == 1:
            flat[3] = torch.inf
        AllReduce("all", flat, levels, feedback, momentum=True).wait()
        return flat

    reduce(False)
    feedback.commit()
    first = reduce(False)
    bad = reduce(True)
    return first, reduce(False), bad


def test_skipped_step_leaves_the_state_unchanged() -> None:
    for first, again, bad in run_ranks(2, skips):
        assert torch.equal(first, again)
        assert not bad.isfinite().all()


def reload(rank: int, world_size: int) -> tuple[Tensor, Tensor, bool]:
    """A mean, the mean again after reloading the state before it, and True if the state is in the same tensors."""
    feedback, levels = Feedback(CODECS["2:4"]), Levels(None, dist.group.WORLD)

    def reduce() -> Tensor:
        feedback.begin()
        flat = gradient(rank, 0, 1000)
        AllReduce("all", flat, levels, feedback).wait()
        feedback.commit()
        return flat

    reduce()
    tensors = feedback.tensors()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    first = reduce()
    feedback.load(kept)
    stays = all(
        tensors[name] is tensor and torch.equal(tensor, kept[name]) for name, tensor in feedback.tensors().items()
    )
    return first, reduce(), stays


def test_load_restores_the_state_in_place() -> None:
    """The tensor objects must stay, since a snapshot refers to them."""
    for first, again, stays in run_ranks(2, reload):
        assert torch.equal(first, again)
        assert stays


def momenta(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean momenta of an all-reduce, a reduce-scatter and an uncompressed gradient, with an almost lossless codec."""
    feedback, levels = Feedback(CODECS["fp16"], takes_momentum=True), Levels(None, dist.group.WORLD)
    for step in range(3):
        feedback.begin(decay=0.5, loss_scale=4.0)
        full, alone, part = torch.zeros(64), torch.zeros(64), torch.zeros(32)
        for micro_batch in range(2):
            flat = gradient(rank, 10 * step + micro_batch, 64) * 4
            ours, output = flat.clone(), torch.empty(32)
            reduce_scatter("scattered", output, flat, levels, feedback)
            AllReduce("all", flat, levels, feedback, momentum=True).wait()
            feedback.add_up("alone", ours)
            full, alone, part = full + flat / 4, alone + ours / 4, part + output / 4
        feedback.commit()
    dist.all_reduce(alone, dist.ReduceOp.AVG)
    return full, alone, part


@pytest.mark.must("parity: 1-bit Adam")
def test_momenta_are_those_of_the_mean_gradient() -> None:
    expected = torch.zeros(64)
    for step in range(3):
        both = [gradient(rank, 10 * step + micro_batch, 64) for micro_batch in range(2) for rank in range(2)]
        expected = 0.5 * expected + 0.5 * sum(both) / 2
    for rank, (full, alone, part) in enumerate(run_ranks(2, momenta)):
        torch.testing.assert_close(full, expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(part, expected[32 * rank : 32 * (rank + 1)], rtol=1e-2, atol=1e-2)


def half_precision(rank: int, world_size: int) -> Tensor:
    flat = gradient(rank, 0, 100).bfloat16()
    AllReduce("all", flat, Levels(None, dist.group.WORLD), Feedback(CODECS["int8"])).wait()
    return flat


def test_bf16_gradients() -> None:
    expected = (gradient(0, 0, 100) + gradient(1, 0, 100)) / 2
    found = run_ranks(2, half_precision)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].float(), expected, rtol=0.05, atol=0.05)


def slow_momentum(rank: int, world_size: int) -> float:
    """Relative error of a mean momentum with the 1-bit codec, after correlated gradients."""
    feedback, levels, true = (
        Feedback(CODECS["1-bit"], takes_momentum=True),
        Levels(None, dist.group.WORLD),
        torch.zeros(4096),
    )
    for step in range(60):
        feedback.begin(decay=0.9)
        flat = gradient(rank, 0, 4096) + gradient(rank, step + 1, 4096)
        mean = flat.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        true = 0.9 * true + 0.1 * mean
        AllReduce("all", flat, levels, feedback, momentum=True).wait()
        feedback.commit()
    return float((flat - true).norm() / true.norm())


def test_error_of_a_momentum_is_a_fraction_of_its_change() -> None:
    """Messages contain changes of momenta; with full momenta, the error would exceed the momentum."""
    assert max(run_ranks(2, slow_momentum)) < 0.4
