"""`WeftStrategy`: a loop of Lightning Fabric under a plan.

    fabric = Fabric(accelerator="auto", devices=8, strategy=WeftStrategy("plan.toml"))   # started by torchrun or srun
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

The strategy hands models and optimizers to a `WeftAccelerator`; rows and reductions are by data rank.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import CheckpointError, JobError
from weft.integrations.accelerator import WeftAccelerator
from weft.integrations.script_state import from_text_keys, with_text_keys
from weft.integrations.versions import check_versions
from weft.plan import Plan
from weft.training.prepare import init

try:
    from lightning_fabric.strategies import DDPStrategy
    from lightning_fabric.strategies.strategy import _BackwardSyncControl
except ImportError:  # the package lightning has the same classes under this name
    from lightning.fabric.strategies import DDPStrategy  # type: ignore[no-redef,unused-ignore]
    from lightning.fabric.strategies.strategy import _BackwardSyncControl  # type: ignore[no-redef,unused-ignore]

REDUCTIONS: dict[Any, str] = {
    **dict.fromkeys((None, "mean", "avg", dist.ReduceOp.AVG), "mean"),
    **dict.fromkeys(("sum", dist.ReduceOp.SUM), "sum"),
}
"""Reductions of Fabric that Weft has, by their names."""


class WeftStrategy(DDPStrategy):
    """Strategy of Lightning Fabric whose models run under a plan without a pipeline."""

    def __init__(self, plan: Plan | str | Path | None = None, **kwargs: Any):
        """
        Args:
            plan: plan, or the path of a TOML file with a plan; None: ZeRO stage 3 over all ranks, 0 for one.
            kwargs: arguments of `DDPStrategy` of Lightning Fabric.
        """
        check_versions()
        super().__init__(**kwargs)
        self._backward_sync_control = _NoSync(self)
        self.plan = plan
        self.weft: Any
        """`WeftAccelerator` of the loop, made when Fabric is launched."""

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        if self.precision.precision != "32-true":
            raise JobError(
                f"Fabric(precision={self.precision.precision!r}) with WeftStrategy",
                where="precision",
                rule="the plan decides about dtypes",
                fix="leave precision out, and set plan.precision.param_dtype",
            )
        init()
        if dist.get_world_size() != self.world_size:
            raise JobError(
                f"{dist.get_world_size()} ranks have joined, and Fabric has {self.world_size}",
                where="Fabric",
                rule="a launcher starts the ranks before Fabric does, as many as devices x num_nodes",
                fix=f"torchrun --nproc-per-node {self.num_processes} script.py",
            )
        self.weft = WeftAccelerator(plan=self.plan, cpu=self.root_device.type == "cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of data ranks, and the data rank: ranks of tp and cp have the same rows."""
        return {"num_replicas": self.weft.data_ranks, "rank": self.weft.data_rank}

    # Preparation

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        """Parallelize a model, and let its optimizers update the shards. Collective."""
        prepared, *placed = self.weft.prepare(module, *optimizers)
        return prepared, placed, scheduler

    def setup_module(self, module: nn.Module) -> Any:
        """Parallelize a model that is not trained. Collective."""
        return self.weft.prepare_model(module, evaluation_mode=True)

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Not supported: `fabric.setup(model, optimizer)` takes both.

        Raises:
            JobError: always.
        """
        raise JobError(
            "fabric.setup_optimizers with WeftStrategy",
            where="fabric.setup_optimizers",
            rule="an optimizer is set up together with its model",
            fix="call fabric.setup(model, optimizer)",
        )

    # Backward and update

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward from a loss."""
        self.weft.backward(tensor, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Update the shards. Collective."""
        return optimizer.step(**kwargs)

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        """Clip the global gradient norm; an update whose gradients are not finite is skipped. Collective."""
        return self.weft.clip_grad_norm_(module.parameters(), max_norm, norm_type)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Clip each gradient."""
        self.weft.clip_grad_value_(module.parameters(), clip_val)

    # Collectives by data rank

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Sum or mean over the data ranks. Collective.

        Raises:
            JobError: another reduction.
        """
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        if name not in REDUCTIONS:
            raise JobError(
                f"fabric.all_reduce with reduce_op = {reduce_op}",
                where="fabric.all_reduce",
                rule="values of the data ranks are summed or averaged",
                fix='pass reduce_op="sum" or "mean"; or reduce the result of fabric.all_gather',
            )
        return self.weft.reduce(tensor, REDUCTIONS[name])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks, or any of them, have decided so. Collective."""
        total = self.all_reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return int(total) == self.weft.data_ranks if all else int(total) > 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor of every data rank. Collective."""
        return self.weft.gather(tensor[None].contiguous())

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Collective."""
        self.weft.wait_for_everyone()

    # Results

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Full weights on rank 0; empty on the other ranks. Collective."""
        return self.weft.get_state_dict(module)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save the training state of all models, and other values that JSON can hold, in a folder. Collective.

        Without an optimizer in `state`, full weights are saved in a file, as by other strategies.
        """
        if not any(isinstance(value, torch.optim.Optimizer) for value in state.values()):
            super().save_checkpoint(path, state, storage_options, filter)
            return
        others = {
            name: value for name, value in state.items() if not isinstance(value, nn.Module | torch.optim.Optimizer)
        }
        plain = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in others.items()}
        step = max(optimizer.steps for optimizer in self.weft._optimizers)
        with self.weft.training_state.replacing(path) as place:
            self.weft.training_state.save(place, step, with_text_keys(plain))
            self.weft.training_state.finish()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` has saved with optimizers, under any plan. Collective.

        Returns:
            Values of the checkpoint that `state` does not have.

        Raises:
            CheckpointError: the folder has no training state of Weft.
        """
        if not self.weft.training_state.is_in(path):
            raise CheckpointError(
                "a checkpoint without the training state of Weft",
                where=str(path),
                rule="fabric.load reads a folder that fabric.save has written, with a model and its optimizer in state",
                fix="load weights into the model before fabric.setup",
            )
        found = from_text_keys(self.weft.training_state.load(path))
        for name in [name for name in state or () if name in found]:
            value = found.pop(name)
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(value)
            else:
                state[name] = value
        return found


class _NoSync(_BackwardSyncControl):
    """Context of `fabric.no_backward_sync`, around forward and backward."""

    def __init__(self, strategy: WeftStrategy):
        self.strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        return self.strategy.weft.no_sync(module) if enabled else nullcontext()
