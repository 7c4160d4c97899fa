"""The spike watch on curves as training makes them: no false alarm, every injected spike at once, the same after a resume."""

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from weft.precision.spikes import SpikeWatch, expect

Step = tuple[float, float]


def curve(
    seed: int, steps: int, *, loss_noise: float = 0.04, norm_noise: float = 0.08, memory: float = 0.0
) -> list[Step]:
    """Loss and gradient norm of a run: both fall as power laws, below noise that may remember the step before.

    The noise of the norm is skewed, as a norm's is: the logarithm of a gamma variable, turned to have its long tail above.
    """
    random = np.random.default_rng(seed)
    t = np.arange(steps)
    loss = 1.9 + 9.0 * (1 + t / 60) ** -0.55
    norm = 0.25 + 4.0 * (1 + t / 40) ** -0.7
    white = random.standard_normal(steps) * loss_noise
    shape = 16.0
    skewed = (random.gamma(shape, size=steps) - shape) / math.sqrt(shape) * norm_noise
    for noise in (white, skewed):
        for i in range(1, steps):
            noise[i] = memory * noise[i - 1] + math.sqrt(1 - memory**2) * noise[i]
    return [(float(x), float(y)) for x, y in zip(loss + white, norm * np.exp(skewed), strict=True)]


@pytest.mark.parametrize(
    ("steps", "runs", "settings"),
    [
        (20_000, 2, {}),
        (20_000, 1, {"memory": 0.5}),
        (10_000, 1, {"loss_noise": 0.1}),
        (10_000, 1, {"norm_noise": 0.2}),
        (1_000, 20, {}),  # mostly the steep part
    ],
    ids=["long", "with memory", "noisy loss", "noisy norm", "many starts"],
)
def test_100_000_steps_without_a_false_alarm(steps: int, runs: int, settings: dict[str, float]) -> None:
    """Over all cases 100,000 steps are seen, and none is called a spike."""
    for seed in range(runs):
        watch = SpikeWatch()
        alarms = [(i, why) for i, step in enumerate(curve(seed, steps, **settings)) if (why := watch.observe(*step))]
        assert alarms == []


@pytest.mark.parametrize("count", [64, 65, 128])
def test_a_line_is_followed_to_its_next_value(count: int) -> None:
    end, deviation = expect([5 - 0.25 * i for i in range(count)])
    assert end == pytest.approx(5 - 0.25 * count)
    assert deviation == pytest.approx(0, abs=1e-12)


def seen_steps(spikes: dict[int, Step]) -> Iterator[tuple[int, str | None]]:
    """What the watch says of a run in which some steps have a (rise of the loss, factor on the norm)."""
    watch = SpikeWatch()
    for i, (loss, norm) in enumerate(curve(3, 3000)):
        rise, factor = spikes.get(i, (0.0, 1.0))
        yield i, watch.observe(loss + rise, norm * factor)


@pytest.mark.parametrize(("spike", "words"), [((0.5, 1.0), "loss"), ((0.0, 3.0), "gradient norm"), ((0.5, 3.0), "; ")])
def test_every_injected_spike_is_seen_at_once(spike: Step, words: str) -> None:
    places = [*range(400, 3000, 97), 2000, 2001, 2002]  # some in a row
    found = {i: why for i, why in seen_steps(dict.fromkeys(places, spike)) if why}
    assert sorted(found) == sorted(places)
    assert all(words in why for why in found.values())
    if words != "; ":
        assert not any("; " in why for why in found.values())


def test_a_reason_names_the_value_and_the_level() -> None:
    watch = SpikeWatch()
    for i in range(100):
        assert watch.observe(2 + 0.001 * (i % 5), 1 + 0.01 * (i % 5)) is None
    assert watch.observe(3.0, 4.0) == (
        "loss 3 stands out of the last ones, which lead to 2.002; "
        "gradient norm 4 stands out of the last ones, which lead to 1.02"
    )


@pytest.mark.parametrize("step", [(math.nan, 1.0), (2.0, math.inf), (2.0, math.nan), (-math.inf, 1.0)])
def test_what_is_not_finite_is_a_spike_from_the_first_step_on_and_leaves_no_trace(step: Step) -> None:
    watch = SpikeWatch()
    assert "not both finite" in str(watch.observe(*step))
    for values in curve(0, 200):
        watch.observe(*values)
    before = watch.state()
    for _ in range(50):
        assert "not both finite" in str(watch.observe(*step))
    assert watch.state() == before


def test_nothing_is_judged_in_warm_up() -> None:
    watch = SpikeWatch(warm_up=64)
    said = [watch.observe(2.0, 1.0 if i % 63 else 50.0) for i in range(64)]
    assert said == [None] * 64
    assert watch.observe(2.0, 50.0) is not None


def test_a_value_that_stays_is_accepted_as_the_new_level() -> None:
    watch = SpikeWatch(patience=16, warm_up=64)
    for step in curve(0, 500):
        watch.observe(*step)
    noise = [loss - 2 for loss, _ in curve(1, 20_000)[-500:]]
    said = [watch.observe(6 + x, 0.3) for x in noise]
    assert all(why and "loss" in why for why in said[:15])
    assert said[15:] == [None] * 485
    assert watch.observe(6.7, 0.3) is not None  # measured from the new level


def test_a_rise_that_comes_and_goes_is_never_accepted() -> None:
    watch = SpikeWatch(patience=4)
    for step in curve(0, 3000):
        watch.observe(*step)
    level = watch.state()["loss"][-1]
    said = [watch.observe(level + (0.0 if i % 4 == 0 else 1.0), 0.45) is not None for i in range(100)]
    assert said == [i % 4 != 0 for i in range(100)]


def test_a_falling_or_constant_value_is_no_spike() -> None:
    watch = SpikeWatch()
    said = [watch.observe(2.0, 1.0) for _ in range(200)] + [watch.observe(1.0, 0.1) for _ in range(200)]
    assert said == [None] * 400
    assert watch.observe(1.03, 0.1) is not None
    assert watch.observe(1.01, 0.14) is None  # below the least rises
    assert watch.observe(1.0, 0.16) is not None
    assert watch.observe(1.0, 0.0) is None


@pytest.mark.parametrize("cut", [10, 64, 700, 1503])
def test_a_watch_goes_on_from_its_state_as_if_it_had_not_stopped(cut: int) -> None:
    steps = curve(5, 2000)
    for i in (600, 1500, 1501, 1502, 1503, 1504, 1900):
        steps[i] = (steps[i][0] + 0.5, steps[i][1] * 3)
    steps[1700:1800] = [(loss + 1, norm) for loss, norm in steps[1700:1800]]  # a level that stays for a while
    one = SpikeWatch()
    expected = [one.observe(*step) for step in steps]
    first = SpikeWatch()
    said = [first.observe(*step) for step in steps[:cut]]
    text = json.dumps(first.state())
    second = SpikeWatch.from_state(json.loads(text))
    assert said + [second.observe(*step) for step in steps[cut:]] == expected
    assert second.state() == one.state()
    assert len(text) < 10_000
    assert sum(why is not None for why in expected) == 7 + 15


def test_settings_may_change_at_a_resume() -> None:
    watch = SpikeWatch(window=128)
    for step in curve(0, 300):
        watch.observe(*step)
    shorter = SpikeWatch.from_state(watch.state(), window=80)
    for step in curve(0, 310)[300:]:
        assert shorter.observe(*step) is None
    assert len(shorter.state()["loss"]) == 80
