"""Models that are no causal language models of Transformers, under data parallelism: losses and weights of one process."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

from tests.integrations.scripts_in_pool import variables_of
from tests.lab.pool import RankError, run_ranks
from weft.integrations.accelerator import WeftAccelerator
from weft.plan import Plan

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class Line(transformers.PreTrainedModel):
    """Model of scalars, without embeddings and blocks."""

    base_model_prefix = "line"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.slope, self.offset = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = x * self.slope + self.offset
        return nn.functional.mse_loss(y, labels), y


class Layers(nn.Module):
    """Module of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return nn.functional.mse_loss(y * self.scale, labels), y


def build(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "scalars":
        return Line(transformers.PreTrainedConfig())
    if kind == "module":
        return Layers()
    if kind == "images":
        config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3)
        return transformers.ViTForImageClassification(config).eval()
    if kind == "encoder-decoder":
        t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 48}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**t5, decoder_start_token_id=0)).eval()
    config = transformers.BertConfig(**SIZES, vocab_size=48, num_labels=3)
    kinds = {"classifier": transformers.BertForSequenceClassification, "masked words": transformers.BertForMaskedLM}
    return kinds[kind](config).eval()


def rows(kind: str) -> dict[str, Tensor]:
    """Four rows, with equal numbers of targets."""
    torch.manual_seed(2)
    if kind in ("scalars", "module"):
        return {"x": torch.randn(4, 3), "labels": torch.randn(4, 3)}
    if kind == "images":
        return {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.randint(0, 3, (4,))}
    ids = torch.randint(0, 48, (4, 6))
    return {"input_ids": ids, "labels": torch.randint(0, 3, (4,)) if kind == "classifier" else ids}


def train(model: Any, optimizer: Any, batch: dict[str, Tensor], backward: Any, mean: Any) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(**batch)[0]
        losses.append(float(mean(loss.detach())))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_under(rank: int, ranks: int, kind: str, plan: Plan, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    with mock.patch.dict(os.environ, variables_of(rank, ranks)):
        accelerator = WeftAccelerator(plan=plan, cpu=True)
        model = build(kind)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        batch = {name: value.chunk(ranks)[rank] for name, value in rows(kind).items()}
        losses = train(model, optimizer, batch, accelerator.backward, lambda x: accelerator.reduce(x, "mean"))
        accelerator.save_state(str(folder))
        train(model, optimizer, batch, accelerator.backward, lambda x: x)
        accelerator.load_state(str(folder))
        weights = accelerator.get_state_dict(model)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return losses, {name: weight.clone() for name, weight in weights.items()}


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("kind", ["scalars", "module", "images", "encoder-decoder", "classifier", "masked words"])
def test_a_model_without_known_roles_equals_one_process(kind: str, zero: int, tmp_path: Path) -> None:
    model = build(kind)
    losses = train(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), rows(kind), Tensor.backward, lambda x: x
    )
    plan = Plan.model_validate({"parallel": {"zero": zero}})
    found, weights = run_ranks(2, train_under, kind, plan, tmp_path)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "axis", "said"),
    [
        ("classifier", "cp", "a ring of context parallelism for a BertFor"),
        ("encoder-decoder", "cp", "a ring of context parallelism for a "),
        ("module", "tp", "plan.parallel.tp for a module: Layers"),
    ],
)
def test_such_a_model_is_not_split(kind: str, axis: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=said):
        run_ranks(2, train_under, kind, Plan.model_validate({"parallel": {axis: 2}}), tmp_path)


def infer_and_train(rank: int, ranks: int, zero: int) -> tuple[Tensor, bool]:
    """Outputs of a forward in inference mode, and whether the next forward with gradients works."""
    with mock.patch.dict(os.environ, variables_of(rank, ranks)):
        accelerator = WeftAccelerator(plan=Plan.model_validate({"parallel": {"zero": zero}}), cpu=True)
        model: Any = accelerator.prepare(build("classifier"))
        with torch.inference_mode():
            logits = model(**rows("classifier")).logits
        accelerator.backward(model(**rows("classifier")).loss)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return logits, all(parameter.grad is not None for parameter in model.classifier.parameters())


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_forward_in_inference_mode_equals_one_process(zero: int) -> None:
    with torch.no_grad():
        expected = build("classifier")(**rows("classifier")).logits
    for logits, has_gradients in run_ranks(2, infer_and_train, zero):
        torch.testing.assert_close(logits, expected)
        assert has_gradients


def output_dtypes(rank: int, ranks: int) -> list[torch.dtype]:
    """Dtypes of the output of a model with mixed precision, and of one that nobody reads."""
    with mock.patch.dict(os.environ, variables_of(rank, ranks)):
        plan = Plan.model_validate({"parallel": {"zero": 2}})
        accelerator = WeftAccelerator(plan=plan, cpu=True, mixed_precision="bf16")
        model: Any = accelerator.prepare(build("scalars"))
        outputs = [model(**rows("scalars"))[1].dtype]
        with accelerator.logits_of_rank():
            outputs.append(model(**rows("scalars"))[1].dtype)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return outputs


def test_outputs_of_mixed_precision_are_float32() -> None:
    assert run_ranks(2, output_dtypes) == [[torch.float32, torch.bfloat16]] * 2


class Counting(nn.Module):
    """Module with a buffer that grows in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x[:, 0]])
        return self.layer(x)


def resume_counting(rank: int, ranks: int, folder: Path) -> None:
    with mock.patch.dict(os.environ, variables_of(rank, ranks)):
        for is_first in (True, False):
            accelerator = WeftAccelerator(plan=Plan.model_validate({"parallel": {"zero": 2}}), cpu=True)
            model: Any = Counting()
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            if is_first:
                model(torch.ones(4, 2))
                accelerator.save_state(str(folder))
            else:
                accelerator.load_state(str(folder))
            accelerator.end_training()


def test_a_buffer_that_has_grown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="buffers/seen is of shape"):
        run_ranks(2, resume_counting, tmp_path)
