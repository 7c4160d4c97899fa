"""`accelerate.Accelerator` that counts data ranks: ranks of tp, cp and pp share rows, and are one to a script."""

from functools import partial
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.collectives import all_reduce
from weft.comm.objects import all_gather_json
from weft.errors import ModelError, PlanError
from weft.integrations.auto_plan import AutoPlan, plan_for_loop
from weft.integrations.loaders import check_rows, count_last_rows, has_tensors_only, load_by_data_rank
from weft.integrations.main_process import MainProcessCalls, collective_call
from weft.integrations.scheduler import PlacedScheduler
from weft.plan import Plan, refuse_run_keys, resolve_plan
from weft.topology.mesh import DATA_AXES, build_mesh, data_rank
from weft.training.same_inputs import compare_hosts, read_script_inputs

ROWS_CHECKED = 4
"""Number of forwards at the start that compare the rows of the ranks that share them."""


class DataRankAccelerator(Accelerator):
    """Batches, schedulers, metrics and sums of a script, by data rank."""

    main_process_calls: MainProcessCalls
    """Collective calls of the script, which rank 0 announces."""

    def __init__(self, plan: Plan | AutoPlan, device_type: str, *args: Any, **kwargs: Any):
        """
        Args:
            plan: plan, not resolved; or `AutoPlan`, which is chosen when the first model is prepared.
            device_type: type of the devices.
            args: arguments of `accelerate.Accelerator`.
            kwargs: arguments of `accelerate.Accelerator`.

        Raises:
            PlanError: the plan does not fit the number of ranks.
        """
        super().__init__(*args, **kwargs)
        self._device_type = device_type
        self._rows_to_check = ROWS_CHECKED
        self._auto = plan if isinstance(plan, AutoPlan) else None
        """Settings of a plan that is not chosen yet."""
        self.use_plan(Plan() if isinstance(plan, AutoPlan) else plan)

    def use_plan(self, plan: Plan) -> None:
        """Set the plan, before a model is prepared. Collective.

        Raises:
            PlanError: the plan does not fit the number of ranks.
        """
        refuse_run_keys(plan, type(self).__name__)
        parallel = resolve_plan(plan, dist.get_world_size(), native_bf16=False).parallel
        self.plan = plan.model_copy(update={"parallel": parallel})
        """Plan with its degrees; dtypes that it leaves open are chosen when a model is prepared."""
        self.mesh: DeviceMesh = build_mesh(self.plan, self._device_type, dist.get_world_size())
        self.data_rank, self.data_ranks = data_rank(self.mesh), parallel.data_ranks
        data_ranks = all_gather_json(self.data_rank)
        self.leaders = [data_ranks.index(number) for number in range(self.data_ranks)]
        """First rank of each data rank."""
        self.same_rows = [rank for rank, number in enumerate(data_ranks) if number == self.data_rank]
        """Ranks that share the rows of this one, in order, with this rank itself."""

    def choose_plan(self, *args: Any) -> None:
        """Choose the plan from the arguments of `prepare`, if it is not known and a model is among them. Collective.

        Raises:
            JobError: the hosts have other versions, code, model folders or rows.
            PlanError: no plan with one data rank per process fits in memory.
        """
        if not any(isinstance(one, nn.Module) for one in args):
            return
        compare_hosts(partial(read_script_inputs, *args))
        if self._auto is not None:
            auto, self._auto = self._auto, None
            self.use_plan(plan_for_loop(auto, args, self.gradient_accumulation_steps, str(self.mixed_precision)))

    @property
    def num_processes(self) -> int:
        """Number of data ranks: what a script multiplies its batch and its steps by. Ranks of tp, cp and pp share rows."""
        return self.data_ranks if hasattr(self, "data_ranks") else int(super().num_processes)

    @property
    def process_index(self) -> int:
        """Data rank, as `num_processes` counts data ranks; `is_main_process` is true on one rank."""
        return self.data_rank if hasattr(self, "data_rank") else int(super().process_index)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Give each data rank its batches, the same on all ranks of tp, cp and pp.

        Raises:
            PlanError: batches are dispatched by rank 0, and ranks share rows.
        """
        prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        if prepared or self.data_ranks == dist.get_world_size():
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        loader = load_by_data_rank(self, data_loader, device_placement)
        self._dataloaders.append(loader)
        return loader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler, which then steps once for each data rank in an update, as with plain data parallelism."""
        known = list(self._schedulers)
        prepared = super().prepare_scheduler(scheduler)
        if any(prepared is other for other in known):
            return prepared
        placed = PlacedScheduler(prepared, self.data_ranks)
        self._schedulers[self._schedulers.index(prepared)] = placed
        return placed

    def check_rows(self, inputs: Any) -> None:
        """Compare rows of the first forwards with those of the ranks that share them. Collective.

        Raises:
            ModelError: see `loaders.check_rows`.
        """
        if self._rows_to_check and self.data_ranks < dist.get_world_size():
            self._rows_to_check -= 1
            check_rows(inputs, self.data_rank, self.plan)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Split inputs over the ranks, where no ranks share rows.

        Raises:
            PlanError: ranks share rows.
        """
        if self.data_ranks < dist.get_world_size():
            raise PlanError(
                "accelerator.split_between_processes with ranks that share rows",
                where="plan.parallel",
                rule="ranks of tp, cp and pp run the same rows",
                fix="pass a prepared data loader, or set tp, cp and pp of the plan to 1",
            )
        return super().split_between_processes(inputs, apply_padding)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Not supported.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "accelerator.join_uneven_inputs",
            where="accelerator.join_uneven_inputs",
            rule="all ranks run the same number of batches, which the loaders of accelerator.prepare have",
            fix="leave it out, and keep even_batches=True",
        )

    def trigger_sync_in_backward(self, model: Any) -> None:
        """Not supported.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "accelerator.trigger_sync_in_backward",
            where="accelerator.trigger_sync_in_backward",
            rule="a forward decides whether its backward reduces gradients",
            fix="use accelerator.accumulate(model), or leave accelerator.no_sync before the last forward of a step",
        )

    def repeated_rows(self, rows: int) -> int:
        """Number of rows at the end of a batch of this rank that only fill it up, in the last batch of a prepared loader.

        Args:
            rows: rows of the batch.
        """
        remainder = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else -1
        return 0 if remainder <= 0 else rows - min(max(remainder - self.data_rank * rows, 0), rows)

    def mean_over_data_ranks(self, value: Tensor) -> Tensor:
        """Mean of a value over the data ranks. Collective."""
        return all_reduce(value.double(), self.mesh, DATA_AXES).to(value.dtype) / self.data_ranks

    @collective_call
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of all rows once, also where ranks of tp, cp and pp have the same rows. Collective."""
        count_last_rows(self.gradient_state.active_dataloader)
        if use_gather_object or not has_tensors_only(input_data):
            input_data = input_data if dist.get_rank() in self.leaders else []
        return super().gather_for_metrics(input_data, use_gather_object)

    @collective_call
    def gather(self, tensor: Any) -> Any:
        """Gather a tensor of every data rank, or nested tensors, along the first dim. Collective."""
        return accelerate.utils.recursively_apply(self.rows_once, super().gather(tensor))

    def rows_once(self, gathered: Tensor) -> Tensor:
        """Rows of each data rank once, in order.

        Args:
            gathered: rows that were gathered from all ranks, the same number from each.
        """
        parts = gathered.chunk(dist.get_world_size())
        return torch.cat([parts[rank] for rank in self.leaders])

    @collective_call
    def pad_across_processes(self, *args: Any, **kwargs: Any) -> Any:
        """Pad tensors to the size of the largest one of all ranks; see `accelerate`. Collective."""
        return super().pad_across_processes(*args, **kwargs)

    @collective_call
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or mean of a tensor of every data rank, or of nested tensors. Collective."""

        def reduced(own: Tensor) -> Tensor:
            total = all_reduce(own.to(self.device, copy=True), self.mesh, DATA_AXES)
            return (total / self.data_ranks if reduction == "mean" else total) * scale

        return accelerate.utils.recursively_apply(reduced, tensor)
