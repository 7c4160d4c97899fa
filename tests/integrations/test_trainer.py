"""`transformers.Trainer` under a plan: an unmodified script has the losses, norms and weights of one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from tests.integrations.scripts_in_pool import plain, under
from tests.lab.plans import resolved
from tests.lab.pool import RankError
from weft.errors import JobError, ModelError, PlanError
from weft.integrations.models import refuse_trained_parts
from weft.integrations.script_state import from_text_keys, with_text_keys
from weft.integrations.trainer import check_trainer, with_weft
from weft.plan import Parallel, Plan, Precision

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3}),
    "tp2": (2, {"tp": 2}),
    "tp2 without sp": (2, {"tp": 2, "sp": False, "zero": 0}),
    "cp2": (2, {"cp": 2}),
    "tp2 x zero 2": (4, {"tp": 2, "zero": 2}),
}
BATCH = 4


def plan_of(layout: str, **tables: Any) -> tuple[int, Plan, int]:
    """Ranks, plan, and rows of a batch of a data rank, so that all layouts have the same global batch."""
    ranks, parallel = LAYOUTS[layout]
    plan = Plan(parallel=Parallel(**parallel), **tables)
    return ranks, plan, BATCH // resolved(plan, ranks).parallel.data_ranks


def log_of(folder: Path) -> list[dict[str, float]]:
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_rows")
    rows = json.loads((folder / "result.json").read_text())
    return [{key: row[key] for key in kept if key in row} for row in rows]


def assert_same_logs(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) > 0
    for now, then in zip(found, expected, strict=True):
        assert now.keys() == then.keys()
        for key, value in then.items():
            assert now[key] == pytest.approx(value, rel=1e-4 if key == "grad_norm" else 1e-5), (key, now, then)


def assert_same_weights(found: Path, expected: Path) -> None:
    weights, others = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (found, expected))
    assert weights.keys() == others.keys()
    for name, weight in others.items():
        assert torch.allclose(weights[name], weight, atol=2e-4), (name, (weights[name] - weight).abs().max())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    plain("trainer_lm.py", folder, "--batch", BATCH)
    return folder


@pytest.mark.must("parity: script of Trainer", case="tp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unmodified_script_equals_one_process(layout: str, reference: Path, tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "trainer_lm.py", tmp_path, "--batch", batch)
    assert_same_logs(log_of(tmp_path), log_of(reference))
    assert_same_weights(tmp_path / "final", reference / "final")


PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2}),
    "pp2 x zero 2": (4, {"pp": 2, "zero": 2}),
    "pp2 x tp2": (4, {"pp": 2, "tp": 2}),
    "pp2 x cp2": (4, {"pp": 2, "cp": 2, "zero": 0}),
}


@pytest.mark.parametrize("layout", PIPELINES)
def test_a_pipeline_equals_one_process_and_resumes(layout: str, tmp_path: Path) -> None:
    plain("trainer_lm.py", tmp_path / "plain", "--batch", BATCH, "--loss-only")
    ranks, parallel = PIPELINES[layout]
    plan = Plan(parallel=Parallel(**parallel))
    batch = BATCH // resolved(plan, ranks).parallel.data_ranks
    under(plan, ranks, "trainer_lm.py", tmp_path / "weft", "--batch", batch, "--loss-only")
    assert_same_logs(log_of(tmp_path / "weft"), log_of(tmp_path / "plain"))
    assert_same_weights(tmp_path / "weft" / "final", tmp_path / "plain" / "final")
    again = tmp_path / "again", "--batch", 2, "--loss-only", "--resume", tmp_path / "weft" / "checkpoint-2"
    under(plan_of("zero 3")[1], 2, "trainer_lm.py", *again)
    assert_same_logs(log_of(tmp_path / "again"), log_of(tmp_path / "plain"))


@pytest.mark.parametrize("kind", ["t5", "classifier", "tied decoder"])
def test_a_pipeline_of_another_kind_equals_one_process(kind: str, tmp_path: Path) -> None:
    plain("trainer_kinds.py", kind, tmp_path / "plain", BATCH)
    under(Plan(parallel=Parallel(pp=2)), 2, "trainer_kinds.py", kind, tmp_path / "weft", BATCH)
    assert_same_logs(log_of(tmp_path / "weft"), log_of(tmp_path / "plain"))
    found, expected = (load_file(tmp_path / way / "final" / "model.safetensors") for way in ("weft", "plain"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=2e-4), name


@pytest.mark.parametrize(("layout", "data_ranks"), [("zero 0", 2), ("zero 3", 2), ("tp2", 1)])
def test_a_classifier_evaluates_as_one_process_and_trains_as_ddp(layout: str, data_ranks: int, tmp_path: Path) -> None:
    """With seven held-out rows, which two ranks cannot divide evenly. The Trainer multiplies the loss by the data ranks."""
    plain("trainer_kinds.py", "classifier", tmp_path / "plain", BATCH)
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "trainer_kinds.py", "classifier", tmp_path / "weft", batch)
    found, expected = log_of(tmp_path / "weft"), log_of(tmp_path / "plain")
    assert found[0]["eval_loss"] == pytest.approx(expected[0]["eval_loss"], rel=1e-5)
    for key in ("loss", "grad_norm"):
        assert found[1][key] == pytest.approx(data_ranks * expected[1][key], rel=1e-4)


@pytest.mark.must("refusal: script of Trainer")
@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("trainer_lm.py", (), "compute_metrics under plan.parallel.pp > 1"),
        ("trainer_lm.py", ("--loss-only", '{"label_smoothing_factor": 0.1}'), "label_smoothing_factor under"),
        ("trainer_own_loss.py", ("4",), "compute_loss of Own under"),
        ("accelerate_loop.py", ("4",), r"accelerator\.prepare of a model under plan\.parallel\.pp = 2"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused(
    script: str, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=said):
        under(Plan(parallel=Parallel(pp=2)), 2, script, tmp_path, *arguments)


@pytest.mark.parametrize("way", ["model_init again without predict", "train again without predict"])
def test_a_pipeline_trains_the_model_of_each_train(way: str, tmp_path: Path) -> None:
    plain("trainer_ways.py", way, tmp_path / "plain", BATCH)
    under(Plan(parallel=Parallel(pp=2)), 2, "trainer_ways.py", way, tmp_path / "weft", BATCH)
    assert_same_logs(log_of(tmp_path / "weft"), log_of(tmp_path / "plain"))
    assert_same_weights(tmp_path / "weft" / "final", tmp_path / "plain" / "final")


@pytest.mark.parametrize(("before", "after"), [("zero 3", "zero 3"), ("zero 3", "tp2"), ("cp2", "zero 0")])
def test_a_resumed_script_equals_one_that_was_not_interrupted(
    before: str, after: str, reference: Path, tmp_path: Path
) -> None:
    ranks, plan, batch = plan_of(before)
    under(plan, ranks, "trainer_lm.py", tmp_path / "first", "--batch", batch)
    ranks, plan, batch = plan_of(after)
    folder, again = tmp_path / "first" / "checkpoint-2", tmp_path / "again"
    under(plan, ranks, "trainer_lm.py", again, "--batch", batch, "--resume", folder)
    assert_same_logs(log_of(again), log_of(reference))
    assert_same_weights(again / "final", reference / "final")


@pytest.mark.parametrize("layout", ["zero 0", "zero 3", "tp2", "cp2"])
def test_a_loss_of_the_users_own_reads_full_logits(layout: str, tmp_path: Path) -> None:
    plain("trainer_own_loss.py", tmp_path / "plain", BATCH)
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "trainer_own_loss.py", tmp_path / "weft", batch)
    assert_same_logs(log_of(tmp_path / "weft"), log_of(tmp_path / "plain"))
    assert_same_weights(tmp_path / "weft" / "final", tmp_path / "plain" / "final")


SETTINGS: dict[str, dict[str, Any]] = {
    "best model": {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_accuracy",
        "greater_is_better": False,
    },
    "best model, weights only": {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_accuracy",
        "greater_is_better": False,
        "save_only_model": True,
    },
    "limit": {"save_total_limit": 1},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "no clipping": {"max_grad_norm": 0.0},
    "sgd": {"optim": "sgd", "weight_decay": 0.1},
    "mean of ranks": {"average_tokens_across_devices": False},
}


@pytest.mark.parametrize("layout", ["zero 3", "tp2"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_trainer_keep_their_meaning(name: str, layout: str, tmp_path: Path) -> None:
    if name == "mean of ranks" and layout == "zero 3":
        pytest.skip("a mean of means of data ranks is another number than the mean of one process")
    settings = json.dumps(SETTINGS[name])
    extra = ["--accumulate", "1"] if name == "mean of ranks" else []
    plain("trainer_lm.py", tmp_path / "plain", "--batch", BATCH, *extra, settings)
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "trainer_lm.py", tmp_path / "weft", "--batch", batch, *extra, settings)
    assert_same_logs(log_of(tmp_path / "weft"), log_of(tmp_path / "plain"))
    assert_same_weights(tmp_path / "weft" / "final", tmp_path / "plain" / "final")
    folders = [sorted(path.name for path in (tmp_path / run).glob("checkpoint-*")) for run in ("plain", "weft")]
    assert folders[0] == folders[1]


def test_the_dtype_comes_from_the_script_or_from_the_plan(tmp_path: Path) -> None:
    under(Plan(), 2, "trainer_lm.py", tmp_path / "flag", '{"bf16": true, "use_cpu": true}')
    bf16 = Plan(precision=Precision(param_dtype="bf16"))
    under(bf16, 2, "trainer_lm.py", tmp_path / "plan")
    assert log_of(tmp_path / "flag") == log_of(tmp_path / "plan")
    under(Plan(), 2, "trainer_lm.py", tmp_path / "neither")
    assert log_of(tmp_path / "neither") != log_of(tmp_path / "plan")


def test_another_dtype_than_that_of_the_plan_is_refused(tmp_path: Path) -> None:
    plan = Plan(precision=Precision(param_dtype="fp32"))
    with pytest.raises(RankError, match="the script asks for bf16, and the plan for fp32"):
        under(plan, 2, "trainer_lm.py", tmp_path, '{"bf16": true, "use_cpu": true}')


def test_a_checkpoint_of_a_plain_trainer_is_refused(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="a checkpoint of a Trainer without Weft"):
        under(Plan(), 2, "trainer_lm.py", tmp_path, "--resume", reference / "checkpoint-2")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    under(Plan(), 2, "trainer_lm.py", tmp_path / "first", "--batch", 2)
    file = next((tmp_path / "first" / "checkpoint-2" / "weft").glob("step-*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(RankError, match=r"does not verify|differs|damaged"):
        under(Plan(), 2, "trainer_lm.py", tmp_path / "again", "--batch", 2, "--resume", tmp_path / "first/checkpoint-2")


WAYS = ("stream", "two epochs", "early stopping", "loss in fp32 accumulation", "model_init", "own optimizer")


@pytest.mark.parametrize("layout", ["zero 3", "zero 0", "tp2"])
@pytest.mark.parametrize("way", [*WAYS, "evaluate first", "train again", "model_init again", "second trainer"])
def test_ways_to_use_a_trainer_equal_one_process(way: str, layout: str, tmp_path: Path) -> None:
    plain("trainer_ways.py", way, tmp_path / "plain", BATCH)
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "trainer_ways.py", way, tmp_path / "weft", batch)
    assert_same_logs(log_of(tmp_path / "weft"), log_of(tmp_path / "plain"))
    assert_same_weights(tmp_path / "weft" / "final", tmp_path / "plain" / "final")


def test_an_optimizer_that_needs_full_matrices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="Adafactor over shards of matrices"):
        under(Plan(), 2, "trainer_ways.py", "adafactor", tmp_path, 2)


def test_the_newest_complete_checkpoint_is_resumed(reference: Path, tmp_path: Path) -> None:
    """As after a kill while the last checkpoint was being written."""
    under(Plan(), 2, "trainer_lm.py", tmp_path, "--batch", 2)
    shutil.rmtree(next((tmp_path / "checkpoint-4" / "weft").glob("step-*")))
    (tmp_path / "result.json").unlink()
    under(Plan(), 2, "trainer_lm.py", tmp_path, "--batch", 2, "--resume", "last")
    assert_same_logs(log_of(tmp_path), log_of(reference))
    assert_same_weights(tmp_path / "final", reference / "final")


def test_a_scheduler_whose_state_has_other_keys_than_text_is_saved() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(parameters, lr=1.0), [2, 2, 5])
    state = scheduler.state_dict()
    saved = json.loads(json.dumps(with_text_keys(state)))
    assert saved == with_text_keys(state)
    assert from_text_keys(saved) == state


def test_a_second_plan_and_rows_that_are_balanced_over_ranks_are_refused() -> None:
    with pytest.raises(JobError, match="a second plan"):
        with_weft(with_weft(Trainer, Plan()), Plan())
    with pytest.raises(PlanError, match="batch_rebalance"):
        check_trainer(Trainer, resolved(Plan(parallel=Parallel(tp=2)), 2), "batch_rebalance")


def test_noise_in_embeddings_is_refused_where_tokens_are_split() -> None:
    with pytest.raises(PlanError, match="neftune_noise_alpha with"):
        check_trainer(Trainer, resolved(Plan(parallel=Parallel(cp=2)), 2), noise=True)
    check_trainer(Trainer, resolved(Plan(parallel=Parallel(tp=2, sp=False)), 2), noise=True)


def test_prompts_outside_of_the_model_are_refused() -> None:
    core = torch.nn.Linear(2, 2)
    wrapper = torch.nn.ModuleDict({"base": core, "prompt": torch.nn.Linear(2, 2)})
    with pytest.raises(ModelError, match=r"the trained parameter prompt\.weight"):
        refuse_trained_parts(wrapper, core)
    wrapper["prompt"].requires_grad_(False)
    refuse_trained_parts(wrapper, core)


def test_predict_of_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"trainer\.predict under plan\.parallel\.pp = 2"):
        under(Plan(parallel=Parallel(pp=2)), 2, "trainer_ways.py", "two epochs", tmp_path, BATCH)
