"""Formats that a device does not have are refused before anything runs."""

from typing import Any

import pytest

from weft.cluster.device import Cpu
from weft.errors import PlanError
from weft.plan import Precision
from weft.precision.dtypes import check_formats


class Older(Cpu):
    """A card from before bfloat16."""

    type = "cuda"

    @property
    def name(self) -> str:
        return "V100"

    def supports(self, feature: Any) -> bool:
        return feature in ("fp16", "fp64")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "cuda V100 does not compute in bf16(.|\n)*plan.precision.forward(.|\n)*loss_scale"),
        ({"forward": "fp16", "update": "bf16"}, 'bf16(.|\n)*plan.precision.update to "fp32"'),
        ({"forward": "fp32", "reduce": "bf16"}, 'bf16(.|\n)*plan.precision.reduce to "fp32"'),
    ],
)
def test_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_formats(Precision(**settings), Older())


def test_what_the_device_has() -> None:
    check_formats(Precision(forward="fp16", loss_scale="dynamic"), Older())
    check_formats(Precision(), Cpu())
    check_formats(Precision(backward="fp16", loss_scale="dynamic", update="fp64"), Cpu())
