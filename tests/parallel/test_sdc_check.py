"""Copies that must be equal: any flipped bit is found, in whichever layout, and the rank that has it is named."""

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
from tests.lab.pool import run_ranks
from weft.checkpoint.huggingface import build_on_meta, materialize
from weft.checkpoint.model_config import read_config
from weft.comm.collectives import Recorder
from weft.comm.objects import all_gather_json
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.parallel.sdc_check import Digester, check_replicas, check_sdc_plan
from weft.parallel.weights import to_local
from weft.plan import Parallel, Plan
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh, data_rank
from weft.train.optimizer import build_optimizer
from weft.train.step import evaluate, train_step

CPU = torch.device("cpu")

# The digest

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
    """A tensor whose bits are all random: NaN, infinities and subnormal numbers are among them."""
    size = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit of a tensor, counted over all its bytes."""
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_single_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    """Each bit of small tensors of many sizes, alone: in rows of 512 bytes, so that there are several."""
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
    """With the rows that models are read in; first and last bit, borders of rows, and random ones."""
    digest, generator = Digester(CPU), torch.Generator().manual_seed(2)
    tensor = torch.randn(1_200_007, generator=generator)
    before, bits = int(digest(tensor)), 8 * tensor.nbytes
    row = 8 * digest.words.nbytes
    assert bits > 9 * row
    places = [0, 31, bits - 1, bits - 32, row - 1, row, 2 * row - 1, 9 * row]
    for bit in places + torch.randint(bits, (200,), generator=generator).tolist():
        flip(tensor, bit)
        assert int(digest(tensor)) != before
        flip(tensor, bit)


def other_changes(tensor: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Two elements swapped, two signs flipped, neighbours, elements of one column, rows and halves: all distinct."""
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
    if kind == "powers of two":  # what differs between two elements is a single bit, or few
        tensor = torch.exp2(torch.randint(-8, 8, (1024,), generator=generator)).to(dtype)
    elif kind == "x and -x":
        tensor = torch.randint(0, 2, (1024,), generator=generator).to(dtype) * 2 - 1
    before, seen = int(digest(tensor)), 0
    for changed in other_changes(tensor, generator):
        if not torch.equal(changed, tensor):
            seen += 1
            assert int(digest(changed)) != before
    assert seen > 2000


def test_the_digest_is_of_the_elements_in_their_order_wherever_they_are() -> None:
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
    """One bit that one rank gets wrong."""

    rank: int
    name: str
    kind: str = ""
    """A state of the optimizer; "" is the parameter."""
    place: str = "random"
    bit: int = 20


class Rig(NamedTuple):
    """One rank's share of a model after a step."""

    model: Any
    optimizer: torch.optim.Optimizer
    mesh: Any
    plan: Plan


def build(ranks: int, name: str, plan: Plan) -> Rig:
    source = Model(config={**family(name), "vocab_size": 97})  # a prime: shards are of unequal sizes, one may be empty
    plan = plan.resolve(ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), DTYPES[plan.precision.update]), plan, mesh)
    materialize(model, source, CPU)
    model.train()
    optimizer = build_optimizer(model, SETTINGS)
    rig = Rig(model, optimizer, mesh, plan)
    step(rig)
    return rig


def step(rig: Rig) -> None:
    batches = share(packed_batches(96)[0], data_rank(rig.mesh), rig.plan.parallel.data_ranks, 1)
    result = train_step(rig.model, rig.optimizer, batches, rig.plan, rig.mesh, LossScale(), 0.5)
    assert result.problem is None


def held_tensor(rig: Rig, name: str, kind: str) -> Tensor:
    parameter = dict(rig.model.named_parameters())[name]
    return to_local((rig.optimizer.state[parameter][kind] if kind else parameter).detach())


def flip_at(rig: Rig, wrong: Flip) -> None:
    tensor = held_tensor(rig, wrong.name, wrong.kind)
    places = {"first": 0, "last": tensor.numel() - 1, "random": 7919 % tensor.numel()}
    flip(tensor, 8 * tensor.element_size() * places[wrong.place] + wrong.bit)


def holders(rig: Rig) -> dict[str, list[int]]:
    """By parameter of this rank: the ranks that hold the same part of it, from where the part lies in the whole."""
    mine = {}
    for name, parameter in rig.model.named_parameters():
        shape, offset = tuple(parameter.shape), (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        mine[name] = [list(shape), list(offset)]
    everyone = all_gather_json(mine)
    return {name: [r for r, table in enumerate(everyone) if table.get(name) == part] for name, part in mine.items()}


def after_flips(
    rank: int, ranks: int, family_name: str, plan: Plan, flips: list[Flip]
) -> tuple[str | None, list[str | None], str | None, dict[str, list[int]]]:
    """What is said before any flip, of each one (which is undone), after all and another step; and who holds what."""
    rig = build(ranks, family_name, plan)

    def look() -> str | None:
        return check_replicas(rig.model, rig.optimizer, rig.mesh)

    clean, said = look(), []
    for wrong in flips:
        if wrong.rank == rank:
            flip_at(rig, wrong)
        said.append(look())
        if wrong.rank == rank:
            flip_at(rig, wrong)
    step(rig)
    return clean, said, look(), holders(rig)


def run(family_name: str, ranks: int, flips: list[Flip], **parallel: Any) -> tuple[list[str | None], list[dict]]:
    """What all ranks agree is said of each flip, and who holds what, by rank."""
    answers = run_ranks(ranks, after_flips, family_name, plan_for("fp32", **parallel), flips)
    for clean, said, later, _ in answers:
        assert clean is None
        assert later is None
        assert said == answers[0][1]
    return answers[0][1], [held for _, _, _, held in answers]


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
SIGN, EXPONENT, MANTISSA = [31], [30, 26, 23], [22, 11, 0]


def test_four_replicas_name_the_odd_one_out() -> None:
    bits = [
        Flip(2, UP, kind, place, bit)
        for kind in ("", "exp_avg", "exp_avg_sq")
        for place in ("first", "last", "random")
        for bit in SIGN + EXPONENT + MANTISSA
    ]
    others = [Flip(rank, name) for rank in range(4) for name in ("model.embed_tokens.weight", NORM, "lm_head.weight")]
    said, _ = run("llama", 4, [*bits, *others], zero=0)
    for wrong, text in zip(bits + others, said, strict=True):
        right = ", ".join(str(rank) for rank in range(4) if rank != wrong.rank)
        what = f"{wrong.kind} of {wrong.name}" if wrong.kind else wrong.name
        assert text == f"rank {wrong.rank}: {what}; ranks {right} agree"


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
    """The victim gets a bit of each of its parameters wrong, one after the other: (name, holders, what is said)."""
    rig = build(ranks, family_name, plan)
    held = all_gather_json(holders(rig))[victim]
    found = []
    for number, (name, same) in enumerate(held.items()):
        wrong = Flip(victim, name, ("", "exp_avg", "exp_avg_sq", "step")[number % 4])
        empty = all_gather_json(rank == victim and held_tensor(rig, name, "").numel() == 0)[victim]
        if empty:
            continue
        if rank == victim:
            flip_at(rig, wrong)
        found.append((name, wrong.kind, same, check_replicas(rig.model, rig.optimizer, rig.mesh)))
        if rank == victim:
            flip_at(rig, wrong)
    assert check_replicas(rig.model, rig.optimizer, rig.mesh) is None
    return found


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_is_compared_between_all_who_hold_it(layout: str) -> None:
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
            assert text == f"ranks {everyone}: {what}; they differ, and no majority says which is right"
        else:
            right = ", ".join(str(rank) for rank in same if rank != victim)
            assert text == f"rank {victim}: {what}; ranks {right} agree"
    numbers = {len(same) for _, _, same, _ in answers[0]}
    expected = {"zero 3, tp 2 x dp_shard 2": {1, 2}, "zero 0, tp 2 x dp 2": {2, 4}, "zero 0, ep 2 x dp 4": {2, 4}}
    assert numbers == expected.get(layout, numbers)
    assert max(numbers) > 1


def test_tied_weights_of_two_stages_are_copies() -> None:
    flips = [Flip(3, "lm_head.weight"), Flip(0, "model.embed_tokens.weight", "exp_avg"), Flip(2, "model.norm.weight")]
    said, held = run("qwen3", 4, flips, zero=0, pp=2)
    assert "lm_head.weight" in held[3]
    assert "lm_head.weight" not in held[0]
    assert said == [
        "rank 3: model.embed_tokens.weight; ranks 0, 1, 2 agree",
        "rank 0: exp_avg of model.embed_tokens.weight; ranks 1, 2, 3 agree",
        "ranks 2, 3: model.norm.weight; they differ, and no majority says which is right",
    ]


def two_faults(rank: int, ranks: int) -> list[str | None]:
    """Faults of several ranks, of a parameter with its states, and of every parameter of a rank."""
    rig = build(ranks, "llama", plan_for("fp32", zero=0))
    said = []
    for wrongs in (
        [Flip(2, UP), Flip(2, UP, "exp_avg")],
        [Flip(0, UP), Flip(3, NORM)],
        [Flip(0, UP), Flip(1, UP, "", "first")],
        [Flip(1, name) for name, _ in rig.model.named_parameters()],
    ):
        for _ in range(2):
            for wrong in wrongs:
                if wrong.rank == rank:
                    flip_at(rig, wrong)
            said.append(check_replicas(rig.model, rig.optimizer, rig.mesh))
    return said


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
    assert split == f"ranks 0, 1, 2, 3: {UP}; they differ, and no majority says which is right"
    assert str(many).startswith("rank 1: model.embed_tokens.weight; ")
    assert str(many).endswith("; and 13 more parameters; ranks 0, 2, 3 agree")


def without_a_state(rank: int, ranks: int) -> str | None:
    rig = build(ranks, "llama", plan_for("fp32", zero=0))
    if rank == 2:
        del rig.optimizer.state[rig.model.get_parameter(UP)]["exp_avg"]
    return check_replicas(rig.model, rig.optimizer, rig.mesh)


def test_a_state_that_one_rank_lacks_is_a_difference() -> None:
    assert run_ranks(4, without_a_state) == [f"rank 2: exp_avg of {UP}; ranks 0, 1, 3 agree"] * 4


def after_evaluation(rank: int, ranks: int) -> tuple[str | None, str | None, int]:
    """A look while weights are still gathered from an evaluation, with and without a fault; and bytes that were sent."""
    rig = build(ranks, "llama", plan_for("fp32", zero=2, dp_replicate=2))
    batches = share(packed_batches(96)[0], data_rank(rig.mesh), rig.plan.parallel.data_ranks, 1)
    evaluate(rig.model, batches, rig.mesh)
    with Recorder() as recorder:
        clean = check_replicas(rig.model, rig.optimizer, rig.mesh)
    if rank == 0:
        flip_at(rig, Flip(0, UP))
    evaluate(rig.model, batches, rig.mesh)
    return clean, check_replicas(rig.model, rig.optimizer, rig.mesh), recorder.total_bytes


def test_weights_at_rest_are_compared_and_little_is_sent() -> None:
    for clean, said, sent in run_ranks(4, after_evaluation):
        assert clean is None
        assert said == f"ranks 0, 2: {UP}; they differ, and no majority says which is right"
        assert 0 < sent < 2000


class AcceleratorMesh(NamedTuple):
    """What `check_replicas` asks of a mesh, of ranks that would not be on CPU."""

    device_type: str
    places: dict[str, int]

    def get_local_rank(self, axis: str) -> int:
        return self.places[axis]


def as_on_accelerators(rank: int, ranks: int, axis: str, wrong: Flip) -> str | None:
    rig = build(ranks, "qwen3", plan_for("fp32", zero=0, **{axis: 2}))
    mesh = AcceleratorMesh("cuda", {name: rig.mesh.get_local_rank(name) for name in ("pp", "tp")})
    if rank == wrong.rank:
        flip_at(rig, wrong)
    return check_replicas(rig.model, rig.optimizer, mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axis", "wrong", "pair"),
    [("tp", Flip(3, NORM), "1, 3"), ("pp", Flip(3, "lm_head.weight"), "2, 3")],
    ids=["norm", "tied weight"],
)
def test_on_accelerators_copies_made_equal_by_separate_groups_are_not_compared(
    axis: str, wrong: Flip, pair: str
) -> None:
    name = "model.embed_tokens.weight" if axis == "pp" else wrong.name
    expected = f"ranks {pair}: {name}; they differ, and no majority says which is right"
    assert run_ranks(4, as_on_accelerators, axis, wrong) == [expected] * 4


def sharded(rank: int, ranks: int) -> str | None:
    rig = build(ranks, "llama", plan_for("fp32", zero=3))
    if rank == 1:
        flip_at(rig, Flip(1, UP))
    return check_replicas(rig.model, rig.optimizer, rig.mesh)


def test_without_copies_nothing_can_be_said_and_a_plan_is_refused() -> None:
    assert run_ranks(2, sharded) == [None, None]
    with pytest.raises(PlanError, match="there are no replicas to compare"):
        check_sdc_plan(Plan(parallel=Parallel(zero=3, tp=2)).resolve(8))


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
def test_which_plans_have_copies(parallel: Parallel, refused: bool) -> None:
    plan = Plan(parallel=parallel).resolve(8)
    if refused:
        with pytest.raises(PlanError):
            check_sdc_plan(plan)
    else:
        check_sdc_plan(plan)


def of_one_rank(rank: int, ranks: int) -> str | None:
    rig = build(ranks, "llama", plan_for("fp32", zero=0))
    assert dist.get_world_size() == 1
    return check_replicas(rig.model, rig.optimizer, rig.mesh)


def test_one_rank_has_nobody_to_differ_from() -> None:
    assert run_ranks(1, of_one_rank) == [None]
