"""Pipeline stages of models of every kind: losses, all gradients, weights and resume, as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.lab.kinds import KINDS, build, loss_of, rows_of
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from tests.training.test_kinds import (
    PRECISION,
    assert_same,
    optimizer_of,
    train_alone,
    train_and_repeat,
    with_few_targets,
)
from weft.anatomy.transformers import read_anatomy
from weft.errors import PlanError
from weft.parallel.choices import check_axes
from weft.parallel.pipeline.probe import build_probe, trace_model
from weft.parallel.runtime import packed_parameters
from weft.plan import Plan

CHAINS = ("t5", "bart", "whisper")
STAGED = (
    *("bert", "bert_classifier", "roberta", "modernbert", "vit", "classifier", *CHAINS),
    *("llava", "smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3"),
)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"parallel": {"zero": 0}}),
    "zero 3, recompute": (4, {"parallel": {"zero": 3}, "memory": {"recompute": ["block"]}}),
    "zero 2, tp": (4, {"parallel": {"zero": 2, "tp": 2, "sp": False}}),
    "zb-1p": (2, {"parallel": {"zero": 1}, "pipeline": {"schedule": "zb-1p"}}),
    "interleaved": (2, {"parallel": {"zero": 1}, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}}),
    "offload": (2, {"parallel": {"zero": 1}, "memory": {"offload": ["block"]}}),
    "attention": (2, {"parallel": {"zero": 1}, "memory": {"recompute": ["attention"], "offload": ["mlp"]}}),
}


def plan_of(settings: dict[str, Any]) -> Plan:
    return Plan.model_validate({"precision": PRECISION, **settings, "parallel": {"pp": 2, **settings["parallel"]}})


def train_in_stages(rank: int, ranks: int, kind: str, plan: Plan, folder: Path) -> Any:
    """Steps of two micro-batches with the rows of this data rank; the last one is repeated from a checkpoint."""
    model, batch = build(kind)
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=plan)
    own = rows_of(batch, run.data_rank, run.data_ranks)
    micro_batches = [rows_of(own, part, 2) for part in range(2)]

    def loss() -> float:
        return float(run.train_batch(micro_batches, micro_batch_size=len(micro_batches[0]["labels"])))

    return train_and_repeat(run, loss, packed_parameters(model), folder)


def join(found: list[Any]) -> Any:
    """Losses of the first rank, and the gradients and weights of the stages of all ranks."""
    gradients: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for losses, own_gradients, own_weights in found:
        assert losses == found[0][0]
        gradients, weights = gradients | own_gradients, weights | own_weights
    return found[0][0], gradients, weights


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", STAGED)
def test_stages_of_any_kind_equal_one_process(kind: str, plan: str, tmp_path: Path) -> None:
    ranks, settings = PLANS[plan]
    if plan == "interleaved" and kind not in CHAINS:
        pytest.skip("its two blocks do not fill four stages")
    if plan == "attention" and kind == "vit":
        pytest.skip("needs roles")
    losses, gradients, weights = train_alone(kind, 1)
    found = join(run_ranks(ranks, train_in_stages, kind, plan_of(settings), tmp_path / "step-2"))
    assert gradients.keys() <= found[1].keys()
    assert_same(found, losses, gradients, weights)


def evaluate_in_stages(rank: int, ranks: int, kind: str) -> tuple[float, float]:
    """Losses of an evaluation and of a step, with unequal numbers of targets."""
    model, batch = build(kind)
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=plan_of({"parallel": {"zero": 1}}))
    few = with_few_targets(batch)
    return run.evaluate([few], micro_batch_size=1), run.train_batch(few, micro_batch_size=1)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_losses_are_means_over_targets(kind: str) -> None:
    model, batch = build(kind)
    expected = loss_of(model, with_few_targets(batch)).item()
    for found in run_ranks(2, evaluate_in_stages, kind):
        assert found == pytest.approx((expected, expected), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("clip", {}, "clip cannot be cut into stages: the model has weights outside its submodules"),
        ("dit", {}, "plan.parallel.pp for a module: DiTTransformer2DModel"),
        ("t5", {"tp": 2, "sp": True}, "sequence parallelism in the stages of a T5ForConditionalGeneration"),
        ("bert", {"tp": 2, "sp": True}, "sequence parallelism in the stages of a BertForMaskedLM"),
        ("t5", {"cp": 2, "cp_ulysses": 2}, "context parallelism beside pipeline parallelism"),
        ("t5", {"pp": 5}, "4 blocks cannot fill 5 stages"),
    ],
)
def test_refused_stages(kind: str, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    plan = plan_of({"parallel": {"zero": 1, **settings}})
    ranks = plan.parallel.pp * plan.parallel.tp * plan.parallel.cp
    with pytest.raises(RankError, match=said):
        run_ranks(ranks, train_in_stages, kind, plan, tmp_path)


def test_features_of_images_beyond_the_first_stage_are_refused() -> None:
    model: Any = build("qwen3_vl")[0]
    plan = resolved(plan_of({"parallel": {"zero": 1}}), 2)
    check_axes(model, read_anatomy(model), plan)
    model.config.vision_config.deepstack_visual_indexes = [0, 1]
    with pytest.raises(
        PlanError, match="after 2 blocks of a Qwen3VLForConditionalGeneration, of which the first stage"
    ):
        check_axes(model, read_anatomy(model), plan)


def test_shapes_follow_the_sizes_of_a_batch() -> None:
    """T5 passes a bias of positions [1, heads, tokens, tokens] from its first block to all others."""
    model: Any = build("t5")[0]
    anatomy = read_anatomy(model)
    chain, shapes = trace_model(build_probe(model, torch.float32), anatomy)
    sizes = {"rows": 3, "tokens": 11, "target_tokens": 7}
    found = [tuple(dim.of(sizes) for dim in shapes[value]) for value in chain.into(1)]
    assert sorted(found) == [(1, 4, 11, 11), (3, 7, 32), (3, 11, 32)]
    found = [tuple(dim.of(sizes) for dim in shapes[value]) for value in chain.into(3)]
    assert sorted(found) == [(1, 4, 7, 7), (3, 7, 32), (3, 11, 32)]


def refuse_batches(rank: int, ranks: int) -> list[str]:
    """Texts of the refusals of batches that cannot be divided."""
    texts = []
    model, batch = build("qwen2_5_vl")
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=plan_of({"parallel": {"zero": 1}}))
    for wrong in (batch, {name: value for name, value in batch.items() if name != "labels"}):
        with pytest.raises(weft.WeftError) as refusal:
            run.train_batch(wrong)
        texts.append(str(refusal.value))
    model, batch = build("bert_classifier")
    run = weft.prepare(model, optimizer=optimizer_of, plan=plan_of({"parallel": {"zero": 1}}))
    with pytest.raises(weft.WeftError) as refusal:
        run.train_batch(batch | {"labels": batch["labels"].float()})
    return [*texts, str(refusal.value)]


def test_batches_that_cannot_be_divided_are_refused() -> None:
    for texts in run_ranks(2, refuse_batches):
        assert "pixel_values (64, 1176) of 4 rows, in micro-batches of 1" in texts[0]
        assert "a batch of" in texts[1]
        assert "a batch has labels" in texts[1]
        assert "labels of torch.float32" in texts[2]


def test_every_kind_is_tried_or_refused() -> None:
    refused = ("clip", "siglip", "dit", "pixart", "flux", "wan")
    hybrids = ("qwen3_next", "falcon_h1", "nemotron_h", "jamba")  # decoders of text: tests/parallel/test_families.py
    assert {*STAGED, *refused, *hybrids} == set(KINDS)
