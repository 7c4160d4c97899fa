"""`weft run`: a user's script, unchanged, under a plan.

Before the script runs, the names `accelerate.Accelerator` and `transformers.Trainer` are bound to subclasses with the plan. TRL
and a user's own trainers inherit from them; no method of a library is replaced.
"""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import transformers
from accelerate.local_sgd import LocalSGD

from weft.errors import ModelError
from weft.integrations.accelerator import WeftAccelerator
from weft.integrations.auto_plan import AutoPlan
from weft.integrations.optimizer import refuse_untrained
from weft.integrations.trainer import with_weft
from weft.parallel.data.outside_calls import explain_shards
from weft.plan import Plan


def run_script(script: Path, arguments: Sequence[str], plan: Plan | AutoPlan) -> None:
    """Run a script as `python script arguments` does, with its trainers and accelerators under a plan.

    Args:
        script: Python file.
        arguments: command-line arguments of the script.
        plan: plan of all models that the script trains, or `AutoPlan`, which chooses one for each trainer.

    Raises:
        CheckpointError: the last checkpoint could not be written; the same on every rank.
        ModelError: the script computes with shards and full tensors, or averages weights by LocalSGD.
        NumericError: the updates of all steps were skipped; the same on every rank.
    """
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))  # as python does
    try:
        with bound_to(plan) as newest:
            ended: SystemExit | None = None
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as error:
                if error.code:
                    raise
                ended = error
            except RuntimeError as error:
                explain_shards(error)
                raise
            for accelerator in newest:
                accelerator.main_process_calls.end()  # rank 0 may still save
                accelerator.training_state.finish()  # a checkpoint that could not be written is an error of the script
                refuse_untrained(accelerator._optimizers, str(script))
            if ended is not None:
                raise ended
    finally:
        sys.argv, sys.path[:] = before


class NoLocalSGD(LocalSGD):
    """`accelerate.local_sgd.LocalSGD`, which is refused."""

    def __init__(self, *args: Any, **kwargs: Any):
        """
        Raises:
            ModelError: always.
        """
        raise ModelError(
            "LocalSGD",
            where="accelerate.local_sgd",
            rule="all data ranks have the same weights after each update",
            fix="leave LocalSGD out; gradient_accumulation_steps of the Accelerator reduces gradients less often",
        )


@contextmanager
def bound_to(plan: Plan | AutoPlan) -> Iterator[list[WeftAccelerator]]:
    """Context in which `accelerate.Accelerator` and `transformers.Trainer` name the classes of Weft.

    Yields:
        List with the newest accelerator that the script has made, if any.
    """
    newest: list[WeftAccelerator] = []
    accelerator = type("WeftAccelerator", (WeftAccelerator,), {"default_plan": plan, "newest": newest})
    trainer = with_weft(transformers.Trainer, plan)
    names = [
        (accelerate, "Accelerator", accelerator),
        (accelerate.accelerator, "Accelerator", accelerator),
        (accelerate.local_sgd, "LocalSGD", NoLocalSGD),
        (sys.modules["transformers"], "Trainer", trainer),  # it replaces itself there, also after its first import
        (transformers.trainer, "Trainer", trainer),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    for module, name, replacement in names:
        setattr(module, name, replacement)
    try:
        yield newest
    finally:
        for module, name, original in before:
            setattr(module, name, original)
