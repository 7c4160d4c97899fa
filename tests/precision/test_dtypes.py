"""Dtypes that a device does not support are refused before anything runs."""

import re
from typing import Any

import pytest

from weft.device.cpu import Cpu
from weft.errors import PlanError
from weft.plan import Precision
from weft.precision.dtypes import check_dtypes, explain_precision


class Older(Cpu):
    """GPU without bfloat16."""

    type = "cuda"

    @property
    def name(self) -> str:
        return "V100"

    def supports(self, feature: Any) -> bool:
        return feature in ("fp16", "fp64")

    @property
    def emulates(self) -> bool:
        return False


class Native(Cpu):
    """CPU with bfloat16 instructions."""

    def supports(self, feature: Any) -> bool:
        return True


class Emulating(Cpu):
    """CPU that emulates bfloat16 and float16."""

    def supports(self, feature: Any) -> bool:
        return feature not in ("bf16", "fp16")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"param_dtype": "bf16"},
            "cuda V100 does not compute in bf16(.|\n)*plan.precision.param_dtype(.|\n)*loss_scale",
        ),
        ({"param_dtype": "fp16", "update": "bf16"}, 'bf16(.|\n)*plan.precision.update to "fp32"'),
        ({"param_dtype": "fp32", "reduce_dtype": "bf16"}, 'bf16(.|\n)*plan.precision.reduce_dtype to "fp32"'),
    ],
)
def test_unsupported_dtypes_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_dtypes(Precision(**settings), Older())


def test_supported_and_emulated_dtypes_are_accepted() -> None:
    check_dtypes(Precision(param_dtype="fp16", loss_scale="dynamic"), Older())
    check_dtypes(Precision().resolve(native_bf16=False), Older())
    check_dtypes(Precision(param_dtype="bf16", backward="fp16", loss_scale="dynamic", update="fp64"), Emulating())


def test_choice_of_the_forward_dtype_is_explained() -> None:
    assert "bf16, which this device computes natively" in explain_precision(Precision(), Native())
    assert "fp32: this device has no native bf16" in explain_precision(Precision(), Emulating())
    assert "fp32, as the plan says" in explain_precision(Precision(param_dtype="fp32"), Native())
    assert "fp32: this device" in explain_precision(Precision(), Older())


def test_cost_of_an_emulated_dtype_is_explained_in_one_line() -> None:
    text = explain_precision(Precision(param_dtype="bf16"), Emulating())
    assert re.fullmatch(
        r"forward in bf16 without native .* run at [\d.e+]+ GFLOP/s per thread, fp32 matmuls at [\d.e+]+", text
    )
    assert "another setting of the plan needs" in explain_precision(Precision(weights="split"), Emulating())
