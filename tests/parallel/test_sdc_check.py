"""SDC check: any flipped bit is detected in every layout, and the faulty rank is reported."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.lab.families import family
from tests.lab.parity import SETTINGS, packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.objects import all_gather_json
from weft.comm.recorder import Recorder
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.tensor_digest import Digester
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.parallel.weights import to_local
from weft.plan import Parallel, Plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.sdc_check import check_replicas, reason_against_sdc_checks
from weft.training.step import evaluate, train_step

CPU = torch.device("cpu")

# Digests

FORMATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (1,), (2,), (3,), (7, 1), (5, 13), (64,), (33, 17), (3, 5, 67)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Tensor with random bits, including NaN, infinities and subnormal numbers."""
    size = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit of a tensor, counted over all its bytes."""
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_single_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    """Single bits of small tensors of many sizes; rows of 512 bytes, so that larger tensors have several rows."""
    digest, generator = Digester(CPU, row_bytes=512), torch.Generator().manual_seed(1)
    for shape in SHAPES:
        tensor = random_bits(shape, dtype, generator)
        before = int(digest(tensor))
        assert int(digest(tensor.clone())) == before
        bits = torch.arange(8 * tensor.nbytes)
        if dtype == torch.bool:
            bits = bits[::8]
        for bit in bits[torch.randperm(len(bits), generator=generator)[:500]].tolist():
            flip(tensor, bit)
            assert int(digest(tensor)) != before, (shape, bit)
            flip(tensor, bit)
        assert int(digest(tensor)) == before


def test_flips_in_a_tensor_of_many_full_rows() -> None:
    """Default row size; first and last bits, bits at row boundaries, and random bits."""
    digest, generator = Digester(CPU), torch.Generator().manual_seed(2)
    tensor = torch.randn(1_200_007, generator=generator)
    before, bits = int(digest(tensor)), 8 * tensor.nbytes
    row = 8 * digest.words.nbytes
    assert bits > 9 * row
    flips = [0, 31, bits - 1, bits - 32, row - 1, row, 2 * row - 1, 9 * row]
    for bit in flips + torch.randint(bits, (200,), generator=generator).tolist():
        flip(tensor, bit)
        assert int(digest(tensor)) != before
        flip(tensor, bit)


def other_changes(tensor: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Copies with two swapped elements, two flipped signs, or another order; pairs are random, adjacent, or in one column."""
    size, row = len(tensor), 512 // tensor.element_size()
    for _ in range(500):
        i, j = torch.randperm(size, generator=generator)[:2].tolist()
        pairs = [(i, j), (i, (i + 1) % size), (i, (i + row) % size), (i, (i + 2 * row) % size)]
        for one, other in pairs:
            changed = tensor.clone()
            changed[[one, other]] = changed[[other, one]]
            yield changed
            changed = tensor.clone()
            changed[[one, other]] *= -1
            yield changed
    yield tensor.roll(1)
    yield tensor.roll(row)
    yield tensor.flip(0)
    yield tensor.view(-1, 2).flip(1).reshape(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["random", "powers of two", "x and -x"])
def test_order_and_pairs_of_flips_change_the_digest(kind: str, dtype: torch.dtype) -> None:
    digest, generator = Digester(CPU, row_bytes=512), torch.Generator().manual_seed(3)
    tensor = torch.randn(1024, generator=generator).to(dtype)
    if kind == "powers of two":  # two elements differ in one or a few bits
        tensor = torch.exp2(torch.randint(-8, 8, (1024,), generator=generator)).to(dtype)
    elif kind == "x and -x":
        tensor = torch.randint(0, 2, (1024,), generator=generator).to(dtype) * 2 - 1
    before, seen = int(digest(tensor)), 0
    for changed in other_changes(tensor, generator):
        if not torch.equal(changed, tensor):
            seen += 1
            assert int(digest(changed)) != before
    assert seen > 2000


def test_digest_depends_only_on_elements_and_their_order() -> None:
    digest = Digester(CPU, row_bytes=512)
    tensor = torch.randn(31, 45)
    expected = int(digest(tensor))
    moved = torch.empty(2000)[3 : 3 + tensor.numel()].copy_(tensor.flatten())
    assert int(digest(moved)) == expected
    assert int(digest(tensor.t().contiguous().t())) == expected
    assert int(digest(tensor.t())) != expected
    assert int(digest(torch.zeros(4))) == int(digest(torch.zeros(4)))
    assert int(digest(torch.tensor([0.0, -0.0]))) != int(digest(torch.zeros(2)))
    assert int(digest(torch.empty(0))) == int(digest(torch.empty(0, 3)))


# Layouts


class Flip(NamedTuple):
    """Bit flip on one rank."""

    rank: int
    name: str
    kind: str = ""
    """Name of an optimizer state; "" for the parameter."""
    element: str = "random"
    bit: int = 20


class TrainedRank(NamedTuple):
    """Model, optimizer and mesh of one rank after a training step."""

    model: Any
    optimizer: torch.optim.Optimizer
    mesh: Any
    plan: Plan


def build(ranks: int, name: str, plan: Plan) -> TrainedRank:
    source = Model(
        config={**family(name), "vocab_size": 97}
    )  # a prime: shards have unequal sizes, and one may be empty
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), DTYPES[plan.precision.update]), plan, mesh)
    materialize(model, source, CPU)
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    trained = TrainedRank(model, optimizer, mesh, plan)
    step(trained)
    return trained


def step(trained: TrainedRank) -> None:
    batches = share(packed_batches(96)[0], data_rank(trained.mesh), trained.plan.parallel.data_ranks, 1)
    result = train_step(trained.model, trained.optimizer, batches, 0.5)
    assert result.problem is None


def held_tensor(trained: TrainedRank, name: str, kind: str) -> Tensor:
    parameter = dict(trained.model.named_parameters())[name]
    return to_local((trained.optimizer.state[parameter][kind] if kind else parameter).detach())


def flip_at(trained: TrainedRank, fault: Flip) -> None:
    tensor = held_tensor(trained, fault.name, fault.kind)
    indices = {"first": 0, "last": tensor.numel() - 1, "random": 7919 % tensor.numel()}
    flip(tensor, 8 * tensor.element_size() * indices[fault.element] + fault.bit)


def holders(trained: TrainedRank) -> dict[str, list[int]]:
    """Ranks that hold the same part of each parameter of this rank, computed from shape and offset of the part."""
    mine = {}
    for name, parameter in trained.model.named_parameters():
        shape, offset = tuple(parameter.shape), (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        mine[name] = [list(shape), list(offset)]
    everyone = all_gather_json(mine)
    return {name: [r for r, table in enumerate(everyone) if table.get(name) == part] for name, part in mine.items()}


def after_flips(
    rank: int, ranks: int, family_name: str, plan: Plan, flips: list[Flip]
) -> tuple[str | None, list[str | None], str | None, dict[str, list[int]]]:
    """Report before any flip, of each flip (which is undone), and after another step; and the holders of each parameter."""
    trained = build(ranks, family_name, plan)

    def check() -> str | None:
        return check_replicas(trained.model, trained.optimizer)

    clean, reports = check(), []
    for fault in flips:
        if fault.rank == rank:
            flip_at(trained, fault)
        reports.append(check())
        if fault.rank == rank:
            flip_at(trained, fault)
    step(trained)
    return clean, reports, check(), holders(trained)


def run(family_name: str, ranks: int, flips: list[Flip], **parallel: Any) -> tuple[list[str | None], list[dict]]:
    """Report of each flip, checked to be the same on all ranks, and the holders by rank."""
    results = run_ranks(ranks, after_flips, family_name, plan_for("fp32", **parallel), flips)
    for clean, reports, later, _ in results:
        assert clean is None
        assert later is None
        assert reports == results[0][1]
    return results[0][1], [held for _, _, _, held in results]


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
SIGN, EXPONENT, MANTISSA = [31], [30, 26, 23], [22, 11, 0]


def test_four_replicas_identify_the_faulty_rank() -> None:
    bits = [
        Flip(2, UP, kind, place, bit)
        for kind in ("", "exp_avg", "exp_avg_sq")
        for place in ("first", "last", "random")
        for bit in SIGN + EXPONENT + MANTISSA
    ]
    others = [Flip(rank, name) for rank in range(4) for name in ("model.embed_tokens.weight", NORM, "lm_head.weight")]
    reports, _ = run("llama", 4, [*bits, *others], zero=0)
    for fault, text in zip(bits + others, reports, strict=True):
        right = ", ".join(str(rank) for rank in range(4) if rank != fault.rank)
        what = f"{fault.kind} of {fault.name}" if fault.kind else fault.name
        assert text == f"rank {fault.rank}: {what}; ranks {right} agree"


LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {  # family, ranks, plan
    "zero 0, dp 2 x cp 2": ("llama", 4, {"zero": 0, "dp_replicate": 2, "dp_shard": 1, "cp": 2}),
    "zero 3, dp_replicate 2 x dp_shard 2": ("llama", 4, {"zero": 3, "dp_replicate": 2, "dp_shard": 2}),
    "zero 1, dp_replicate 2 x dp_shard 2": ("qwen3", 4, {"zero": 1, "dp_replicate": 2, "dp_shard": 2}),
    "zero 3, dp_replicate 4": ("llama", 4, {"zero": 3, "dp_replicate": 4, "dp_shard": 1}),
    "zero 0, tp 2 x dp 2": ("llama", 4, {"zero": 0, "tp": 2}),
    "zero 3, tp 2 x dp_replicate 2": ("llama", 4, {"zero": 3, "tp": 2, "dp_replicate": 2, "dp_shard": 1}),
    "zero 0, ep 2 x dp 4": ("qwen3_moe", 4, {"zero": 0, "ep": 2}),
    "zero 1, ep 2, dp_replicate 2 x dp_shard 2": (
        "qwen3_moe",
        4,
        {"zero": 1, "ep": 2, "dp_replicate": 2, "dp_shard": 2},
    ),
    "zero 0, tp 2 x dp 2, whole experts": ("qwen3_moe", 4, {"zero": 0, "tp": 2}),
    "zero 0, pp 2 x dp 2": ("llama", 4, {"zero": 0, "pp": 2}),
    "zero 3, tp 2 x dp_shard 2": ("llama", 4, {"zero": 3, "tp": 2, "dp_shard": 2}),
}


def flip_every_parameter(rank: int, ranks: int, family_name: str, plan: Plan, victim: int) -> list[tuple[Any, ...]]:
    """Flip one bit of each parameter of the victim in turn: (name, optimizer state, holders, report)."""
    trained = build(ranks, family_name, plan)
    held = all_gather_json(holders(trained))[victim]
    found = []
    for index, (name, same) in enumerate(held.items()):
        fault = Flip(victim, name, ("", "exp_avg", "exp_avg_sq", "step")[index % 4])
        empty = all_gather_json(rank == victim and held_tensor(trained, name, "").numel() == 0)[victim]
        if empty:
            continue
        if rank == victim:
            flip_at(trained, fault)
        found.append((name, fault.kind, same, check_replicas(trained.model, trained.optimizer)))
        if rank == victim:
            flip_at(trained, fault)
    assert check_replicas(trained.model, trained.optimizer) is None
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_is_compared_between_all_holders(layout: str) -> None:
    family_name, ranks, parallel = LAYOUTS[layout]
    victim = 1
    answers = run_ranks(ranks, flip_every_parameter, family_name, plan_for("fp32", **parallel), victim)
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) >= 10
    for name, kind, same, text in answers[0]:
        what = f"{kind} of {name}" if kind else name
        if len(same) == 1:
            assert text is None, what
        elif len(same) == 2:
            everyone = ", ".join(map(str, same))
            assert text == f"ranks {everyone}: {what}; they differ, and there is no majority"
        else:
            right = ", ".join(str(rank) for rank in same if rank != victim)
            assert text == f"rank {victim}: {what}; ranks {right} agree"
    numbers = {len(same) for _, _, same, _ in answers[0]}
    expected = {"zero 3, tp 2 x dp_shard 2": {1, 2}, "zero 0, tp 2 x dp 2": {2, 4}, "zero 0, ep 2 x dp 4": {2, 4}}
    assert numbers == expected.get(layout, numbers)
    assert max(numbers) > 1


def test_tied_weights_of_two_stages_are_replicas() -> None:
    flips = [Flip(3, "lm_head.weight"), Flip(0, "model.embed_tokens.weight", "exp_avg"), Flip(2, "model.norm.weight")]
    reports, held = run("qwen3", 4, flips, zero=0, pp=2)
    assert "lm_head.weight" in held[3]
    assert "lm_head.weight" not in held[0]
    assert reports == [
        "rank 3: model.embed_tokens.weight; ranks 0, 1, 2 agree",
        "rank 0: exp_avg of model.embed_tokens.weight; ranks 1, 2, 3 agree",
        "ranks 2, 3: model.norm.weight; they differ, and there is no majority",
    ]


def two_faults(rank: int, ranks: int) -> list[str | None]:
    """Reports of faults on several ranks, of a parameter with its states, and of every parameter of a rank."""
    trained = build(ranks, "llama", plan_for("fp32", zero=0))
    reports = []
    for faults in (
        [Flip(2, UP), Flip(2, UP, "exp_avg")],
        [Flip(0, UP), Flip(3, NORM)],
        [Flip(0, UP), Flip(1, UP, "", "first")],
        [Flip(1, name) for name, _ in trained.model.named_parameters()],
    ):
        for _ in range(2):
            for fault in faults:
                if fault.rank == rank:
                    flip_at(trained, fault)
            reports.append(check_replicas(trained.model, trained.optimizer))
    return reports


def test_several_faults_at_once() -> None:
    answers = run_ranks(4, two_faults)
    assert all(answer == answers[0] for answer in answers)
    one, none_1, two, none_2, split, none_3, many, none_4 = answers[0]
    assert (none_1, none_2, none_3, none_4) == (None,) * 4
    assert one == f"rank 2: {UP}, also exp_avg; ranks 0, 1, 3 agree"
    assert sorted(str(two).splitlines()) == [
        f"rank 0: {UP}; ranks 1, 2, 3 agree",
        f"rank 3: {NORM}; ranks 0, 1, 2 agree",
    ]
    assert split == f"ranks 0, 1, 2, 3: {UP}; they differ, and there is no majority"
    assert str(many).startswith("rank 1: model.embed_tokens.weight; ")
    assert str(many).endswith("; and 13 more parameters; ranks 0, 2, 3 agree")


def without_a_state(rank: int, ranks: int) -> str | None:
    trained = build(ranks, "llama", plan_for("fp32", zero=0))
    if rank == 2:
        del trained.optimizer.state[trained.model.get_parameter(UP)]["exp_avg"]
    return check_replicas(trained.model, trained.optimizer)


def test_missing_optimizer_state_is_a_difference() -> None:
    assert run_ranks(4, without_a_state) == [f"rank 2: exp_avg of {UP}; ranks 0, 1, 3 agree"] * 4


def after_evaluation(rank: int, ranks: int) -> tuple[str | None, str | None, int]:
    """Reports while weights are still gathered after an evaluation, without and with a fault, and bytes sent."""
    trained = build(ranks, "llama", plan_for("fp32", zero=2, dp_replicate=2))
    batches = share(packed_batches(96)[0], data_rank(trained.mesh), trained.plan.parallel.data_ranks, 1)
    evaluate(trained.model, batches)
    with Recorder() as recorder:
        clean = check_replicas(trained.model, trained.optimizer)
    if rank == 0:
        flip_at(trained, Flip(0, UP))
    evaluate(trained.model, batches)
    return clean, check_replicas(trained.model, trained.optimizer), recorder.total_bytes


def test_sharded_weights_are_compared_with_little_traffic() -> None:
    for clean, report, sent in run_ranks(4, after_evaluation):
        assert clean is None
        assert report == f"ranks 0, 2: {UP}; they differ, and there is no majority"
        assert 0 < sent < 2000


class AcceleratorMesh(NamedTuple):
    """Mesh of accelerators, as far as `check_replicas` uses it."""

    device_type: str
    coordinates: dict[str, int]

    def get_local_rank(self, axis: str) -> int:
        return self.coordinates[axis]


def as_on_accelerators(rank: int, ranks: int, axis: str, fault: Flip) -> str | None:
    trained = build(ranks, "qwen3", plan_for("fp32", zero=0, **{axis: 2}))
    mesh = AcceleratorMesh("cuda", {name: trained.mesh.get_local_rank(name) for name in ("pp", "tp")})
    if rank == fault.rank:
        flip_at(trained, fault)
    runtime(trained.model).mesh = mesh  # type: ignore[assignment]
    return check_replicas(trained.model, trained.optimizer)


@pytest.mark.parametrize(
    ("axis", "fault", "pair"),
    [("tp", Flip(3, NORM), "1, 3"), ("pp", Flip(3, "lm_head.weight"), "2, 3")],
    ids=["norm", "tied weight"],
)
def test_on_accelerators_replicas_of_separate_groups_are_not_compared(axis: str, fault: Flip, pair: str) -> None:
    name = "model.embed_tokens.weight" if axis == "pp" else fault.name
    expected = f"ranks {pair}: {name}; they differ, and there is no majority"
    assert run_ranks(4, as_on_accelerators, axis, fault) == [expected] * 4


def sharded(rank: int, ranks: int) -> str | None:
    trained = build(ranks, "llama", plan_for("fp32", zero=3))
    if rank == 1:
        flip_at(trained, Flip(1, UP))
    return check_replicas(trained.model, trained.optimizer)


def test_plans_without_replicas_are_refused() -> None:
    assert run_ranks(2, sharded) == [None, None]
    refusal = reason_against_sdc_checks(resolved(Plan(parallel=Parallel(zero=3, tp=2)), 8))
    assert refusal is not None
    assert refusal.what.startswith("there are no replicas to compare")


@pytest.mark.parametrize(
    ("parallel", "refused"),
    [
        (Parallel(zero=3), True),
        (Parallel(zero=1, cp=2), True),
        (Parallel(zero=3, pp=2, tp=2, cp=2), True),
        (Parallel(zero=0, tp=4, pp=2), True),
        (Parallel(zero=0), False),
        (Parallel(zero=0, cp=4, pp=2), False),
        (Parallel(zero=3, dp_replicate=2), False),
    ],
    ids=str,
)
def test_plans_with_and_without_replicas(parallel: Parallel, refused: bool) -> None:
    plan = resolved(Plan(parallel=parallel), 8)
    assert (reason_against_sdc_checks(plan) is not None) is refused


def of_one_rank(rank: int, ranks: int) -> str | None:
    trained = build(ranks, "llama", plan_for("fp32", zero=0))
    assert dist.get_world_size() == 1
    return check_replicas(trained.model, trained.optimizer)


def test_one_rank_has_no_replicas() -> None:
    assert run_ranks(1, of_one_rank) == [None]
