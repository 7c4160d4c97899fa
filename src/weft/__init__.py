"""Weft: distributed training of existing PyTorch models, fast and in little memory.

Public names are imported on first use, so that Plan and Job need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import errors
    from weft.checkpoint.loading import materialize
    from weft.compress.report import compress_model
    from weft.errors import CheckpointError, JobError, ModelError, PlanError, WeftError
    from weft.integrations.accelerator import WeftAccelerator
    from weft.integrations.trainer import turn_on, with_weft
    from weft.job import Job, Optimizer
    from weft.parallel.data.gradients import clip_grad_norm_
    from weft.parallel.loss.labels import count_targets
    from weft.parallel.parallelize import parallelize
    from weft.parallel.runtime import runtime
    from weft.plan import Comm, Compute, Memory, Parallel, Pipeline, Plan, Precision
    from weft.planner.train import train
    from weft.topology.mesh import build_mesh
    from weft.training.own_checkpoints import export
    from weft.training.own_loop import Run
    from weft.training.prepare import init, load, prepare, save

    __version__: str

MODULES = {
    "build_mesh": "weft.topology.mesh",
    "CheckpointError": "weft.errors",
    "clip_grad_norm_": "weft.parallel.data.gradients",
    "Comm": "weft.plan",
    "compress_model": "weft.compress.report",
    "Compute": "weft.plan",
    "count_targets": "weft.parallel.loss.labels",
    "export": "weft.training.own_checkpoints",
    "init": "weft.training.prepare",
    "Job": "weft.job",
    "JobError": "weft.errors",
    "load": "weft.training.prepare",
    "materialize": "weft.checkpoint.loading",
    "Memory": "weft.plan",
    "ModelError": "weft.errors",
    "Optimizer": "weft.job",
    "Parallel": "weft.plan",
    "parallelize": "weft.parallel.parallelize",
    "Pipeline": "weft.plan",
    "Plan": "weft.plan",
    "PlanError": "weft.errors",
    "Precision": "weft.plan",
    "prepare": "weft.training.prepare",
    "Run": "weft.training.own_loop",
    "runtime": "weft.parallel.runtime",
    "save": "weft.training.prepare",
    "train": "weft.planner.train",
    "turn_on": "weft.integrations.trainer",
    "WeftAccelerator": "weft.integrations.accelerator",
    "WeftError": "weft.errors",
    "with_weft": "weft.integrations.trainer",
}
__all__ = [
    "CheckpointError",
    "Comm",
    "Compute",
    "Job",
    "JobError",
    "Memory",
    "ModelError",
    "Optimizer",
    "Parallel",
    "Pipeline",
    "Plan",
    "PlanError",
    "Precision",
    "Run",
    "WeftAccelerator",
    "WeftError",
    "__version__",
    "build_mesh",
    "clip_grad_norm_",
    "compress_model",
    "count_targets",
    "errors",
    "export",
    "init",
    "load",
    "materialize",
    "parallelize",
    "prepare",
    "runtime",
    "save",
    "train",
    "turn_on",
    "with_weft",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("weft.own_code").package_version()
    if name == "errors":
        return import_module("weft.errors")
    if name not in MODULES:
        raise AttributeError(f"module weft has no {name}; it has {', '.join(MODULES)}")
    return getattr(import_module(MODULES[name]), name)
