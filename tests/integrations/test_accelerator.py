"""`accelerate.Accelerator` under a plan: an unmodified loop has the losses, norms, metrics and weights of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integrations.scripts_in_pool import plain, under
from tests.integrations.test_trainer import BATCH, LAYOUTS, assert_same_weights, plan_of
from tests.lab.families import family
from tests.lab.pool import RankError, run_ranks
from weft.errors import JobError, ModelError, WeftError
from weft.integrations.accelerator import WeftAccelerator
from weft.plan import Plan


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    plain("accelerate_loop.py", folder, BATCH)
    return folder


def assert_same_results(found: Path, expected: Path, first: int = 0) -> None:
    now, then = (json.loads((folder / "result.json").read_text()) for folder in (found, expected))
    assert now["losses"] == pytest.approx(then["losses"][2 * first :], rel=1e-5)
    assert now["norms"] == pytest.approx(then["norms"][first:], rel=1e-4)
    assert now["accuracy"] == pytest.approx(then["accuracy"], rel=1e-6)
    assert (now["rows"], now["rates"]) == (then["rows"], then["rates"])
    assert_same_weights(found / "final", expected / "final")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unmodified_loop_equals_one_process(layout: str, reference: Path, tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "accelerate_loop.py", tmp_path, batch)
    assert_same_results(tmp_path, reference)


@pytest.mark.parametrize(("before", "after"), [("zero 3", "tp2"), ("tp2", "zero 0")])
def test_a_loop_resumes_under_another_plan(before: str, after: str, reference: Path, tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(before)
    (tmp_path / "again").mkdir()
    under(plan, ranks, "accelerate_loop.py", tmp_path, batch)
    ranks, plan, batch = plan_of(after)
    under(plan, ranks, "accelerate_loop.py", tmp_path / "again", batch, tmp_path / "state")
    assert_same_results(tmp_path / "again", reference, first=2)


def test_a_state_of_a_plain_accelerator_is_refused(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="a checkpoint without the training state of Weft"):
        under(Plan(), 2, "accelerate_loop.py", tmp_path, 2, reference / "state")


def refused(rank: int, ranks: int, what: str) -> str:
    try:
        if what == "other runtime":
            WeftAccelerator(cpu=True, fsdp_plugin=object())
        accelerator = WeftAccelerator(cpu=True, plan=Plan())
        model = torch.nn.Linear(2, 2)
        if what == "module":
            accelerator.prepare(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(optimizer)
    except WeftError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return "nothing"


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("other runtime", JobError, "fsdp_plugin in the Accelerator"),
        ("module", ModelError, "accelerator.prepare of a Linear"),
        ("optimizer", ModelError, "the optimizer has parameters that no prepared model has"),
    ],
)
def test_what_cannot_be_prepared_is_refused(what: str, kind: type, said: str) -> None:
    (found,) = run_ranks(1, refused, what)
    assert found.startswith(kind.__name__)
    assert said in found


def generated(rank: int, ranks: int, plan: Plan | None, seed: int = 0) -> tuple[str, list[int]]:
    """Class name and tokens of a model that generates five more tokens on rank 1, or with seed 1, than on rank 0."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama")), dtype=torch.float32)
    longer = max(rank, seed)
    try:
        if plan is not None:
            model = WeftAccelerator(cpu=True, plan=plan).prepare_model(model, evaluation_mode=True)
        rows = torch.arange(5, 9)[None] + longer
        tokens = model.generate(rows, max_new_tokens=3 + 5 * longer, do_sample=False, pad_token_id=0)
        return type(model).__name__, tokens[0].tolist()
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@pytest.mark.parametrize("layout", ["zero 0", "zero 2", "zero 3"])
def test_generate_of_unequal_lengths_under_zero(layout: str) -> None:
    alone = [run_ranks(1, generated, None, seed)[0] for seed in range(2)]
    assert run_ranks(2, generated, plan_of(layout)[1]) == alone
    assert alone[0][0] == "LlamaForCausalLM"
