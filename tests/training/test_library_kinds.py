"""Every family of Transformers for text, masked words, encoder-decoders and images: as one process, or refused.

Other axes of causal language models: tests/parallel/test_families.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.lab.diffusers_models import part_of
from tests.lab.library_kinds import AXES, MAPPINGS, NOT_PROVED, PROVED, ROWS, build_of_library, loss_of_library
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.training.test_kinds import PRECISION, full, optimizer_of
from weft.anatomy.transformers import read_any_anatomy
from weft.errors import ModelError, WeftError
from weft.parallel.choices import choose
from weft.parallel.runtime import packed_parameters
from weft.parallel.sequence.stacks import sequence_stacks
from weft.parallel.tensor.checks import replicated_parts, splittable
from weft.plan import Plan

Gradients = dict[str, Tensor]


def parts_of(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Rows of each data rank: normalization over a batch (ResNet) is over the rows of a rank."""
    return [{name: part_of(name, value, part, parts) for name, value in batch.items()} for part in range(parts)]


def losses_and_gradients(model: nn.Module, batch: dict[str, Any], parts: int) -> list[float]:
    """Loss of each part of the rows; the gradients of their mean are in the parameters."""
    losses = []
    for part in parts_of(batch, parts):
        loss = loss_of_library(model, part)
        (loss / parts).backward()
        losses.append(float(loss))
    return losses


def train_under(rank: int, ranks: int, task: str, family: str, plan: Plan) -> tuple[float, Gradients]:
    model, batch = build_of_library(task, family)
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=plan)
    packed = packed_parameters(model)
    if plan.parallel.pp > 1:
        loss = run.train_batch(parts_of(batch, 2), micro_batch_size=ROWS // 2)
    else:
        own = parts_of(batch, run.data_ranks)[run.data_rank]
        with run.accumulate():
            loss = run.backward(loss_of_library(run.model, own))
    found = {name: full(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}
    return float(loss), {name: packed[name](grad, False) if name in packed else grad for name, grad in found.items()}


@pytest.mark.parametrize(
    ("task", "family", "axes"),
    [
        (task, family, axes)
        for task, (_, names) in MAPPINGS.items()
        for family in names
        for axes in (AXES if task != "causal" else ("zero 3",))
    ],
)
def test_gradients_of_one_process_or_a_refusal(task: str, family: str, axes: str) -> None:
    """A family is proved, or refused, or named with the reason why it is neither."""
    is_proved = family in PROVED[task][axes]
    parts = 2 if axes in ("zero 3", "pp") else 1
    try:
        model, batch = build_of_library(task, family)
        losses = losses_and_gradients(model, batch, parts)
    except Exception as error:
        assert not is_proved
        pytest.skip(f"the library cannot compute a small model of {family}: {error}")
    plan = Plan.model_validate({"precision": PRECISION, "parallel": AXES[axes]})
    try:
        choose(model, resolved(plan, 2), "cpu", None)
    except WeftError:
        assert not is_proved
        return
    if family in NOT_PROVED[task][axes]:
        pytest.skip(NOT_PROVED[task][axes][family])
    found = run_ranks(2, train_under, task, family, plan)
    mean = sum(loss for loss, _ in found) / len(found)  # some losses are means over the rows of a rank
    assert mean == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    gradients = found[1][1] | found[0][1]  # of both stages
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            # A bias of keys shifts all scores of a query alike: its gradient is zero but for rounding.
            scale = max(float(parameter.grad.abs().max()), 3e-3 if name.endswith("key.bias") else 1e-3)
            assert float((gradients[name] - parameter.grad).abs().max()) <= 2e-3 * scale, name
    assert is_proved, "parity holds: add the family to PROVED of tests/lab/library_kinds.py"


@pytest.mark.parametrize(
    ("task", "family", "whole"),
    [
        ("masked", "distilbert", set()),
        ("masked", "xlm", set()),
        ("masked", "albert", {"attention"}),
        ("seq2seq", "pegasus_x", {"self_attn"}),
        ("images", "segformer", {"attention"}),
        ("audio", "wav2vec2", set()),
        ("audio", "parakeet_ctc", {"self_attn"}),
    ],
)
def test_ranks_of_tp_split_the_known_parts_of_an_encoder(task: str, family: str, whole: set[str]) -> None:
    model, _ = build_of_library(task, family)
    anatomy = read_any_anatomy(model, needs_roles=False)
    blocks = splittable(model, anatomy, 2) + (anatomy.blocks if anatomy.has_roles else ())
    names = [name for block in blocks for name in replicated_parts(model, anatomy, block, 2)]
    assert blocks
    assert {name.rpartition(".")[2] for name in names} == whole


def test_a_norm_over_the_hidden_units_of_an_mlp_is_not_split() -> None:
    model, _ = build_of_library("images", "convnextv2")
    assert not splittable(model, read_any_anatomy(model, needs_roles=False), 2)


@pytest.mark.parametrize(("task", "family"), [("audio", "lasr_ctc"), ("speech", "qwen3_asr")])
def test_the_sequence_of_a_block_that_needs_whole_rows_is_not_split(task: str, family: str) -> None:
    """Blocks with a convolution along the sequence, and blocks of packed sequences."""
    model, _ = build_of_library(task, family)
    anatomy = read_any_anatomy(model, needs_roles=False)
    towers = (*anatomy.tower_blocks, *anatomy.encoder_blocks) if anatomy.has_roles else anatomy.blocks
    stacks = sequence_stacks(model, anatomy, 2) or ()
    assert towers
    assert not any(block in stack for stack in stacks for block in towers)


def test_embeddings_without_a_weight_are_no_language_model() -> None:
    model, _ = build_of_library("speech", "kyutai_speech_to_text")
    with pytest.raises(ModelError, match="no embedding found"):
        read_any_anatomy(model, needs_roles=True)


def test_a_family_of_each_task_is_built() -> None:
    for task, family in (
        *(("masked", "bert"), ("seq2seq", "bart"), ("images", "vit")),
        *(("speech", "whisper"), ("speech", "voxtral"), ("audio", "wav2vec2"), ("audio", "parakeet_ctc")),
    ):
        model, batch = build_of_library(task, family)
        assert torch.isfinite(loss_of_library(model, batch))
