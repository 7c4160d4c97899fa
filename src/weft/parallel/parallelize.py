"""The straight line: which technique is applied to a model, and in which order."""

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.transformers import read_anatomy
from weft.parallel.data import shard_data_parallel
from weft.parallel.replicate import replicate_data_parallel
from weft.plan import Plan


def parallelize(model: PreTrainedModel, plan: Plan, mesh: DeviceMesh) -> PreTrainedModel:
    """Split an unmodified Transformers model over the ranks of a mesh, in place, as the plan says.

    The model keeps its class, its forward and its parameter names. Afterwards parameters are sharded: make the optimizer
    from `model.parameters()` now. Gradients are means over the data ranks, as under DistributedDataParallel.

    Args:
        model: causal language model with equal weights on all ranks, or on the meta device (see `weft.materialize`).
        plan: how to run it.
        mesh: from `weft.build_mesh(plan, ...)`.

    Returns:
        The same model.

    Raises:
        PlanError: the plan does not fit the mesh.
        ModelError: the model's anatomy cannot be read.
    """
    plan = plan.resolve(mesh.size())
    anatomy = read_anatomy(model)
    split_data = replicate_data_parallel if plan.parallel.zero == 0 else shard_data_parallel
    split_data(model, anatomy, plan, mesh)
    return model
