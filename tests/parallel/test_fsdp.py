"""Parity of data parallelism with the unmodified model at every ZeRO stage, for ten families."""

import pytest

from tests.lab.families import FAMILIES, family
from tests.lab.parity import assert_parity, plan_for
from weft.job import Model

# The norms of Gemma and the routers of DeepSeek and GLM always compute in float32, and the gradients of their weights are
# float32 sums over tokens. In float64 the reference therefore runs row by row, so that only the sums of Weft differ.
ROWS_AT_ONCE = {("gemma3_text", "fp64"): 1, ("deepseek_v3", "fp64"): 1, ("glm4_moe", "fp64"): 1}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks(name: str, dtype: str, zero: int) -> None:
    rows = ROWS_AT_ONCE.get((name, dtype))
    assert_parity(
        Model(config=family(name)), plan_for(dtype, zero=zero), world_size=2, micro_batch=1, rows_at_once=rows
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_by_two(name: str, dtype: str, zero: int) -> None:
    rows = ROWS_AT_ONCE.get((name, dtype))
    plan = plan_for(dtype, zero=zero, dp_replicate=2)
    assert_parity(Model(config=family(name)), plan, world_size=4, micro_batch=1, rows_at_once=rows)


@pytest.mark.parametrize(
    "degrees",
    [
        {"zero": 1},
        {"zero": 3},
        {"zero": 2, "dp_replicate": 2},
        {"zero": 3, "tp": 2},
        {"zero": 3, "cp": 2},
        {"zero": 3, "pp": 2},
    ],
    ids=str,
)
def test_ranks_that_do_not_divide_experts(degrees: dict[str, int]) -> None:
    source = Model(config={**family("mixtral"), "num_local_experts": 3})
    assert_parity(source, plan_for("fp64", **degrees), world_size=4, micro_batch=1)
