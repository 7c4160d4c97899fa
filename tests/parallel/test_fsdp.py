"""Data parallelism at every ZeRO stage equals the untouched model, for ten families."""

import pytest

from tests.lab.families import FAMILIES, family
from tests.lab.parity import assert_parity, plan_for
from weft.job import Model

# Gemma's norms and the routers of DeepSeek and GLM compute in float32 whatever the format of the model, and the gradients of
# their weights are sums over tokens in float32: in float64 rows are documents and are compared one by one, so that only Weft's
# own sums differ.
ROWS_AT_ONCE = {("gemma3_text", "fp64"): 1, ("deepseek_v3", "fp64"): 1, ("glm4_moe", "fp64"): 1}


@pytest.mark.thin(60)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks(name: str, dtype: str, zero: int) -> None:
    rows = ROWS_AT_ONCE.get((name, dtype))
    assert_parity(
        Model(config=family(name)), plan_for(dtype, zero=zero), world_size=2, micro_batch=1, rows_at_once=rows
    )


@pytest.mark.thin(60)
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
