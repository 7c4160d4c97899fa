"""Values of reward functions: numbers of any library are taken, and what is no number is refused, the same on every rank."""

import functools
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from tests.integrations.scripts_in_pool import variables_of
from tests.lab.pool import RankError, run_ranks
from tests.posttraining.conftest import ROWS
from tests.posttraining.test_run import LAYOUTS, job_of, train_on_rank
from weft.errors import DataError, WeftError
from weft.posttraining.job import TrainerJob
from weft.posttraining.trainers import make_trainer

VALUES = [0.5, None, 1, 2.0]
NUMBERS = [0.5, 0.25, 1.0, 2.0]


def returning(values: Any) -> Callable[..., Any]:
    """Reward function that returns the same values for each batch of four."""
    return lambda completions, **_: values() if callable(values) else values


async def asynchronous(completions: list[Any], **_: Any) -> Any:
    return np.array(NUMBERS)


async def asynchronous_inf(completions: list[Any], **_: Any) -> Any:
    return np.array([0.5, np.inf, 1.0, 2.0])


def scaled(completions: list[Any], scale: float, **_: Any) -> Any:
    return [scale * value for value in NUMBERS]


class Judge:
    """Object whose call is asynchronous."""

    async def __call__(self, completions: list[Any], **_: Any) -> Any:
        return tuple(NUMBERS)


def on_rank_1(completions: list[Any], **_: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("my reward service is down")
    return NUMBERS


TAKEN: dict[str, Any] = {
    "list with None": returning(VALUES),
    "tuple": returning(tuple(VALUES)),
    "generator": returning(lambda: (value for value in VALUES)),
    "array": returning(np.array(NUMBERS, np.float16)),
    "integers": returning(np.array([1, 2, 3, 4])),
    "tensor": returning(torch.tensor(NUMBERS, requires_grad=True)),
    "scalars": returning([np.float64(0.5), torch.tensor(0.25), True, Decimal("2")]),
    "partial": functools.partial(scaled, scale=2.0),
    "asynchronous": asynchronous,
    "asynchronous object": Judge(),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "nan": (returning([0.5, math.nan, 1.0, 2.0]), "returns nan for row 1: 'weft"),
    "nan in a tuple": (returning((0.5, math.nan, 1.0, 2.0)), "returns nan for row 1"),
    "inf in an array": (returning(np.array([np.inf, 0, 0, 0])), "returns inf for row 0"),
    "inf in a tensor": (returning(torch.tensor([0, 0, 0, -torch.inf])), "returns -inf for row 3"),
    "inf of a generator": (returning(lambda: (value for value in (1.0, 2.0, math.inf, 0.0))), "returns inf for row 2"),
    "inf, asynchronous": (asynchronous_inf, "returns inf for row 1"),
    "too large for float32": (returning([1e300, 0.0, 0.0, 0.0]), "returns 1e+300 for row 0"),
    "too few": (returning(NUMBERS[:3]), "returns 3 values for 4 rows"),
    "nothing": (returning(None), "returns None for 4 rows"),
    "a number": (returning(0.5), "returns 0.5 for 4 rows"),
    "a scalar tensor": (returning(torch.tensor(0.5)), "returns 0.5 for 4 rows"),
    "a table": (returning({"reward": 1.0}), "returns {'reward': 1.0} for 4 rows"),
    "one text": (returning("good"), "returns 'good' for 4 rows"),
    "texts": (returning(["good"] * 4), "returns 'good' for row 0"),
    "numbers as text": (returning(["0.5"] * 4), "returns '0.5' for row 0"),
    "a column": (returning(np.ones((4, 1))), "returns [1.0] for row 0"),
    "no row scored": (returning([None] * 4), "scores row 0: all return None"),
    "one row not scored": (returning(VALUES), "scores row 1: all return None"),
    "an error on rank 1": (on_rank_1, "failed: RuntimeError: my reward service is down"),
    "an error of a generator": (
        returning(lambda: (1 / number for number in (1, 0, 1, 1))),
        "failed: ZeroDivisionError",
    ),
}


def _rewards(rank: int, ranks: int, job: TrainerJob) -> dict[str, Any]:
    """Rewards of each function beside one that scores all rows, or its error."""
    AcceleratorState._reset_state(True)
    found: dict[str, Any] = {}
    try:
        with mock.patch.dict("os.environ", variables_of(rank, ranks)):
            trainer = make_trainer(job)
            texts = ["weft warp"] * 4
            rows = [{"prompt": "Say 1 :"}] * 4
            cases = TAKEN | {name: function for name, (function, _) in REFUSED.items()}
            for name, function in cases.items():
                others = [] if "scored" in name else [returning(NUMBERS)]
                trainer.reward_funcs = [function, *others]
                trainer.reward_func_names = ["mine", "other"][: 1 + len(others)]
                trainer.reward_processing_classes = [None] * (1 + len(others))
                try:
                    rewards = trainer._calculate_rewards(rows, ["Say 1 :"] * 4, texts, [[8, 9]] * 4)
                    found[name] = rewards[:, 0].tolist()
                except WeftError as error:
                    found[name] = [type(error).__name__, str(error)]
                assert trainer.reward_funcs == [function, *others]
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return found


def test_rewards_are_numbers_or_refused_on_every_rank(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    job = job_of("grpo", small_model, write_rows(ROWS["grpo"]), tmp_path / "run", LAYOUTS["zero 2"][1])
    # TRL makes its thread for asynchronous functions if it has one at the start.
    trainer = job.trainer.model_copy(update={"rewards": (f"{__name__}:asynchronous",)})
    job = job.model_copy(update={"trainer": trainer})
    first, second = run_ranks(2, _rewards, job, timeout=120)
    expected = {"integers": [1.0, 2.0, 3.0, 4.0], "scalars": [0.5, 0.25, 1.0, 2.0], "partial": [1.0, 0.5, 2.0, 4.0]}
    for name in TAKEN:
        wanted = expected.get(name, VALUES if name in ("list with None", "tuple", "generator") else NUMBERS)
        wanted = [math.nan if value is None else float(value) for value in wanted]
        for found in (first[name], second[name]):
            assert found == pytest.approx(wanted * 2, nan_ok=True), name
    for name, (_, said) in REFUSED.items():
        assert first[name] == second[name], name
        assert first[name][0] == DataError.__name__
        assert said in first[name][1], (name, first[name])


def infinite(completions: list[Any], **_: Any) -> Any:
    return np.full(len(completions), np.inf)


def test_a_job_with_an_infinite_reward_fails_in_its_first_step(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    job = job_of("grpo", small_model, write_rows(ROWS["grpo"]), tmp_path / "run", LAYOUTS["zero 2"][1])
    job = job.model_copy(
        update={
            "trainer": job.trainer.model_copy(update={"rewards": (f"{__name__}:infinite",)}),
            "data": job.data.model_copy(update={"held_out": 0.0}),
        }
    )
    with pytest.raises(RankError, match="infinite returns inf for row 0"):
        run_ranks(2, train_on_rank, job, None, timeout=120)
    assert not (tmp_path / "run" / "export").exists()
