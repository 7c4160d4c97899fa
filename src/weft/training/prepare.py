"""Start of a custom training loop: join the ranks, and parallelize a model and its optimizer (`own_loop.py` runs them)."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.checkpoint.loading import materialize
from weft.compat import begin_fsdp, has_cpu_backend
from weft.device.detect import detect
from weft.errors import JobError, ModelError, Refusal, raise_if_refused
from weft.job import Model, Optimizer, read_plan
from weft.launch.rank_entry import connect
from weft.memory.offload import explain_host_memory
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.model_checks import reason_against_views
from weft.parallel.parallelize import parallelize
from weft.plan import Plan, refuse_run_keys, resolve_plan
from weft.precision.dtypes import DTYPES, dtype_of_forward
from weft.topology.mesh import build_mesh, reason_against_mesh
from weft.training.optimizer import build_optimizer
from weft.training.own_loop import Run
from weft.training.same_inputs import compare_hosts, read_code, read_files, read_script_inputs
from weft.training.session import check_weights
from weft.versions import explain_versions

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def init() -> None:
    """Join the ranks that torchrun, srun, mpirun, Ray Train or `weft train` have started; one process is a job of one rank.

    Raises:
        DeviceError: this host has fewer accelerators than ranks.
        JobError: the environment does not say where the ranks meet; or the ranks have joined without a backend for host memory;
            or the hosts have other versions or code.
    """
    if not dist.is_initialized():
        connect(detect())
        compare_hosts(read_code)
    elif not has_cpu_backend(dist.group.WORLD):
        device = detect()
        raise JobError(
            f"the process group has the backend {dist.get_backend()} alone",
            where="weft.init",
            rule="Weft sends small messages in host memory besides those of the accelerator",
            fix="call weft.init() before any other library joins the ranks (TrainingArguments and Accelerator do), or join "
            f'them with torch.distributed.init_process_group("{device.backend}")',
        )


def prepare(
    model: nn.Module,
    *,
    optimizer: MakeOptimizer | Optimizer,
    plan: Plan | str | Path | None = None,
    mesh: DeviceMesh | None = None,
    weights: str | Path | None = None,
) -> Run:
    """Parallelize a model and its optimizer for a training loop of your own. Collective; calls `init` if needed.

    Args:
        model: model on any device, of which the weights of rank 0 count, or on the meta device: a model of Transformers, or any
            other module. Its modules stay in training or evaluation mode as they are.
        optimizer: function that makes the optimizer from the list of trained parameters, which are shards; or the settings of
            an optimizer by name, such as weft.Optimizer(name="muon", lr=1e-3), whose schedule and clipping are up to the loop.
        plan: plan, or the path of a TOML file with a plan; None: ZeRO stage 3 over all ranks, 0 for one. With
            param_dtype = "auto", forward has the dtype of the model.
        mesh: device mesh of the plan; None: made from the plan.
        weights: Hugging Face folder with the weights of a model on the meta device.

    Raises:
        CheckpointError: the folder of `weights` lacks weights, or has some that no step can use.
        JobError: the hosts have other versions, code or model folders.
        PlanError: the plan does not fit the model, the ranks or the mesh.
        ModelError: the model cannot be read, or it is on the meta device and `weights` is missing; or the ranks have different
            models.
    """
    init()
    compare_hosts(lambda: read_script_inputs(model) | (read_files(weights, "weights") if weights else {}))
    device = detect()
    torch_device = device.torch_device(torch.accelerator.current_device_index() if device.type != "cpu" else 0)
    if isinstance(plan, str | Path):
        plan = read_plan(plan)
    plan = plan or Plan()
    refuse_run_keys(plan, "weft.prepare")
    degrees = resolve_plan(plan, dist.get_world_size(), native_bf16=False)
    if dist.get_rank() == 0:
        for line in [*explain_versions(("torch", "transformers")), *explain_host_memory(plan.memory, device.type)]:
            warnings.warn(line, stacklevel=2)
    if mesh is None:
        mesh = build_mesh(degrees, device.type, dist.get_world_size())
    raise_if_refused(reason_against_mesh(degrees, mesh))  # before the model is moved
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    raise_if_refused(_reason_against_weights(model, on_meta, weights))
    if plan.precision.param_dtype == "auto":  # the same on all machines, and in plain PyTorch
        chosen: dict[str, Any] = {"param_dtype": dtype_of_forward(plan.precision, model)}
        if chosen["param_dtype"] == "fp16" and plan.precision.loss_scale == "none":
            chosen["loss_scale"] = "dynamic"
        plan = plan.model_copy(update={"precision": plan.precision.model_copy(update=chosen)})
    plan = resolve_plan(plan, dist.get_world_size(), native_bf16=False)
    if not on_meta:
        raise_if_refused(reason_against_views(model))  # before it is moved, which makes copies
        nn.Module.to(model, torch_device)
        set_update_dtype(model, DTYPES[plan.precision.update])
    parallelize(model, plan, mesh)
    if isinstance(model, PreTrainedModel) and on_meta:
        materialize(model, Model(path=str(weights)), torch_device)
        check_weights(model, str(weights))
    if plan.parallel.zero > 0:
        begin_fsdp(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optimizer, Optimizer):
        inner = build_optimizer(model, optimizer)
    else:  # torch refuses an empty list, which a frozen stage of a pipeline has
        inner = optimizer(trained or [nn.Parameter(torch.empty(0, device=torch_device))])
    _check_optimizer(inner, trained)
    keep_zeros = isinstance(optimizer, Optimizer) and optimizer.keep_zeros
    return Run(model, DistributedOptimizer(inner, model, device, keep_zeros=keep_zeros), device, torch_device)


def _reason_against_weights(model: nn.Module, on_meta: bool, weights: str | Path | None) -> Refusal | None:
    """Reason against a model that has no weights, or two: its own, and those of a folder."""
    name, what = type(model).__name__, ""
    if on_meta and not isinstance(model, PreTrainedModel):
        what = f"{name} is on the meta device"
        rule = "weights of models of Transformers alone are loaded straight into the shards of each rank"
        fix = "build the model with its weights"
    elif on_meta and weights is None:
        what = f"{name} is on the meta device and has no weights"
        rule = "a model has its weights, or they are loaded straight into the shards of each rank"
        fix = 'pass weights="folder of the model", or build the model without the meta device'
    elif weights is not None and not on_meta:
        what = f"weights = {weights} for a {name} that has weights"
        rule = "weights are loaded into a model on the meta device only"
        fix = 'build the model in `with torch.device("meta")`, or leave weights out'
    return Refusal(what, "weft.prepare", rule, fix, ModelError) if what else None


def save(run: Run, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
    """Save the training state of a run in the background; see `Run.save`."""
    run.save(folder, extra)


def load(run: Run, folder: str | Path) -> dict[str, Any] | None:
    """Load a checkpoint into a run, saved under any plan; see `Run.load`."""
    return run.load(folder)


def set_update_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights to the dtype of the update, `plan.precision.update`, if that loses nothing.

    Raises:
        ModelError: the weights have more bits.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            if torch.promote_types(parameter.dtype, dtype) != dtype:
                raise ModelError(
                    f"{name} is {parameter.dtype}, and plan.precision.update is {dtype}",
                    where="plan.precision.update",
                    rule="weights are stored and updated in plan.precision.update",
                    fix="convert the model before, or set plan.precision.update to its dtype",
                )
            parameter.data = parameter.data.to(dtype)


def _check_optimizer(optimizer: Any, trained: list[nn.Parameter]) -> None:
    """Refuse an optimizer that is none, or that has other parameters than those of the parallelized model."""
    known, problem = set(map(id, trained)), ""
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"the optimizer function returned {type(optimizer).__name__}"
    elif trained and any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        problem = "the optimizer has parameters that are not those that its function was given"
    if problem:
        raise ModelError(
            problem,
            where="weft.prepare(optimizer=...)",
            rule="the function makes a torch.optim.Optimizer of the parameters that it gets, which are shards",
            fix="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
        )
