"""`accelerate.Accelerator` under a plan: an unmodified loop has the losses, norms, metrics and weights of one process."""

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integrations.scripts_in_pool import plain, script_on_rank, under, variables_of
from tests.integrations.test_command import weft_run
from tests.integrations.test_trainer import BATCH, LAYOUTS, assert_same_weights, plan_of
from tests.lab.families import family
from tests.lab.pool import RankError, run_ranks
from weft.checkpoint import snapshot
from weft.checkpoint.folders import list_checkpoints
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


@pytest.mark.must("parity: script of accelerate", case="tp2 without sp")
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


SAVED_AT_THE_END = """
import sys, torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
accelerator = Accelerator(cpu=True)
model = LlamaForCausalLM(LlamaConfig(vocab_size=8000, hidden_size=256, intermediate_size=512, num_hidden_layers=2))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
rows = torch.arange(8)[None]
accelerator.backward(model(input_ids=rows, labels=rows).loss)
optimizer.step()
accelerator.save_state(sys.argv[1])
sys.exit()
"""


def test_a_state_that_is_saved_last_is_complete(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[parallel]\nzero = 2\n")
    (tmp_path / "script.py").write_text(SAVED_AT_THE_END)
    done = weft_run(tmp_path, "--plan", "plan.toml", "--nproc-per-node", "2", "script.py", "state")
    assert done.returncode == 0, done.stderr
    assert list_checkpoints(tmp_path / "state" / "weft")


def save_last_on_a_full_disk(rank: int, ranks: int, script: str, state: str) -> None:
    with mock.patch.object(snapshot, "check_free_space", side_effect=OSError("0 MiB are free")):
        script_on_rank(rank, ranks, script, [state], Plan())


def test_a_state_that_is_saved_last_and_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVED_AT_THE_END.replace("sys.exit()", ""))
    with pytest.raises(RankError, match=r"no checkpoint of step 1: rank 0: 0 MiB are free"):
        run_ranks(2, save_last_on_a_full_disk, str(tmp_path / "script.py"), str(tmp_path / "state"))


AFTER_THE_END = """
import json, sys, torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
model, optimizer, plateau = accelerator.prepare(model, optimizer, plateau)
rows, rates = torch.arange(8)[None], []
for epoch in range(7):
    accelerator.backward(model(input_ids=rows, labels=rows).loss)
    optimizer.step(); optimizer.zero_grad()
    plateau.step(1.0)  # never improves
    rates.append(optimizer.param_groups[0]["lr"])
plateau.load_state_dict(plateau.state_dict())
accelerator.end_training()
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(sys.argv[1] + "/final")
with torch.no_grad():
    loss = model(input_ids=rows, labels=rows).loss.item()
if accelerator.is_main_process:
    json.dump([rates, loss], open(sys.argv[1] + "/found.json", "w"))
"""


@pytest.mark.parametrize("zero", [0, 2])
def test_a_script_saves_and_evaluates_after_the_end_and_a_plateau_counts_epochs(zero: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(AFTER_THE_END)
    folders = [tmp_path / "plain", tmp_path / "ranks"]
    for folder in folders:
        folder.mkdir()
    plain(str(tmp_path / "script.py"), folders[0])
    under(Plan.model_validate({"parallel": {"zero": zero}}), 2, str(tmp_path / "script.py"), folders[1])
    (then, expected), (now, found) = (json.loads((folder / "found.json").read_text()) for folder in folders)
    assert now == then == [0.1] * 3 + [0.05] * 3 + [0.025]
    assert found == pytest.approx(expected, rel=1e-5)
    assert_same_weights(folders[1] / "final", folders[0] / "final")


EMA = """
from diffusers.training_utils import EMAModel
copies = EMAModel(model.parameters())
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
copies.step(model.parameters())
"""
LOCAL_SGD = """
from accelerate.local_sgd import LocalSGD
with LocalSGD(accelerator=accelerator, model=accelerator.prepare(model), local_sgd_steps=8, enabled=True):
    pass
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [(EMA, "an operation on a full tensor and on a shard of this rank"), (LOCAL_SGD, "LocalSGD")],
    ids=["copies", "LocalSGD"],
)
def test_what_a_plan_cannot_do_is_refused_with_a_fix(lines: str, message: str, tmp_path: Path) -> None:
    start = "import torch, accelerate\naccelerator = accelerate.Accelerator(cpu=True)\nmodel = torch.nn.Linear(4, 4)"
    (tmp_path / "script.py").write_text(start + lines)
    with pytest.raises(RankError, match=rf"ModelError: {message}"):
        under(Plan.model_validate({"parallel": {"zero": 2}}), 2, str(tmp_path / "script.py"))


def counted(rank: int, ranks: int, plan: Plan) -> dict[str, Any]:
    """Number of ranks, sum, mean and gathered values of an accelerator; ranks of one data rank have the same values."""
    AcceleratorState._reset_state(True)  # another test in this process may have made the state, as lm-eval does
    try:
        with mock.patch.dict(os.environ, variables_of(rank, ranks)):
            accelerator = WeftAccelerator(cpu=True, plan=plan)
        own = torch.tensor([accelerator.data_rank + 1])
        total = accelerator.reduce({"rows": own})["rows"].tolist()
        mean = accelerator.reduce(own.float(), "mean").tolist()
        gathered = accelerator.gather(own).tolist()
        return {"ranks": accelerator.num_processes, "sum": total, "mean": mean, "all": gathered}
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def test_ranks_that_share_rows_count_once() -> None:
    plan = Plan.model_validate({"parallel": {"tp": 2, "zero": 2}})
    expected = {"ranks": 2, "sum": [3], "mean": [1.5], "all": [1, 2]}
    assert run_ranks(4, counted, plan) == [expected] * 4


def two_optimizers(rank: int, ranks: int, plan: Plan | None) -> tuple[float, list[float]]:
    """Gradient norm, and the sum of each weight after an SGD update of matrices and vectors by two optimizers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**family("llama"))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        accelerator = WeftAccelerator(cpu=True, plan=plan) if plan is not None else Accelerator(cpu=True)
        matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=1.0)
        vectors = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=1.0)
        model, matrices, vectors = accelerator.prepare(model, matrices, vectors)
        rows = torch.arange(16)[None]
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
        matrices.step()
        vectors.step()
        weights = accelerator.get_state_dict(model)
        return norm, [weight.double().sum().item() for _, weight in sorted(weights.items())]
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@pytest.mark.parametrize("layout", ["zero 3", "tp2"])
def test_two_optimizers_clip_one_norm(layout: str) -> None:
    ((norm, weights),) = run_ranks(1, two_optimizers, None)
    found = run_ranks(2, two_optimizers, plan_of(layout)[1])[0]
    assert found[0] == pytest.approx(norm, rel=1e-5)
    assert found[1] == pytest.approx(weights, rel=1e-5, abs=1e-5)


def rows_of_a_rank(rank: int, ranks: int, what: str) -> str:
    """Error of a forward whose rows break a rule under tp or cp."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama")))
    plan = Plan.model_validate({"parallel": {"cp" if what == "padding" else "tp": 2}})
    try:
        model = WeftAccelerator(cpu=True, plan=plan).prepare_model(model)
        rows = torch.arange(8)[None] + (rank if what == "rows" else 0)
        options: dict[str, Any] = {"output_attentions": True} if what == "attentions" else {}
        options |= {"return_dict": False} if what == "tuple" else {}
        options |= {"attention_mask": (rows < 6).long()} if what == "padding" else {}
        model(input_ids=rows, labels=rows, **options)
    except WeftError as error:
        return str(error)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return "nothing"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("rows", "the ranks of data rank 0 have different rows"),
        ("padding", "2 targets at padding"),
        ("attentions", "output_attentions=True under tp or cp"),
        ("tuple", "return_dict=False under tp or cp"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(what: str, said: str) -> None:
    found = run_ranks(2, rows_of_a_rank, what)
    assert all(said in text for text in found), found


def saved_shards(rank: int, ranks: int, folder: str) -> str:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama")))
    try:
        accelerator = WeftAccelerator(cpu=True, plan=Plan())
        model = accelerator.prepare_model(model)
        accelerator.save(model.state_dict(), f"{folder}/weights.pt")
    except WeftError as error:
        return str(error)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return "nothing"


def test_shards_are_not_saved_as_weights(tmp_path: Path) -> None:
    assert all("is a shard of this rank" in text for text in run_ranks(2, saved_shards, str(tmp_path)))


def refused(rank: int, ranks: int, what: str) -> str:
    try:
        if what == "other runtime":
            WeftAccelerator(cpu=True, fsdp_plugin=object())
        recomputes = {"memory": {"recompute": ["block"]}} if what == "module" else {}
        accelerator = WeftAccelerator(cpu=True, plan=Plan.model_validate(recomputes))
        model = torch.nn.Linear(2, 2)
        if what == "sync":
            accelerator.trigger_sync_in_backward(model)
        if what == "join":
            accelerator.join_uneven_inputs([model])
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


@pytest.mark.must("refusal: script of accelerate")
@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("other runtime", JobError, "fsdp_plugin in the Accelerator"),
        ("sync", ModelError, "accelerator.trigger_sync_in_backward"),
        ("join", ModelError, "accelerator.join_uneven_inputs"),
        ("module", ModelError, "plan.memory.recompute for a Linear"),
        ("optimizer", ModelError, "the optimizer has parameters that no prepared model has"),
    ],
)
def test_what_cannot_be_prepared_is_refused(what: str, kind: type, said: str) -> None:
    (found,) = run_ranks(1, refused, what)
    assert found.startswith(kind.__name__)
    assert said in found


def is_freed(rank: int, ranks: int) -> bool:
    try:
        accelerator = WeftAccelerator(cpu=True)
        found = weakref.ref(accelerator)
        gc.disable()
        del accelerator
        return found() is None
    finally:
        gc.enable()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def test_an_accelerator_that_nobody_uses_is_freed_at_once() -> None:
    assert run_ranks(1, is_freed) == [True]


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
