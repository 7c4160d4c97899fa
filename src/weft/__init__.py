"""Weft: distributed training of existing PyTorch models, fast and in little memory.

Public names are imported on first use, so that Plan and Job need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.checkpoint.huggingface import materialize
    from weft.job import Job
    from weft.parallel.gradients import clip_grad_norm_
    from weft.parallel.labels import count_targets
    from weft.parallel.parallelize import parallelize
    from weft.parallel.runtime import runtime
    from weft.plan import Plan
    from weft.topology.mesh import build_mesh
    from weft.train.own_loop import Run
    from weft.train.prepare import init, prepare
    from weft.train.run import train

    __version__: str

MODULES = {
    "Job": "weft.job",
    "Plan": "weft.plan",
    "build_mesh": "weft.topology.mesh",
    "clip_grad_norm_": "weft.parallel.gradients",
    "count_targets": "weft.parallel.labels",
    "materialize": "weft.checkpoint.huggingface",
    "init": "weft.train.prepare",
    "parallelize": "weft.parallel.parallelize",
    "prepare": "weft.train.prepare",
    "Run": "weft.train.own_loop",
    "runtime": "weft.parallel.runtime",
    "train": "weft.train.run",
}
__all__ = [
    "Job",
    "Plan",
    "Run",
    "__version__",
    "build_mesh",
    "clip_grad_norm_",
    "count_targets",
    "init",
    "materialize",
    "parallelize",
    "prepare",
    "runtime",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("weft-train")
    if name not in MODULES:
        raise AttributeError(f"module weft has no {name}; it has {', '.join(MODULES)}")
    return getattr(import_module(MODULES[name]), name)
