"""Writer of folders of torch.distributed.checkpoint (DCP), through torch's own planner and file writer.

    NAME                                    weights and saved buffers, by name in the model's state_dict
    optimizer.state.NAME.exp_avg            states of the optimizer, by name of the parameter
    optimizer.param_groups.NAME.lr          settings, with StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer.param_groups.0.lr, .0.params  the same settings, as get_optimizer_state_dict gives them without options
    train_state.step, .ntokens_seen         position of training

These are the entries of a checkpoint of torchtitan, without its data loader and its schedule of learning rates.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft.checkpoint.manifest import Manifest
from weft.checkpoint.parameter_groups import NAMES
from weft.checkpoint.shard_file import check_free_space
from weft.checkpoint.sources import TensorSource, file_groups

NOT_SAVED = {"foreach": None, "fused": None, "maximize": False}
"""Settings that every optimizer of torch has, and a manifest has not if they are None or the optimizer is one of Weft."""


class _Planner(torch_dcp.DefaultSavePlanner):
    """Plan of a state_dict of tensors on the meta device, which are read when they are written."""

    def __init__(self, names: dict[str, str], read: Callable[[str], Tensor]):
        super().__init__()
        self.names = names
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.read(self.names[index.fqn]) if index.fqn in self.names else super().lookup_object(index)


class _Writer(torch_dcp.FileSystemWriter):
    """Writer of several files one after the other, because torch's keeps all tensors of a file until the file is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for index, items in enumerate(file_groups(plan.items, _bytes)):
            prefix = replace(plan.storage_data, prefix=f"__{index}_")  # as if another rank had written it
            results += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0


def write_dcp(tensors: TensorSource, weights: dict[str, str], manifest: Manifest | None, folder: Path) -> None:
    """Write a DCP folder that `torch.distributed.checkpoint.load` reads without Weft, on any number of ranks.

    Args:
        tensors: weights, buffers and optimizer states. They keep their dtypes, and are read when they are written.
        weights: result of `state_names` for the model. A tied weight is written under each of its names, as torch does.
        manifest: manifest of the checkpoint of the tensors; None of other folders, whose weights are written alone.
        folder: new folder.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: a file cannot be written, or the disk has too little space.
    """
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.specs.items()}
    names = dict(weights)
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in empty.items() if manifest is not None else ():
        kind, _, weight = name.partition("/")
        if kind not in ("weights", "buffers"):
            states.setdefault(weight, {})[kind] = tensor
            names[f"optimizer.state.{weight}.{kind}"] = name
    state: dict[str, Any] = {key: empty[name] for key, name in weights.items()}
    if manifest is not None and states:
        position, job = manifest.position, manifest.job
        seen = position.next_batch * job["train"]["global_batch_size"] * job["data"]["seq_len"]
        state["train_state"] = {"step": position.step, "ntokens_seen": seen}
        state["optimizer"] = {"state": states, **_settings(manifest)}
    save_lazily(state, _Planner(names, tensors.read), folder, sum(empty[name].nbytes for name in names.values()))


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Settings of parameter groups in both forms of torch; a converted checkpoint has none."""
    groups = []
    for saved in manifest.position.parameter_groups:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
        names = list(values.pop(NAMES, ()))
        # Schedules of torch keep the peak of the learning rate in the groups.
        groups.append({"params": names, **NOT_SAVED, "initial_lr": manifest.job["optimizer"]["lr"], **values})
    flat = {
        f"param_groups.{name}.{key}": value
        for group in groups
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {"param_groups": groups, **flat} if groups else {}


def save_lazily(state: dict[str, Any], planner: SavePlanner, folder: Path, size: int) -> None:
    """Write a DCP folder in this process alone, with at most FILE_BYTES of tensors, or the largest one, in memory.

    Args:
        state: state_dict that the planner plans.
        planner: planner whose `resolve_data` reads a tensor.
        folder: new folder.
        size: bytes of all tensors.

    Raises:
        OSError: a file cannot be written, or the disk has too little space; errors of the planner are raised as they are.
    """
    folder.mkdir()
    check_free_space(folder, size)
    writer = _Writer(folder, thread_count=1, overwrite=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as no_dist says
        try:
            torch_dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # no Exception: torch wraps what reading or writing has raised
            raise next(iter(error.failures.values()))[0] from None
