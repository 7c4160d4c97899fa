"""Models of every kind in a training loop of one's own: losses, all gradients, weights and resume, as in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import weft
from tests.lab.kinds import KINDS, build, loss_of, rows_of
from tests.lab.pool import RankError, run_ranks
from weft.comm.collectives import all_reduce
from weft.parallel.runtime import packed_parameters
from weft.plan import Plan
from weft.topology.mesh import AXES

PRECISION = {"param_dtype": "fp32", "reduce_dtype": "fp32", "update": "fp32"}
PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"parallel": {"zero": 0}},
    "zero 2": {"parallel": {"zero": 2}},
    "zero 3": {"parallel": {"zero": 3}},
    "recompute": {"parallel": {"zero": 3}, "memory": {"recompute": ["block"]}},
    "offload": {"parallel": {"zero": 2}, "memory": {"offload": ["block"]}},
}
TENSOR = {"zero": 2, "tp": 2}
TENSOR_KINDS = (
    *("llava", "smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3"),
    "bart",
    "whisper",
    "modernbert",
    *("bert", "bert_classifier", "roberta", "t5"),
)
BLOCKS_ALONE = ("vit", "clip", "siglip")  # without the vocabulary of a language model
REFUSED_SEQUENCES = {
    "vit": "a sequence of 17 tokens cannot be divided",
    "clip": "a sequence of 17 tokens cannot be divided",
    "qwen3_vl": "with deepstack_visual_indexes",
    "flux": "attention that joins two sequences",
}
HYBRIDS = ("qwen3_next", "falcon_h1", "nemotron_h", "jamba")
DIFFUSION = ("dit", "pixart", "wan", "flux")
CONTEXT = {"zero": 2, "cp": 2, "cp_ulysses": 2}
STEPS = 3


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_alone(kind: str, ranks: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The untouched model in one process. The loss of image-text pairs depends on the rows of a rank, as in DDP."""
    model, batch = build(kind)
    parts = ranks if kind in ("clip", "siglip") else 1
    optimizer, losses, gradients = optimizer_of(model.parameters()), [], {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, rows_of(batch, part, parts)) for part in range(parts)]).mean()
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {
            name: full(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        optimizer.step()
    return losses, gradients, {name: full(parameter) for name, parameter in model.named_parameters()}


def train_under(rank: int, ranks: int, kind: str, plan: Plan, folder: Path) -> Any:
    """The same in a loop of one's own, with the rows of this rank; the last step is repeated from a checkpoint."""
    model, batch = build(kind)
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=plan)
    own = rows_of(batch, run.data_rank, run.data_ranks)

    def loss() -> float:
        with run.accumulate():
            return float(all_reduce(run.backward(loss_of(run.model, own)), run.mesh, AXES) / ranks)

    return train_and_repeat(run, loss, packed_parameters(model), folder)


def train_and_repeat(run: Any, loss_of_step: Callable[[], float], packed: dict[str, Any], folder: Path) -> Any:
    """Losses of all steps, gradients of the first and weights after the last, which is repeated from a checkpoint.

    Args:
        run: prepared model and optimizer.
        loss_of_step: runs forward and backward of a step.
        packed: result of `packed_parameters`.
        folder: folder of the checkpoint.
    """
    gradients: dict[str, Tensor] = {}

    def unpacked(name: str, tensor: Tensor) -> Tensor:  # rows in the order of the library
        return packed[name](full(tensor), False) if name in packed else full(tensor)

    def step() -> float:
        loss = loss_of_step()
        if not gradients:
            found = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
            gradients.update({name: unpacked(name, gradient) for name, gradient in found.items()})
        run.step()
        return loss

    losses = [step() for _ in range(STEPS - 1)]
    run.save(folder)
    losses.append(step())
    weights = {name: unpacked(name, parameter) for name, parameter in run.model.named_parameters()}
    run.load(folder)
    assert step() == losses[-1]
    for name, parameter in run.model.named_parameters():
        assert torch.equal(unpacked(name, parameter), weights[name]), name
    return losses, gradients, weights


def assert_same(found: Any, losses: list[float], gradients: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    own_losses, own_gradients, own_weights = found
    assert own_losses == pytest.approx(losses, rel=1e-5)
    for name, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((own_gradients[name] - gradient).abs().max()) <= 1e-4 * scale, name
    for name, weight in weights.items():
        torch.testing.assert_close(own_weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.must("composition: models of other kinds", case="whisper-zero 0")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_any_kind_equals_one_process(kind: str, plan: str, tmp_path: Path) -> None:
    losses, gradients, weights = train_alone(kind, 2)
    settings = Plan.model_validate({"precision": PRECISION} | PLANS[plan])
    for found in run_ranks(2, train_under, kind, settings, tmp_path / "step-2"):
        assert_same(found, losses, gradients, weights)


def assert_same_or_refused(kind: str, parallel: dict[str, Any], refused: dict[str, str], folder: Path) -> None:
    """Compare two ranks with the same rows to one process; `refused` has the texts of refusals by kind."""
    settings = Plan.model_validate({"precision": PRECISION, "parallel": parallel})
    if kind in refused:
        with pytest.raises(RankError, match=refused[kind]):
            run_ranks(2, train_under, kind, settings, folder)
        return
    losses, gradients, weights = train_alone(kind, 1)
    for found in run_ranks(2, train_under, kind, settings, folder):
        assert_same(found, losses, gradients, weights)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", [*TENSOR_KINDS, *BLOCKS_ALONE, *DIFFUSION, *HYBRIDS])
def test_attention_and_mlp_of_any_kind_are_split_over_tp(kind: str, sp: bool, tmp_path: Path) -> None:
    refused = REFUSED_SEQUENCES | dict.fromkeys(DIFFUSION, "sequence parallelism of a")
    assert_same_or_refused(kind, {**TENSOR, "sp": sp}, refused if sp else {}, tmp_path / "step-2")


@pytest.mark.must("parity: models of other kinds", case="qwen3_vl")
@pytest.mark.parametrize("kind", [*TENSOR_KINDS, *BLOCKS_ALONE, *DIFFUSION])
def test_heads_of_any_kind_are_divided_over_cp(kind: str, tmp_path: Path) -> None:
    assert_same_or_refused(kind, CONTEXT, REFUSED_SEQUENCES, tmp_path / "step-2")


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_heads_of_recurrent_mixers_are_divided_over_cp(kind: str, ulysses: int, tmp_path: Path) -> None:
    refused = {"jamba": "is recurrent along the sequence"}
    assert_same_or_refused(kind, {**CONTEXT, "cp_ulysses": ulysses}, refused, tmp_path / "step-2")


def with_dropout(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model with dropout of whole activations, in modules (BERT) or functions (BART)."""
    model, batch = build(kind)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and name.rpartition(".")[0].endswith("output"):
            module.p = 0.2
        elif hasattr(module, "activation_dropout"):
            module.dropout = 0.2
    return model, batch


def drop_under_tp(rank: int, ranks: int, kind: str, plan: Plan) -> dict[str, Tensor]:
    model, batch = with_dropout(kind)
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=plan)
    torch.manual_seed(rank)  # the first rank decides
    for _ in range(STEPS):
        with run.accumulate():
            run.backward(loss_of(run.model, batch))
        run.step()
    return {name: full(parameter) for name, parameter in run.model.named_parameters()}


def drop_alone(kind: str, first_seed: int) -> dict[str, Tensor]:
    model, batch = with_dropout(kind)
    optimizer = optimizer_of(model.parameters())
    torch.manual_seed(first_seed)
    for _ in range(STEPS):
        seed = int(torch.randint(2**62, ()))
        optimizer.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("memory", [{}, {"recompute": ["block"]}])
@pytest.mark.parametrize("kind", ["bert", "bart"])
def test_ranks_of_tp_drop_the_same_activations(kind: str, memory: dict[str, Any]) -> None:
    settings = {"precision": PRECISION, "memory": memory, "parallel": {**TENSOR, "sp": False}}
    weights, others = drop_alone(kind, 0), drop_alone(kind, 1)
    for found in run_ranks(2, drop_under_tp, kind, Plan.model_validate(settings)):
        for name, weight in weights.items():
            assert float((found[name] - weight).abs().max()) < 1e-5, name
    assert max(float((others[name] - weight).abs().max()) for name, weight in weights.items()) > 1e-3


@pytest.mark.parametrize(
    ("kind", "axes", "said"),
    [
        ("t5", {"cp": 2}, "a ring of context parallelism for a T5For"),
        ("pixart", {"cp": 2}, "a ring of context parallelism for a PixArt"),
    ],
)
def test_other_axes_are_refused_with_the_kind(kind: str, axes: dict[str, int], said: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=said):
        run_ranks(2, train_under, kind, Plan.model_validate({"parallel": {"zero": 1, **axes}}), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_split_weights_equal_whole_ones(kind: str, tmp_path: Path) -> None:
    found = []
    for weights in ("whole", "split_even"):
        precision = {**PRECISION, "param_dtype": "bf16", "weights": weights}
        plan = Plan.model_validate({"parallel": {"zero": 3}, "precision": precision})
        found.append(run_ranks(2, train_under, kind, plan, tmp_path / weights / "step-2")[0][0])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["dit", "whisper"])
def test_stages_of_zero_cast_pixels_and_sounds_alike(kind: str, tmp_path: Path) -> None:
    found = []
    for zero in (0, 2):
        plan = Plan.model_validate({"parallel": {"zero": zero}, "precision": {**PRECISION, "param_dtype": "bf16"}})
        found.append(run_ranks(2, train_under, kind, plan, tmp_path / str(zero) / "step-2")[0][0])
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def with_few_targets(batch: dict[str, Any]) -> dict[str, Any]:
    """The same rows, with unequal numbers of targets; one row has none."""
    labels = batch["labels"].clone()
    for row, count in enumerate((3, 9, 0, 1)):
        labels[row, count:] = -100
    return batch | {"labels": labels}


def train_few_targets(rank: int, ranks: int, kind: str) -> tuple[float, dict[str, Tensor]]:
    """Two steps of two micro-batches of a row; the last two rows are those of rank 1."""
    model, batch = build(kind)
    plan = Plan.model_validate({"precision": PRECISION, "parallel": {"zero": 2}})
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=plan)
    for _ in range(2):
        for part in range(2):
            with run.accumulate(last=part == 1):
                loss = run.model(**rows_of(with_few_targets(batch), 2 * rank + part, 2 * ranks)).loss
                run.backward(loss)
        run.step()
    with run.accumulate():
        loss = float(run.backward(run.model(**rows_of(with_few_targets(batch), rank, ranks)).loss))
    return loss, {name: full(parameter) for name, parameter in run.model.named_parameters()}


@pytest.mark.parametrize("kind", ["bert", "t5", "llava"])
def test_unequal_numbers_of_targets_equal_one_process(kind: str) -> None:
    model, batch = build(kind)
    batch = with_few_targets(batch)
    optimizer = optimizer_of(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    expected = loss_of(model, batch).item()
    for loss, found in run_ranks(2, train_few_targets, kind):
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], full(parameter), rtol=1e-4, atol=1e-5)


def export_under(rank: int, ranks: int, kind: str, folder: Path) -> dict[str, Tensor]:
    model, _ = build(kind)
    plan = Plan.model_validate({"precision": PRECISION, "parallel": {"zero": 3}})
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=plan)
    run.export(folder)
    return {name: full(value) for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_loaded_by_the_library(kind: str, tmp_path: Path) -> None:
    weights = run_ranks(2, export_under, kind, tmp_path / "export")[0]
    model, _ = build(kind)
    loaded: Any = type(model).from_pretrained(tmp_path / "export")  # type: ignore[attr-defined]
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, weights[name]), name
