"""Parity of the untouched model in one process and a plan on several ranks: loss, logits, every gradient, and steps."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.data import MicroBatch, RowSplit
from weft.device.detect import detect
from weft.job import Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import reorder_packed, runtime, set_dropout_seed
from weft.parallel.sequence.forward_pass import ForwardPass
from weft.parallel.sequence.rows import shard_sequence
from weft.plan import Parallel, Pipeline, Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import CONTEXT_AXES, build_mesh, data_rank, join_axes
from weft.training.forward_backward import forward, forward_backward
from weft.training.optimizer import build_optimizer, learning_rate
from weft.training.step import evaluate, train_step

STEPS = 3
# A large eps: Adam divides by the gradient's magnitude, so a gradient that is only rounding would make a step of rounding.
SETTINGS = Optimizer(lr=1e-2, eps=1e-3, warmup_steps=0, clip_norm=0.5)
KEY_BIAS = re.compile(r"(k_proj|key|Wk)\.bias$")
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
MakeOptimizer = Callable[[list[dict[str, Any]], Any], Any]


@dataclass
class ParityRecord:
    """Results that both sides must agree on."""

    losses: list[float]
    norms: list[float]
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    held_out: float
    data_rank: int = 0


def plan_for(dtype: str, pipeline: Pipeline | None = None, **parallel: Any) -> Plan:
    precision = Precision(param_dtype=dtype, update=dtype, reduce_dtype=dtype)  # type: ignore[arg-type]
    return Plan(parallel=Parallel(**parallel), pipeline=pipeline or Pipeline(), precision=precision)  # type: ignore[arg-type]


def packed_batches(vocab_size: int, rows: int = 4, seq_len: int = 16, packed: bool = True) -> list[MicroBatch]:
    """Global batch of each step: random tokens, a document border in each row, and unequal numbers of target tokens.

    Args:
        packed: True for two documents in each row; False for one document with the same number of targets.
    """
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(3, vocab_size, (rows, seq_len + 1), generator=generator)
        targets, positions = tokens[:, 1:].clone(), torch.arange(seq_len).repeat(rows, 1)
        for row in range(rows):
            border = 3 + 3 * row % (seq_len - 3)
            targets[row, border - 1] = -100
            if packed:
                positions[row, border:] -= border
        targets[0, 9:] = -100  # a row with padding
        found.append(MicroBatch(tokens[:, :-1].contiguous(), positions, targets))
    return found


def share(batch: MicroBatch, part: int, parts: int, micro_batch: int) -> list[MicroBatch]:
    """Micro-batches of one data rank."""
    tensors = [
        tensor.chunk(parts)[part].split(micro_batch) for tensor in (batch.input_ids, batch.position_ids, batch.targets)
    ]
    return [MicroBatch(*pieces) for pieces in zip(*tensors, strict=True)]


def share_of_plan(batch: MicroBatch, plan: Plan, part: int, micro_batch: int) -> list[MicroBatch]:
    """Micro-batches of one data rank of a resolved plan, which may have `rows_per_rank`."""
    rows = plan.parallel.rows_per_rank
    if not rows:
        return share(batch, part, plan.parallel.data_ranks, micro_batch)
    split, tensors = (
        RowSplit(sum(rows), micro_batch, len(rows), rows),
        (batch.input_ids, batch.position_ids, batch.targets),
    )
    return [MicroBatch(*(tensor[own.start : own.stop] for tensor in tensors)) for own, _ in split.micro_batches(part)]


def logits_of(model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """Logits of rows, computed for each document alone, without masks and positions that could be wrong on both sides."""
    if not (batch.position_ids[:, 1:] == 0).any():  # each row is one document
        return model(input_ids=batch.input_ids, use_cache=False).logits
    rows = []
    for tokens, positions in zip(batch.input_ids, batch.position_ids, strict=True):
        sizes = torch.diff((positions == 0).nonzero().flatten(), append=torch.tensor([len(tokens)])).tolist()
        alone = [model(input_ids=document[None], use_cache=False).logits[0] for document in tokens.split(sizes)]
        rows.append(torch.cat(alone))
    return torch.stack(rows)


@lru_cache(32)
def reference_of_config(config: str, dtype: str, rows: int, rows_at_once: int | None) -> ParityRecord:
    """Cached reference of a model built from a configuration (JSON); the same for every plan."""
    source = Model(config=json.loads(config))
    batches = packed_batches(read_config(source).vocab_size, rows, packed=rows_at_once is None)
    return reference(source, dtype, batches, rows_at_once or rows)


def adamw(groups: list[dict[str, Any]], model: Any) -> torch.optim.Optimizer:
    """AdamW of PyTorch for the reference."""
    return torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, foreach=False)


def reference(
    source: Model,
    dtype: str,
    batches: list[MicroBatch],
    rows_at_once: int,
    make: MakeOptimizer = adamw,
) -> ParityRecord:
    """Train the untouched model in one process with PyTorch's clipping; only the loading is Weft's code.

    Args:
        make: makes the optimizer from parameter groups and the model.
    """
    model = build_plain(source, read_config(source), DTYPES[dtype])
    model.train()

    def forward(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits_of(model, batch)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"), logits.detach()

    decay, no_decay = [], []
    for name, p in model.named_parameters():
        (decay if p.ndim >= 2 and not name.endswith("bias") else no_decay).append(p)
    groups = [{"params": decay, "weight_decay": SETTINGS.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = make(groups, model)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches, 1):
        pieces, tokens = share(batch, 0, 1, rows_at_once), int((batch.targets != -100).sum())
        results = [forward(piece) for piece in pieces]
        loss = torch.stack([loss for loss, _ in results]).sum() / tokens
        loss.backward()
        if step == 1:
            first_logits = torch.cat([logits for _, logits in results])
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, SETTINGS)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm, foreach=False).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        pieces, tokens = share(batches[0], 0, 1, rows_at_once), int((batches[0].targets != -100).sum())
        held_out = sum(forward(piece)[0].item() for piece in pieces) / tokens
    return ParityRecord(losses, norms, first_logits, gradients, dict(model.state_dict()), held_out)


def run_plan(
    rank: int,
    world_size: int,
    source: Model,
    plan: Plan,
    batches: list[MicroBatch],
    micro_batch: int,
    settings: Optimizer = SETTINGS,
) -> ParityRecord:
    """Train the same steps by Weft, on one rank of several."""
    config = read_config(source)
    plan, device = resolved(plan, world_size), detect()
    mesh = build_mesh(plan, device.type, world_size)
    model = parallelize(build_on_meta(config, DTYPES[plan.precision.update]), plan, mesh)
    materialize(model, source, device.torch_device(0))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, settings), model, device)
    gradient_ranks = plan.parallel.gradient_ranks
    shares = [
        [part.to(device.torch_device(0)) for part in share_of_plan(batch, plan, data_rank(mesh), micro_batch)]
        for batch in batches
    ]
    tokens = int((batches[0].targets != -100).sum())
    set_dropout_seed(model, 0, 0)
    forward_backward(model, shares[0], gradient_ranks / tokens)
    gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients = reorder_packed(model, gradients, by_rank=False)
    optimizer.zero_grad()

    with torch.no_grad():
        logits = logits_of_all(model, shares[0], mesh)
    losses, norms = [], []
    for step, micro_batches in enumerate(shares, 1):
        for group in optimizer.inner.param_groups:
            group["lr"] = learning_rate(step, STEPS, SETTINGS)
        set_dropout_seed(model, 0, step)
        result = train_step(model, optimizer, micro_batches, SETTINGS.clip_norm)
        assert result.problem is None, result.problem
        losses.append(result.loss)
        norms.append(result.grad_norm)
    held_out = evaluate(model, shares[0])
    return ParityRecord(
        losses,
        norms,
        torch.cat(logits).cpu() if logits else torch.empty(0),
        {name: gradient.cpu() for name, gradient in gradients.items()},
        {name: weight.cpu() for name, weight in gather_weights(model).items()},
        held_out,
        data_rank(mesh),
    )


def logits_of_all(model: Any, batches: list[MicroBatch], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Full logits of each micro-batch; with a pipeline, on the rank of its last stage."""
    if mesh["pp"].size() == 1:
        return [full_logits(forward(model, batch).output.logits, batch, mesh) for batch in batches]
    found: list[torch.Tensor] = []
    join_axes(mesh, CONTEXT_AXES)  # on all ranks, although only ranks of the last stage use it

    def keep(forward_pass: ForwardPass) -> torch.Tensor:
        logits: torch.Tensor = forward_pass.output.logits
        found.append(full_logits(logits, batches[forward_pass.index], mesh))
        return logits

    pipeline = runtime(model).pipeline
    assert pipeline is not None
    pipeline.evaluate(batches, partial(forward, model), keep)
    return found


def full_logits(logits: torch.Tensor, batch: MicroBatch, mesh: DeviceMesh) -> torch.Tensor:
    """Logits of the full vocabulary and of full rows, in natural order."""
    logits = torch.cat(gather_objects(logits.cpu(), mesh.get_group("tp")), -1)
    if mesh[CONTEXT_AXES].size() == 1:
        return logits
    seq_len = batch.input_ids.shape[1]
    positions = shard_sequence(torch.arange(seq_len)[None], mesh)[0]
    parts = gather_objects((positions, logits), join_axes(mesh, CONTEXT_AXES).get_group())
    order = torch.cat([positions for positions, _ in parts]).argsort()
    return torch.cat([logits for _, logits in parts], 1)[:, order]


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    parts: list[Any] = [value]
    if group.size() > 1:
        parts = [None] * group.size()
        dist.all_gather_object(parts, value, group)
    return parts


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_parity(
    source: Model,
    plan: Plan,
    world_size: int,
    micro_batch: int,
    rows_at_once: int | None = None,
    rows: int = 4,
    settings: Optimizer = SETTINGS,
    make: MakeOptimizer = adamw,
    run: Callable[..., ParityRecord] | None = None,
    rounding: float = 1 / 12,
) -> None:
    """Assert parity; the error names the first tensor that differs by more than the tolerance times its largest value.

    Args:
        source: model.
        plan: plan; its update dtype is the dtype of the comparison.
        world_size: number of ranks.
        micro_batch: rows per micro-batch of a rank.
        rows_at_once: None packs two documents into each row, and the untouched model computes each document alone. A number
            makes each row one document, and the untouched model computes that number of rows at once: for models in which
            documents affect each other, that sum in float32, or whose gradients are zero but for rounding.
        rows: rows of the global batch.
        settings: optimizer of the plan.
        make: makes the same optimizer for the untouched model, from parameter groups and the model.
        run: what the ranks run in place of `run_plan`, with the same arguments.
        rounding: error that counts as rounding in any gradient, relative to the precision of the largest gradient.
    """
    dtype = plan.precision.update
    batches = packed_batches(read_config(source).vocab_size, rows, packed=rows_at_once is None)
    if source.path is None and source.config is not None and make is adamw:
        expected = reference_of_config(json.dumps(source.config), dtype, rows, rows_at_once)
    else:
        expected = reference(source, dtype, batches, rows_at_once or rows, make)
    traces = run_ranks(world_size, run or run_plan, source, plan, batches, micro_batch, settings, timeout=120)
    tolerance = TOLERANCE[dtype]
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())

    for rank, trace in enumerate(traces):
        compare(f"rank {rank}: losses", torch.tensor(trace.losses), torch.tensor(expected.losses), tolerance)
        held_out = torch.tensor([trace.held_out]), torch.tensor([expected.held_out])
        compare(f"rank {rank}: held-out loss", *held_out, tolerance)
        compare(f"rank {rank}: gradient norms", torch.tensor(trace.norms), torch.tensor(expected.norms), tolerance)
        if plan.parallel.pp == 1:
            assert set(trace.gradients) == set(expected.gradients)
        for name, gradient in trace.gradients.items():
            # The head's copy of a tied embedding (the first parameter) has the gradient of both.
            copied = plan.parallel.pp > 1 and name not in expected.gradients
            expected_gradient = expected.gradients[next(iter(expected.gradients)) if copied else name]
            # The softmax cancels the bias of a key: its gradient is rounding, as large as that of other gradients. In others,
            # an error of a twelfth of the precision of the largest gradient is rounding too.
            error = rounding * torch.finfo(DTYPES[dtype]).eps * largest
            size = largest if KEY_BIAS.search(name) else error / tolerance
            compare(f"rank {rank}: gradient of {name}", gradient, expected_gradient, tolerance, at_least=size)
    assert {name for trace in traces for name in trace.gradients} >= set(expected.gradients)
    shares = {trace.data_rank: trace.logits for trace in traces if len(trace.logits)}
    compare("logits", torch.cat([shares[i] for i in sorted(shares)]), expected.logits, tolerance)
    for name, weight in expected.weights.items():
        # A weight that started at zero is the sum of its steps, which may cancel; an Adam step is as long as the learning rate.
        compare(f"weight {name}", traces[0].weights[name], weight, tolerance, at_least=STEPS * SETTINGS.lr)


def compare(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float, at_least: float = 0.0) -> None:
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    largest = max(expected.abs().max().item(), at_least)
    error = (found - expected).abs().max().item()
    assert error <= tolerance * max(largest, 1e-12), f"{what}: off by {error:.3g}, largest value {largest:.3g}"
