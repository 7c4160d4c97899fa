"""TRL's trainers under a plan: unmodified scripts have the losses, norms, metrics and weights of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integrations.scripts_in_pool import plain, under
from tests.integrations.test_trainer import BATCH, LAYOUTS, assert_same_logs, assert_same_weights, log_of, plan_of
from tests.lab.plans import resolved
from tests.lab.pool import RankError
from weft.errors import PlanError
from weft.integrations.trainer import check_trainer
from weft.plan import Parallel, Plan

KINDS: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "sft packed": ("sft", '{"packing": true, "max_length": 16}'),
    "sft lora": ("sft", "lora"),
    "sft dora": ("sft", "dora"),
    "dpo": ("dpo",),
    "dpo lora": ("dpo", "lora"),
    "dpo experts": ("dpo", "experts", '{"router_aux_loss_coef": 0.0}'),
    "dpo padding-free": ("dpo", '{"padding_free": true}'),
    "kto": ("kto",),
    "kto lora": ("kto", "lora"),
    "kto precomputed": ("kto", '{"precompute_ref_log_probs": true}'),
    "dpo synced": ("dpo", '{"sync_ref_model": true, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}'),
    "kto apo": ("kto", '{"loss_type": "apo_zero_unpaired"}'),
    "reward": ("reward",),
}
COUNTED = (
    *("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"),
    *("rewards/margins", "rewards/accuracies", "rewards/chosen", "logps/chosen", "logps/rejected", "kl"),
)


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = json.loads((folder / "result.json").read_text())
    return [{key: row[key] for key in COUNTED if key in row} for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of plain runs by kind, made on first use."""
    return {"": tmp_path_factory.mktemp("trl")}


def reference(kind: str, references: dict[str, Path]) -> Path:
    if kind not in references:
        name, *options = KINDS[kind]
        references[kind] = references[""] / kind.replace(" ", "-")
        plain("trl_script.py", name, references[kind], BATCH, *options)
    return references[kind]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in (folder / "final").glob("*.safetensors") for key, value in load_file(file).items()}


def assert_equals(found: Path, expected: Path, options: tuple[str, ...]) -> None:
    """Compare the logs and the saved weights of two runs."""
    rows, others = rows_of(found), rows_of(expected)
    assert len(rows) == len(others) == 3
    for now, then in zip(rows, others, strict=True):
        assert now.keys() == then.keys()
        for key, value in then.items():
            assert now[key] == pytest.approx(value, rel=1e-4 if key == "grad_norm" else 1e-5, abs=1e-5), (
                key,
                now,
                then,
            )
    weights, saved = weights_of(found), weights_of(expected)
    assert weights.keys() == saved.keys()
    assert any("lora_A" in key for key in weights) == bool({"lora", "dora", "experts"} & set(options))
    for key, value in saved.items():
        assert torch.allclose(weights[key], value, atol=2e-4), key


@pytest.mark.parametrize("layout", ["zero 3", "zero 0", "tp2", "tp2 without sp", "cp2", "tp2 x zero 2", "zero 2"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unmodified_script_equals_one_process(kind: str, layout: str, references: dict[str, Path]) -> None:
    if kind == "reward" and "cp" in LAYOUTS[layout][1]:
        pytest.skip("refused, see below")
    expected = reference(kind, references)
    ranks, plan, batch = plan_of(layout)
    found = references[""] / f"{kind}-{layout}".replace(" ", "-")
    name, *options = KINDS[kind]
    under(plan, ranks, "trl_script.py", name, found, batch, *options)
    assert_equals(found, expected, KINDS[kind])


@pytest.mark.parametrize("parallel", [{"ep": 2, "zero": 3}, {"ep": 2, "zero": 0}, {"ep": 2, "tp": 2}], ids=str)
def test_adapters_of_experts_under_expert_parallelism(parallel: dict[str, Any], references: dict[str, Path]) -> None:
    expected, plan = reference("dpo experts", references), Plan(parallel=Parallel(**parallel))
    found = references[""] / f"experts-{'-'.join(map(str, parallel.values()))}"
    batch = BATCH // resolved(plan, 2).parallel.data_ranks
    under(plan, 2, "trl_script.py", "dpo", found, batch, *KINDS["dpo experts"][1:])
    assert_equals(found, expected, KINDS["dpo experts"])


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_the_auxiliary_loss_of_routers_is_refused_where_tokens_are_split(
    axis: str, references: dict[str, Path]
) -> None:
    with pytest.raises(RankError, match="output_router_logits = True under tp or cp"):
        under(Plan(parallel=Parallel(**{axis: 2})), 2, "trl_script.py", "dpo", references[""] / "aux", 4, "experts")


@pytest.mark.parametrize("kind", ["sft lora", "dpo experts"])
def test_a_saved_adapter_loads_in_peft(kind: str, references: dict[str, Path]) -> None:
    from peft import PeftModel

    expected = reference(kind, references)
    ranks, plan, batch = plan_of("tp2")
    found = references[""] / f"adapter-{kind.replace(' ', '-')}"
    name, *options = KINDS[kind]
    under(plan, ranks, "trl_script.py", name, found, batch, *options)
    start = references[""] / ("start-experts" if "experts" in options else "start")
    rows = torch.arange(5, 15)[None]
    logits = []
    for folder in (found, expected):
        model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), folder / "final")
        logits.append(model.merge_and_unload()(rows).logits)
    assert torch.allclose(*logits, atol=1e-4)


@pytest.mark.parametrize(("before", "after"), [("zero 3", "tp2"), ("tp2", "zero 0")])
def test_a_resumed_adapter_equals_one_that_was_not_interrupted(
    before: str, after: str, references: dict[str, Path]
) -> None:
    expected = reference("sft lora", references)
    first, again = (references[""] / f"{name}-{before}-{after}".replace(" ", "-") for name in ("first", "again"))
    ranks, plan, batch = plan_of(before)
    saving = {"save_strategy": "steps", "save_steps": 2}
    under(plan, ranks, "trl_script.py", "sft", first, batch, "lora", json.dumps(saving))
    ranks, plan, batch = plan_of(after)
    resume = json.dumps({"resume": str(first / "checkpoint-2")})
    under(plan, ranks, "trl_script.py", "sft", again, batch, "lora", resume)
    now, then = rows_of(again)[-1], rows_of(expected)[-1]
    assert now["loss"] == pytest.approx(then["loss"], rel=1e-5)
    assert now["grad_norm"] == pytest.approx(then["grad_norm"], rel=1e-4)
    for key, value in weights_of(expected).items():
        assert torch.allclose(weights_of(again)[key], value, atol=2e-4), key


@pytest.mark.must("refusal: script of TRL")
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_ranks_that_would_train_on_different_completions_are_refused(axis: str) -> None:
    own = type("OnlineDPOTrainer", (), {})
    with pytest.raises(PlanError, match=f"OnlineDPOTrainer with plan.parallel.{axis} = 2"):
        check_trainer(own, resolved(Plan(parallel=Parallel(**{axis: 2})), 2))


def test_a_reward_model_under_cp_is_refused(references: dict[str, Path]) -> None:
    found = reference("sft", references).with_name("refused")
    with pytest.raises(RankError, match=r"plan\.parallel\.cp for a llama model without output embeddings"):
        under(plan_of("cp2")[1], 2, "trl_script.py", "reward", found, 4)


@pytest.mark.must("parity: script of TRL", case="tp2-2")
@pytest.mark.parametrize(("layout", "ep"), [("zero 3", 2), ("zero 0", 2), ("zero 2", 1), ("tp2", 2), ("cp2", 2)])
def test_experts_equal_one_process(layout: str, ep: int, tmp_path: Path) -> None:
    plain("trainer_moe.py", tmp_path / "plain", BATCH)
    ranks, plan, batch = plan_of(layout)
    parallel = plan.parallel.model_copy(update={"ep": ep})
    under(plan.model_copy(update={"parallel": parallel}), ranks, "trainer_moe.py", tmp_path / "weft", batch)
    assert_same_logs(log_of(tmp_path / "weft"), log_of(tmp_path / "plain"))
    assert_same_weights(tmp_path / "weft" / "final", tmp_path / "plain" / "final")
