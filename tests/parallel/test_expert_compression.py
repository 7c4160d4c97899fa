"""Rows of experts in 8 bits: outputs and all gradients of the unmodified module with rounded rows, and exact bytes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.backends.test_hierarchical import make_group
from tests.lab.bits import records_of
from tests.lab.experts import balance_experts, split_experts
from tests.lab.families import family
from tests.lab.parity import adamw, compare
from tests.lab.parity import assert_parity as assert_model_parity
from tests.lab.pool import run_ranks
from tests.lab.rounding import round_experts, round_model
from tests.parallel.test_expert import HIDDEN, HOSTS, TABLES, TOLERANCE, Case, build_model, experts_of, gradients
from weft.comm.compression.rows import RowFormat
from weft.comm.recorder import Recorder
from weft.device.cpu import Cpu
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.experts.dispatch import Channel
from weft.parallel.experts.groups import levels_of_group
from weft.plan import Comm, Parallel, Plan, Precision
from weft.precision.dtypes import check_row_format

KINDS: tuple[RowFormat, ...] = ("int8", "fp8")

# A module


def split(experts: Any, group: dist.ProcessGroup, kind: RowFormat, slots: int) -> None:
    for key, parameter in list(experts.named_parameters()):
        setattr(experts, key, nn.Parameter(parameter.detach().chunk(group.size())[group.rank()].clone()))
    channels = tuple(Channel(level, row_format=kind) for level in ((group,) if slots else levels_of_group(group)))
    if slots:
        balance_experts(experts, channels[0], slots)
    else:
        split_experts(experts, channels)


def on_rank(
    rank: int, ranks: int, name: str, case: Case, kind: RowFormat, recompute: bool, slots: int
) -> dict[str, Any]:
    group = make_group(rank, case.hosts) if case.hosts else dist.new_group(backend="gloo")
    experts = experts_of(build_model(name, case.dtype, case.implementation))[-1]
    split(experts, group, kind, slots)
    return gradients(experts, case.tokens()[rank], recompute)


def assert_parity(name: str, case: Case, kind: RowFormat, recompute: bool = False, slots: int = 0) -> None:
    untouched = experts_of(build_model(name, case.dtype, case.implementation))[-1]
    hidden, index, weights, gradient = (torch.cat(parts).detach() for parts in zip(*case.tokens(), strict=True))
    plain = gradients(untouched, (hidden.requires_grad_(), index, weights.requires_grad_(), gradient))
    round_experts(untouched, kind, levels=len(set(case.hosts)))
    expected = gradients(untouched, (hidden, index, weights, gradient))
    found = run_ranks(len(case.sizes), on_rank, name, case, kind, recompute, slots)
    for key, value in expected.items():
        compare(f"{name}: {key}", torch.cat([part[key] for part in found]), value, TOLERANCE[case.dtype])
        difference = (plain[key] - value).norm() / value.norm()
        assert 1e-4 < difference < 0.1, f"{name}: {key} differs by {difference} from that without rounding"


@pytest.mark.must("parity: compressed messages of experts", case="gpt_oss-fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TABLES)
def test_families(name: str, kind: RowFormat) -> None:
    assert_parity(name, Case((5, 9, 0, 3)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_two_hosts_round_rows_once(kind: RowFormat) -> None:
    assert_parity("qwen3_moe", Case((5, 9, 0, 3), hosts=HOSTS), kind)


@pytest.mark.must("composition: compressed messages of experts", case="int8")
@pytest.mark.parametrize("kind", KINDS)
def test_replicas(kind: RowFormat) -> None:
    assert_parity("mixtral", Case((50, 9, 0, 30), allowed=(0, 1)), kind, slots=2)


@pytest.mark.parametrize("slots", [0, 2])
def test_recompute_rounds_to_the_same_values(slots: int) -> None:
    assert_parity("gpt_oss", Case((5, 9)), "fp8", recompute=True, slots=slots)


def test_gloo_and_float32() -> None:
    assert_parity("mixtral", Case((5, 0, 2, 4), hosts=(), dtype=torch.float32, implementation="grouped_mm"), "fp8")


def test_no_tokens_on_any_rank() -> None:
    for found in run_ranks(2, on_rank, "gpt_oss", Case((0, 0)), "fp8", False, 0):
        assert {key: int(value.count_nonzero()) for key, value in found.items()} == dict.fromkeys(found, 0)


# Traffic


def traffic(rank: int, ranks: int, kind: RowFormat) -> list[tuple[int, torch.dtype]]:
    group = dist.group.WORLD
    assert group is not None
    experts = experts_of(build_model("mixtral", torch.float32, "eager"))[0]
    split(experts, group, kind, 0)
    index = torch.arange(16).view(8, 2) % 4
    with Recorder() as recorder:
        experts(torch.ones(8, HIDDEN, requires_grad=True), index, torch.ones(8, 2, requires_grad=True)).sum().backward()
    return [(message.bytes, message.dtype) for message in recorder.messages]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes(kind: RowFormat) -> None:
    """Half of 16 copies leave each of two ranks: in 8 bits and a scale to the experts, in float32 back."""
    there, back = (8 * (HIDDEN + 1), torch.uint8), (8 * 4 * HIDDEN, torch.float32)
    for messages in run_ranks(2, traffic, kind):
        assert messages == [(8 * 2, torch.int64), there, back, there, back]


# Full model

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero 0": (2, 8, {"parallel": {"zero": 0, "ep": 2}}),
    "zero 3, joint": (2, 8, {"parallel": {"zero": 3, "ep": 2}, "comm": {"expert_overlap": "joint"}}),
    "replicate, recompute": (
        2,
        8,
        {"parallel": {"zero": 2, "ep": 2, "expert_balance": "replicate"}, "memory": {"recompute": ["block"]}},
    ),
    "tp": (2, 4, {"parallel": {"zero": 0, "tp": 2, "ep": 2}}),
    "cp": (4, 8, {"parallel": {"zero": 2, "cp": 2, "ep": 4}}),
    "dualpipev": (4, 8, {"parallel": {"pp": 2, "zero": 0, "ep": 2}, "pipeline": {"schedule": "dualpipev"}}),
}
"""Ranks, rows of the global batch, and the plan."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training(layout: str, kind: RowFormat) -> None:
    ranks, rows, tables = LAYOUTS[layout]
    precision = {"param_dtype": "fp64", "update": "fp64", "reduce_dtype": "fp64"}
    comm = {**tables.get("comm", {}), "expert_compression": kind}
    plan = Plan.model_validate({"precision": precision, **tables, "comm": comm})
    config = family("qwen3_moe") | ({"num_hidden_layers": 4} if plan.parallel.pp > 1 else {})

    def make(groups: Any, model: Any) -> Any:
        round_model(model, kind)
        return adamw(groups, model)

    assert_model_parity(Model(config=config), plan, ranks, 1, rows=rows, make=make)


def test_backward_in_fp16() -> None:
    """Gradients that travel as float16 are rounded in the same way: both backwards are near each other."""
    records = []
    for precision in (
        Precision(param_dtype="bf16"),
        Precision(param_dtype="bf16", backward="fp16", loss_scale=2.0**12),
    ):
        plan = Plan(parallel=Parallel(ep=2, zero=2), precision=precision, comm=Comm(expert_compression="fp8"))
        records.append(records_of(family("qwen3_moe"), plan, 2, 1)[0].gradients)
    bf16, fp16 = (torch.cat([gradient.flatten() for gradient in record.values()]) for record in records)
    assert 1e-4 < (bf16 - fp16).norm() / bf16.norm() < 0.02


class Old(Cpu):
    has_float8_dtype = False


@pytest.mark.must("refusal: compressed messages of experts")
def test_a_device_that_cannot_convert_to_fp8_is_refused() -> None:
    check_row_format(Comm(expert_compression="int8"), Old())
    check_row_format(Comm(expert_compression="fp8"), Cpu())
    with pytest.raises(PlanError, match="expert_compression = 'fp8' on cpu"):
        check_row_format(Comm(expert_compression="fp8"), Old())
