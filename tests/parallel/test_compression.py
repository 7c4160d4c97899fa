"""Whole models whose gradients are compressed on their way: every stage of ZeRO and every axis, beside the same without."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import share
from tests.lab.pool import run_ranks
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import build_on_meta, gather_weights, materialize, read_config
from weft.cluster.mesh import build_mesh, data_rank
from weft.data import MicroBatch
from weft.job import Model, Optimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.replicas import compare_replicas
from weft.plan import Comm, Parallel, Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.train.optimizer import build_optimizer
from weft.train.step import train_step

CPU = torch.device("cpu")
STEPS = 12
MODELS = {
    "llama": Model(config={**family("llama"), "tie_word_embeddings": True, "num_hidden_layers": 4}),
    "mixture": Model(config=family("qwen3_moe")),
}
COMPRESSIONS = ("bf16", "fp16", "int8", "2:4", "1-bit")


def settings_for(compression: str) -> Optimizer:
    one_bit = {"name": "onebit-adam", "freeze_steps": 4} if compression == "1-bit" else {}
    return Optimizer(lr=3e-3, warmup_steps=0, eps=1e-6, betas=(0.9, 0.95), **one_bit)  # type: ignore[arg-type]


def plan_for(compression: str, precision: dict[str, Any] | None = None, comm: Any = None, **parallel: Any) -> Plan:
    formats = {"forward": "fp32", **(precision or {})}
    return Plan(
        parallel=Parallel(**parallel),
        precision=Precision(**formats),  # type: ignore[arg-type]
        comm=Comm(compression=compression, **(comm or {})),  # type: ignore[arg-type]
    )


def global_batch(vocab_size: int, step: int, rows: int = 4, seq_len: int = 16) -> MicroBatch:
    """Counting up from any token: something to learn."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(3, 40, (rows, 1), generator=generator)
    tokens = (first + torch.arange(seq_len + 1)) % (vocab_size // 2)
    return MicroBatch(tokens[:, :-1].contiguous(), torch.arange(seq_len).repeat(rows, 1), tokens[:, 1:].contiguous())


class Rig:
    """One rank's share of a training run."""

    def __init__(self, world_size: int, source: Model, plan: Plan):
        self.plan = plan.resolve(world_size)
        self.mesh = build_mesh(self.plan, "cpu", world_size)
        self.model: Any = build_on_meta(read_config(source), DTYPES[plan.precision.update])
        self.anatomy = read_anatomy(self.model)
        parallelize(self.model, self.plan, self.mesh)
        materialize(self.model, source, CPU)
        self.model.train()
        self.optimizer = build_optimizer(self.model, settings_for(plan.comm.compression))
        self.scale = LossScale.from_plan(plan.precision.loss_scale)
        self.vocab_size = self.model.config.vocab_size

    def step(self, number: int, judge: Any = lambda loss, norm: None) -> Any:
        batch = global_batch(self.vocab_size, number)
        mine = share(batch, data_rank(self.mesh), self.plan.parallel.data_ranks, 1)
        result = train_step(self.model, self.optimizer, mine, self.plan, self.mesh, self.scale, 1.0, judge)
        self.scale = result.loss_scale
        return result


def train(
    rank: int, world_size: int, source: Model, plan: Plan, steps: int = STEPS
) -> tuple[list[float], Any, str | None]:
    """Losses, weights, and how replicas differ."""
    rig = Rig(world_size, source, plan)
    results = [rig.step(number) for number in range(steps)]
    assert all(result.problem is None for result in results), results
    return [r.loss for r in results], gather_weights(rig.model), compare_replicas(rig.model, rig.optimizer, rig.mesh)


@cache
def uncompressed(world_size: int, plan: str, source: str) -> list[float]:
    return run_ranks(world_size, train, MODELS[source], Plan.model_validate_json(plan), timeout=120)[0][0]


def close_to_uncompressed(world_size: int, source: str, plan: Plan) -> None:
    """The same bits on all ranks, and most of what training without compression gains: some steps come later."""
    traces = run_ranks(world_size, train, MODELS[source], plan, timeout=120)
    expected = uncompressed(world_size, plan.model_copy(update={"comm": Comm()}).model_dump_json(), source)
    losses = traces[0][0]
    for others, weights, differing in traces:
        assert differing is None
        assert others == losses
        assert all(torch.equal(weight, traces[0][1][name]) for name, weight in weights.items())
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)  # nothing is compressed before the first backward
    assert losses != expected
    assert expected[0] - expected[-1] > 0.5
    share = 0.98 if plan.comm.compression in ("bf16", "fp16", "int8") else 0.7
    assert expected[0] - losses[-1] >= share * (expected[0] - expected[-1])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_training_comes_to_the_same(compression: str, zero: int) -> None:
    close_to_uncompressed(2, "llama", plan_for(compression, zero=zero))


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
    "ep x hsdp": (4, "mixture", {"zero": 3, "ep": 2, "dp_replicate": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compression", ["2:4", "1-bit"])
def test_every_axis(compression: str, layout: str) -> None:
    world_size, source, parallel = LAYOUTS[layout]
    close_to_uncompressed(world_size, source, plan_for(compression, **parallel))
