"""Activations that wait elsewhere change no bit of a step, and are not on the device in between."""


import pytest

from tests.lab.families import FAMILIES, family
from tests.lab.parity import plan_for
from tests.memory.test_recompute import assert_same_bits
from weft.plan import Memory, Pipeline, Precision

MEMORIES = (
    Memory(offload=("block",)),
    Memory(offload=("attention",), offload_to="disk", offload_ahead=3),
    Memory(offload=("attention",), recompute=("mlp",)),
    Memory(offload=("attention", "mlp"), recompute=("activation", "norm"), offload_bytes=20_000),
    Memory(offload=("block",), recompute=("block",)),
)
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
    "tp2 sp": (2, {"tp": 2, "zero": 1}),
    "cp2 ring": (2, {"cp": 2, "zero": 2}),
    "pp2": (2, {"pp": 2, "zero": 1}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_bit_changes(name: str) -> None:
    assert_same_bits(family(name), plan_for("fp32", zero=0), 1, *MEMORIES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_bit_changes_in_any_layout(name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    assert_same_bits(family(name), plan_for("fp32", **parallel), ranks, *MEMORIES)


@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 3}, {"zero": 0, "tp": 2}])
def test_two_formats_and_split_weights(parallel: dict[str, int]) -> None:
    precision = Precision(weights="split")
    plan = plan_for("fp32", **parallel).model_copy(update={"precision": precision})
    assert_same_bits(family("llama"), plan, 2, *MEMORIES, micro_batch=1)


def test_experts() -> None:
    assert_same_bits(family("qwen3_moe"), plan_for("fp32", ep=2, zero=3), 2, Memory(offload=("mlp",)), MEMORIES[3])


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_schedules(schedule: str) -> None:
    pipeline = Pipeline(schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    plan = plan_for("fp32", pipeline, pp=2, zero=1)
    config = {**family("llama"), "num_hidden_layers": 4}
    assert_same_bits(config, plan, 2, *MEMORIES[1:4], micro_batch=1)
