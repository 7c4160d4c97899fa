"""Scenarios: best plan, training time and cost per model."""

import sys

import pytest

from weft.cli import main
from weft.errors import PlanError
from weft.planner.costmodel.hardware import ClusterSpec, find_device
from weft.planner.costmodel.shape import Shape
from weft.planner.search.scenarios import SCENARIOS, batch_of, find_scenario, plan_scenario, recommended

PUBLISHED = {
    "SmolLM2 135M": 0.135e9,
    "Llama 3.2 1B": 1.24e9,
    "Llama 3.1 8B": 8.03e9,
    "Llama 3.1 70B": 70.6e9,
    "ViT-L/14": 0.304e9,
    "ViT-H/14": 0.632e9,
    "ViT-22B": 21.7e9,
    "72B (Qwen2.5-VL size)": 72.7e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_sizes_match_published_sizes(name: str) -> None:
    shape: Shape = next(scenario.models[name] for scenario in SCENARIOS.values() if name in scenario.models)
    assert shape.parameters == pytest.approx(PUBLISHED[name], rel=0.03)


def test_recommended_is_the_largest_model_within_the_days() -> None:
    cluster = ClusterSpec(find_device("H100"), 1, 8)
    found = plan_scenario(find_scenario("vision"), cluster)
    assert all(
        plan.choice and plan.choice.layout.tp * plan.choice.layout.pp * plan.choice.layout.cp == 1 for plan in found
    )
    days = [plan.days for plan in found]
    assert days == sorted(days)
    best = recommended(found, days[2] * 1.01)
    assert best is found[2]
    assert best.dollars == pytest.approx(best.days * 24 * 8 * cluster.device.dollars_per_hour)
    assert recommended(found, days[0] / 2) is None


def test_batch_is_a_multiple_of_the_devices() -> None:
    for devices in (1, 8, 24, 1024, 8192):
        assert batch_of(4096, devices) % devices == 0
    assert batch_of(4096, 8) * 4096 == 2**21


@pytest.mark.must("command: advise")
def test_advise_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["weft", "advise", "vision", "--device", "L40S", "--nnodes", "1", "--days", "0.05"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "Recommended: ViT-B/14" in capsys.readouterr().out
    with pytest.raises(PlanError, match="there is no scenario 'speech'"):
        find_scenario("speech")
