"""Checkpoints of tiny models under any plan, saved on ranks of the pool, for tests."""

from pathlib import Path

import torch
import torch.distributed as dist

from tests.lab.parity import SETTINGS, packed_batches, share
from tests.lab.plans import resolved
from weft.anatomy.build import build_on_meta
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.manifest import Position, verify_folder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.restore import Reader, restore, verify_together
from weft.checkpoint.slices import PER_RANK_KINDS
from weft.checkpoint.snapshot import Snapshots, Target
from weft.device.detect import detect
from weft.job import Checkpoint, Job, Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import allocate
from weft.plan import Plan
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import evaluate, train_step

CPU = torch.device("cpu")


def train_and_save(
    rank: int,
    world_size: int,
    source: Model,
    plan: Plan,
    run: Path,
    steps: tuple[int, int],
    begin: Path | None,
    settings: Optimizer = SETTINGS,
) -> dict[str, torch.Tensor]:
    """Train from a checkpoint or from scratch, and save a checkpoint; return the full weights, gathered independently."""
    plan = resolved(plan, world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model = build_on_meta(read_config(source), DTYPES[plan.precision.update])
    parallelize(model, plan, mesh)
    if begin:
        allocate(model, CPU)
        optimizer = DistributedOptimizer(build_optimizer(model, settings), model, detect())
        with Reader(begin, verify_together(begin)) as reader:
            restore(model, optimizer, reader, lambda files: None)
    else:
        materialize(model, source, CPU)
        optimizer = DistributedOptimizer(build_optimizer(model, settings), model, detect())
    for global_batch in packed_batches(read_config(source).get_text_config().vocab_size)[slice(*steps)]:
        batch = share(global_batch, data_rank(mesh), plan.parallel.data_ranks, 1)
        train_step(model, optimizer, batch, 0.5)
        evaluate(model, batch)  # may leave weights gathered
    job = Job(model=source, plan=plan, checkpoint=Checkpoint(every=1))
    snapshots = Snapshots(job, model, optimizer, detect(), CPU)
    step, target = steps[1], Target(run, rank == 0, keep=0, keep_hours=0)
    assert snapshots.take(Position(step=step, next_batch=step, loss_scale=LossScale()), target) > 0
    snapshots.finish()
    dist.barrier()
    assert rank or "in the background" in "".join(snapshots.take_messages())
    return gather_weights(model)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, without random generators, which belong to ranks."""
    manifest = verify_folder(folder)
    with Reader(folder, manifest) as reader:
        return {name: reader.read(name) for name in manifest.tensors if name.partition("/")[0] not in PER_RANK_KINDS}
