"""Training with compressed gradients at every ZeRO stage and on every axis, compared with uncompressed training."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import full_tensor, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.errors import JobError
from weft.job import Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Comm, Parallel, Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.sdc_check import check_replicas
from weft.training.step import train_step

CPU = torch.device("cpu")
STEPS = 12
MODELS = {
    "llama": Model(config={**family("llama"), "tie_word_embeddings": True, "num_hidden_layers": 4}),
    "untied": Model(config=family("llama")),
    "mixture": Model(config=family("qwen3_moe")),
    "biased experts": Model(config=family("gpt_oss")),
}
COMPRESSIONS = ("bf16", "fp16", "int8", "2:4", "1-bit")


def settings_for(compression: str) -> Optimizer:
    one_bit = {"name": "onebit-adam", "freeze_steps": 4} if compression == "1-bit" else {}
    return Optimizer(lr=3e-3, warmup_steps=0, eps=1e-6, betas=(0.9, 0.95), **one_bit)  # type: ignore[arg-type]


def plan_for(compression: str, precision: dict[str, Any] | None = None, comm: Any = None, **parallel: Any) -> Plan:
    dtypes = {"param_dtype": "fp32", **(precision or {})}
    return Plan(
        parallel=Parallel(**parallel),
        precision=Precision(**dtypes),  # type: ignore[arg-type]
        comm=Comm(compression=compression, **(comm or {})),  # type: ignore[arg-type]
    )


def global_batch(vocab_size: int, step: int, rows: int = 4, seq_len: int = 16) -> MicroBatch:
    """Rows that count up from a random token, which the model can learn."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(3, 40, (rows, 1), generator=generator)
    tokens = (first + torch.arange(seq_len + 1)) % (vocab_size // 2)
    return MicroBatch(tokens[:, :-1].contiguous(), torch.arange(seq_len).repeat(rows, 1), tokens[:, 1:].contiguous())


class TrainingRank:
    """Model, optimizer and mesh of one rank of a training run."""

    def __init__(self, world_size: int, source: Model, plan: Plan, **settings: Any):
        self.plan = resolved(plan, world_size)
        self.mesh = build_mesh(self.plan, "cpu", world_size)
        self.model: Any = build_on_meta(read_config(source), DTYPES[plan.precision.update])
        self.anatomy = read_anatomy(self.model)
        parallelize(self.model, self.plan, self.mesh)
        materialize(self.model, source, CPU)
        self.model.train()
        inner = build_optimizer(self.model, settings_for(plan.comm.compression).model_copy(update=settings))
        self.optimizer = DistributedOptimizer(inner, self.model, detect())
        self.vocab_size = self.model.config.vocab_size

    def step(self, index: int, check: Any = lambda loss, norm: None) -> Any:
        batch = global_batch(self.vocab_size, index)
        mine = share(batch, data_rank(self.mesh), self.plan.parallel.data_ranks, 1)
        return train_step(self.model, self.optimizer, mine, 1.0, check)


def train(
    rank: int, world_size: int, source: Model, plan: Plan, steps: int = STEPS
) -> tuple[list[float], Any, str | None]:
    """Losses, weights, and the report of differences between replicas."""
    trainer = TrainingRank(world_size, source, plan)
    results = [trainer.step(index) for index in range(steps)]
    assert all(result.problem is None for result in results), results
    return (
        [r.loss for r in results],
        gather_weights(trainer.model),
        check_replicas(trainer.model, trainer.optimizer),
    )


@cache
def uncompressed(world_size: int, plan: str, source: str) -> list[float]:
    return run_ranks(world_size, train, MODELS[source], Plan.model_validate_json(plan), timeout=120)[0][0]


def assert_converges_like_uncompressed(world_size: int, source: str, plan: Plan) -> None:
    """Weights are bit-equal on all ranks, and the loss falls nearly as much as without compression."""
    traces = run_ranks(world_size, train, MODELS[source], plan, timeout=120)
    expected = uncompressed(world_size, plan.model_copy(update={"comm": Comm()}).model_dump_json(), source)
    losses = traces[0][0]
    for rank_losses, weights, differing in traces:
        assert differing is None
        assert rank_losses == losses
        assert all(torch.equal(weight, traces[0][1][name]) for name, weight in weights.items())
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)  # nothing is compressed before the first backward
    assert losses != expected
    assert expected[0] - expected[-1] > 0.5
    share = 0.98 if plan.comm.compression in ("bf16", "fp16", "int8") else 0.7
    assert expected[0] - losses[-1] >= share * (expected[0] - expected[-1])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_training_converges_like_uncompressed(compression: str, zero: int) -> None:
    assert_converges_like_uncompressed(2, "llama", plan_for(compression, zero=zero))


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "hsdp": (4, "llama", {"zero": 3, "dp_replicate": 2}),
    "hsdp, zero 1": (4, "llama", {"zero": 1, "dp_replicate": 2}),
    "tp, zero 0": (4, "llama", {"zero": 0, "tp": 2}),
    "tp, zero 3": (4, "llama", {"zero": 3, "tp": 2}),
    "cp, zero 0": (2, "llama", {"zero": 0, "cp": 2}),
    "cp x dp, zero 2": (4, "llama", {"zero": 2, "cp": 2}),
    "pp, zero 0": (4, "llama", {"zero": 0, "pp": 2}),
    "pp, zero 2": (4, "llama", {"zero": 2, "pp": 2}),
    "pp, hsdp": (4, "llama", {"zero": 1, "pp": 2, "dp_replicate": 2}),
    "ep, experts of one rank": (2, "mixture", {"zero": 0, "ep": 2}),
    "ep, experts of one rank, zero 3": (2, "mixture", {"zero": 3, "ep": 2}),
    "ep, zero 0": (4, "mixture", {"zero": 0, "ep": 2}),
    "ep, zero 2": (4, "mixture", {"zero": 2, "ep": 2}),
    "ep x etp, zero 0": (8, "biased experts", {"zero": 0, "tp": 2, "ep": 2, "etp": 2}),
    "ep x etp, zero 2": (8, "biased experts", {"zero": 2, "tp": 2, "ep": 2, "etp": 2}),
    "ep x hsdp": (4, "mixture", {"zero": 3, "ep": 2, "dp_replicate": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compression", ["int8", "2:4", "1-bit"])
def test_compression_on_every_axis(compression: str, layout: str) -> None:
    world_size, source, parallel = LAYOUTS[layout]
    assert_converges_like_uncompressed(world_size, source, plan_for(compression, **parallel))


@pytest.mark.parametrize(
    ("compression", "zero", "precision"),
    [
        ("2:4", 0, {"param_dtype": "bf16", "update": "bf16", "reduce_dtype": "bf16"}),
        ("int8", 2, {"param_dtype": "bf16", "reduce_dtype": "bf16"}),
        ("1-bit", 3, {"param_dtype": "fp16", "loss_scale": "dynamic"}),
        ("1-bit", 2, {"param_dtype": "bf16", "weights": "split", "optimizer_state_dtype": "int8"}),
    ],
)
def test_compression_with_low_precision(compression: str, zero: int, precision: dict[str, Any]) -> None:
    assert_converges_like_uncompressed(2, "llama", plan_for(compression, precision, zero=zero))


def test_inter_node_scope_does_not_compress_on_one_host() -> None:
    plan = plan_for("2:4", comm={"compress_scope": "inter_node"}, zero=2)
    plain = uncompressed(2, plan_for("none", zero=2).model_dump_json(), "llama")
    assert run_ranks(2, train, MODELS["llama"], plan, timeout=120)[0][0] == plain


def test_onebit_adam_without_compressed_messages() -> None:
    """Momentum is reduced even if no message is compressed, and the losses are nearly the same."""
    for layout in ({"zero": 0}, {"zero": 3}, {"zero": 2, "dp_replicate": 2}):
        world_size = 2 * layout.get("dp_replicate", 1)
        plan = plan_for("1-bit", comm={"compress_scope": "inter_node"}, **layout)
        losses, _, differing = run_ranks(world_size, train, MODELS["llama"], plan, timeout=120)[0]
        expected = uncompressed(world_size, plan_for("none", **layout).model_dump_json(), "llama")
        assert differing is None
        assert losses[:5] == pytest.approx(expected[:5], rel=1e-5)
        assert losses[-1] == pytest.approx(expected[-1], rel=0.03)


def with_a_skipped_step(
    rank: int, world_size: int, plan: Plan, reason: str | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str | None]:
    """Weights and error feedback after some steps, of which one may be skipped, and the reason of the skip."""
    trainer, problem = TrainingRank(world_size, MODELS["llama"], plan), None
    for index in range(6):
        trainer.step(index)
    if reason == "spike":
        problem = trainer.step(100, check=lambda loss, norm: "loss spike").problem
    elif reason == "overflow":
        trainer.optimizer.loss_scale = LossScale(2.0**120, dynamic=True)
        problem = trainer.step(101).problem
        trainer.optimizer.loss_scale = LossScale()
    trainer.step(6)
    trainer.step(7)
    return gather_weights(trainer.model), runtime(trainer.model).feedback.tensors(), problem


@pytest.mark.parametrize(
    ("compression", "layout"), [("2:4", {"zero": 0}), ("1-bit", {"zero": 0}), ("1-bit", {"zero": 3})]
)
def test_skipped_step_leaves_weights_and_error_feedback_unchanged(compression: str, layout: dict[str, Any]) -> None:
    plan = plan_for(compression, **layout)
    expected = run_ranks(2, with_a_skipped_step, plan, None)
    for reason, text in (("spike", "loss spike"), ("overflow", "overflow")):
        for (weights, feedback, problem), (expected_weights, expected_feedback, _) in zip(
            run_ranks(2, with_a_skipped_step, plan, reason), expected, strict=True
        ):
            assert text in problem
            assert all(torch.equal(weights[name], weight) for name, weight in expected_weights.items())
            assert feedback.keys() == expected_feedback.keys()
            assert all(torch.equal(feedback[name], tensor) for name, tensor in expected_feedback.items())


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: full_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def with_unused_parameters(rank: int, world_size: int, source: Model, plan: Plan) -> dict[str, float]:
    """Largest change of unused embedding rows and of experts without tokens, by parameter."""
    trainer = TrainingRank(world_size, source, plan, weight_decay=0.0)
    routers = [p for name, p in trainer.model.named_parameters() if name.endswith("mlp.gate.weight")]
    before = weights_of(trainer.model)
    for index in range(STEPS):
        for router in routers:
            router.data.zero_()  # with equal router logits, the same experts are always chosen
        trainer.step(index)
    after = weights_of(trainer.model)
    moved = {"embedding": float((after[EMBEDDING] - before[EMBEDDING])[60:].abs().max())}
    assert (after[EMBEDDING] - before[EMBEDDING])[:40].abs().max() > 0
    for name in (name for name in before if "experts" in name):
        change = (after[name] - before[name]).abs().flatten(1).amax(1).sort().values
        assert change[-1] > 0
        moved[name] = float(change[1])  # two of four experts are used
    return moved


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.must("composition: 1-bit Adam", case="untied-3-1-bit")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("source", "zero"), [("mixture", 0), ("untied", 3)])
def test_unused_parameters_are_not_updated(source: str, zero: int, compression: str) -> None:
    for moved in run_ranks(2, with_unused_parameters, MODELS[source], plan_for(compression, zero=zero), timeout=120):
        assert not any(moved.values()), moved


def with_plain_adam(rank: int, world_size: int, plan: Plan) -> None:
    trainer = TrainingRank(world_size, MODELS["llama"], plan)
    trainer.optimizer = DistributedOptimizer(torch.optim.AdamW(trainer.model.parameters()), trainer.model, detect())
    with pytest.raises(JobError, match="an optimizer AdamW with"):
        trainer.step(0)


@pytest.mark.must("refusal: compressed gradients")
def test_onebit_compression_refuses_other_optimizers() -> None:
    run_ranks(2, with_plain_adam, plan_for("1-bit", zero=0))
