"""Loading of checkpoints into any layout: each rank reads exactly the tensor slices that it holds."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.boxes import find_tiling_error
from weft.checkpoint.folders import list_checkpoints, set_aside, step_of
from weft.checkpoint.layouts import Parts, slice_key
from weft.checkpoint.manifest import (
    Manifest,
    TensorEntry,
    file_name,
    read_manifest,
    verification_error,
    verify_file,
    verify_names,
)
from weft.checkpoint.parameter_groups import restore_counters
from weft.checkpoint.shard_file import SAFETENSORS_DTYPES, torch_dtype
from weft.checkpoint.slices import (
    PER_RANK_KINDS,
    TensorSlice,
    model_slices,
    named_weights,
    optimizer_slices,
    set_rng_states,
)
from weft.comm.objects import all_gather_json, broadcast_json, run_together
from weft.device.device import Device
from weft.errors import CheckpointError, UnreadableError
from weft.optimizers.adafactor import Adafactor
from weft.optimizers.one_bit_adam import OneBitAdam
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.runtime import runtime


class Reader:
    """Reader of tensor slices from a verified checkpoint. Context manager; files are memory-mapped."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.files: dict[str, Any] = {}
        self.layouts: dict[int, Parts] = {}
        self.found: dict[Any, tuple[Parts, np.ndarray, np.ndarray]] = {}
        self.stack = ExitStack()

    def entry(self, name: str) -> TensorEntry:
        """Manifest entry of a tensor.

        Raises:
            CheckpointError: the checkpoint does not have the tensor.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"there is no tensor {name}",
                where=str(self.folder),
                rule="a checkpoint is loaded into the model that wrote it, under any plan",
                fix="compare model.config with the job in the manifest of the checkpoint",
            )
        return entry

    def parts(self, name: str) -> Parts:
        """Slices of a tensor."""
        layout = self.entry(name).layout
        if layout is None:
            return self.manifest.parts(name)
        if layout not in self.layouts:
            self.layouts[layout] = self.manifest.parts(name)
        return self.layouts[layout]

    def files_of(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> set[str]:
        """Names of the files that hold a slice."""
        return {file_name(number) for number in self._intersections(name, offset, shape)[0].files.tolist()}

    def _intersections(
        self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[Parts, np.ndarray, np.ndarray]:
        """Saved slices that intersect a requested one; a rank requests the same slice of many tensors of a layout."""
        key = self.entry(name).layout, offset, shape
        if key[0] is None:
            return self.parts(name).intersect(offset, shape)
        if key not in self.found:
            self.found[key] = self.parts(name).intersect(offset, shape)
        return self.found[key]

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a slice of a tensor into host memory, in the dtype in which it was saved.

        Args:
            offset: index of the first element of the slice in the full tensor; by default 0 along each dim.
            shape: shape of the slice; by default the full shape.

        Raises:
            CheckpointError: the tensor does not exist, the slice is not inside it, or a file differs from the manifest.
        """
        entry = self.entry(name)
        offset, shape = offset or (0,) * len(entry.shape), entry.shape if shape is None else shape
        parts, lows, highs = self._intersections(name, offset, shape)
        # The slices tile the requested one, so that each element is read exactly once.
        if find_tiling_error(lows, highs, shape):
            raise verification_error(self.folder, f"the saved slices of {name} do not tile a slice of shape {shape}")
        output = torch.empty(shape, dtype=torch_dtype(entry.dtype, f"{self.folder}, {name}"))
        for file, start, size, low, high in zip(*parts, lows, highs, strict=True):
            inside = tuple(slice(*ends) for ends in zip(low - start, high - start, strict=True))
            target = tuple(slice(*ends) for ends in zip(low - offset, high - offset, strict=True))
            output[target] = self._read_part(entry, name, int(file), start, size, inside)
        return output

    def _read_part(
        self, entry: TensorEntry, name: str, number: int, start: np.ndarray, size: np.ndarray, inside: tuple[slice, ...]
    ) -> Tensor:
        """Read a range of a saved slice from its file."""
        file, key = file_name(number), slice_key(name, start.tolist(), size.tolist(), entry.shape)
        try:
            if file not in self.files:
                self.files[file] = self.stack.enter_context(safe_open(self.folder / file, "pt"))
            saved = self.files[file].get_slice(key)
            if (saved.get_dtype(), saved.get_shape()) == (entry.dtype, size.tolist()):
                return saved[inside] if inside else self.files[file].get_tensor(key)
            problem = f"{key} is {saved.get_dtype()} of shape {saved.get_shape()}"
        except (SafetensorError, OSError) as error:
            problem = str(error)
        raise verification_error(self.folder, f"{file} differs from the manifest: {problem}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()


def verify_together(folder: Path, key: bytes | None = None) -> Manifest:
    """Verify every byte of a checkpoint, with the files divided over the ranks. All ranks must call this function.

    Args:
        folder: checkpoint folder.
        key: key that signed the manifest.

    Raises:
        CheckpointError: raised on every rank if verification failed; the message names the first bad file.
        UnreadableError: raised on every rank if a rank cannot read a file.
    """

    def verify() -> Manifest:
        manifest = read_manifest(folder, key, (dist.get_rank(), dist.get_world_size()))
        problem = verify_names(folder, manifest)
        for name, file in list(manifest.files.items())[dist.get_rank() :: dist.get_world_size()]:
            problem = problem or verify_file(folder, name, file)
        if problem:
            raise verification_error(folder, problem)
        return manifest

    return run_together(verify)


def first_valid_checkpoint(
    candidates: Iterable[Path], log: Callable[[str], None], key: bytes | None = None
) -> tuple[Path, Manifest] | None:
    """First candidate that passes verification; None if there is none. All ranks must call this function.

    Args:
        candidates: checkpoint folders, most preferred first; the list of rank 0 is used on all ranks.
        log: called on every rank with a line for each candidate that is refused.
        key: key that signed the manifests.

    Raises:
        UnreadableError: a candidate cannot be read, so that it is not known whether it is good.
    """
    for name in broadcast_json([str(path) for path in candidates]):
        folder = Path(name)
        try:
            return folder, verify_together(folder, key)
        except UnreadableError:
            raise
        except CheckpointError as error:
            log(f"{folder.name} is skipped: {error.what}")
    return None


def archive_newer(run: Path, chosen: Path | None, step: int, log: Callable[[str], None]) -> None:
    """Rename the checkpoints whose steps will be trained again. Only one rank calls this function.

    Args:
        run: run folder.
        chosen: checkpoint from which training continues; None if it is not in the run folder.
        step: last completed step; checkpoints of later steps, and other checkpoints of this step, are renamed.
        log: called with a line for each renamed checkpoint.
    """
    for folder in list_checkpoints(run):
        is_other = chosen is None or not folder.samefile(chosen)
        if step_of(folder) > step or (step_of(folder) == step and is_other):
            log(f"{folder.name} is now {set_aside(folder).name}")


def restore_training(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    device: Device,
    reader: Reader,
    fetch: Callable[[set[str]], None] = lambda files: None,
) -> str | None:
    """Restore the full training state; random number generators only with the same number of ranks. Collective.

    Args:
        model: parallelized model with allocated memory.
        optimizer: optimizer of the model's parameters; existing state is overwritten.
        reader: reader of a verified checkpoint.
        fetch: called once on every rank with the names of the files that this rank will read.

    Returns:
        Message about state that was reset, the same on all ranks; None if nothing was lost.

    Raises:
        CheckpointError: see `restore`.
    """
    generators, feedback = (own_tensors(reader.manifest, kind, dist.get_rank()) for kind in PER_RANK_KINDS)
    same_ranks = dist.get_world_size() == reader.manifest.world_size
    names = generators + feedback if same_ranks else []
    own = {file_name(number) for name in names for number in reader.parts(name).files.tolist()}
    restore(model, optimizer, reader, lambda files: fetch(files | own))
    restore_counters(model, optimizer.inner, reader.manifest.position.parameter_groups)
    message = restore_feedback(model, optimizer, reader)
    if same_ranks:
        set_rng_states(device, {name: reader.read(name) for name in generators})
    return message


def restore(
    model: nn.Module, optimizer: DistributedOptimizer, reader: Reader, fetch: Callable[[set[str]], None]
) -> None:
    """Load a checkpoint of any layout into a parallelized model and its optimizer, in place.

    Args:
        model: parallelized model with allocated memory.
        optimizer: optimizer of the model's parameters; existing state is overwritten.
        reader: reader of a verified checkpoint.
        fetch: called once on every rank with the names of the files that this rank will read.

    Raises:
        CheckpointError: the checkpoint lacks a tensor of the model, or has it in another shape or dtype.
    """
    check_model(model, reader)
    if (relocation := runtime(model).relocation) is not None:  # before the weights, which are read into homes
        relocation.restore(reader.manifest.position.experts)
    allocate_state(model, optimizer, reader.manifest)
    _read_slices(model_slices(model) + optimizer_slices(model, optimizer.inner), reader, fetch)


def check_model(model: nn.Module, reader: Reader) -> None:
    """Refuse a checkpoint of another model, before anything of a training state is changed. Collective.

    Raises:
        CheckpointError: the checkpoint lacks a weight of the model, has it in another shape or dtype, or has further weights;
            the same on every rank.
    """
    slices = model_slices(model)
    run_together(lambda: _check_slices(slices, reader))
    run_together(lambda: _check_empty_buffers(model, reader))
    own = {item.name for item in slices}
    saved = [name for name in reader.manifest.tensors if name.startswith("weights/")]
    missing = [index for index, name in enumerate(saved) if name not in own]
    further = set(missing).intersection(*all_gather_json(missing))  # a stage has the weights of its blocks only
    if further:
        raise CheckpointError(
            f"the checkpoint has {len(further)} weights that the model does not have, such as "
            f"{saved[min(further)].removeprefix('weights/')}",
            where=str(reader.folder),
            rule="a checkpoint is loaded into the model that wrote it, under any plan",
            fix="compare model.config with the job in the manifest of the checkpoint",
        )


def restore_weights(model: nn.Module, reader: Reader) -> None:
    """Load the weights of a checkpoint of any layout into a parallelized model, in place. Collective.

    Raises:
        CheckpointError: see `check_model`.
    """
    check_model(model, reader)
    _read_slices(model_slices(model), reader, lambda files: None)


def _read_slices(slices: list[TensorSlice], reader: Reader, fetch: Callable[[set[str]], None]) -> None:
    """Read tensor slices of this rank from a checkpoint, in place; if a rank lacks one, all ranks raise the error."""
    run_together(lambda: _check_slices(slices, reader))  # a stage may lack what another has
    fetch(
        {
            name
            for tensor_slice in slices
            for name in reader.files_of(tensor_slice.name, tensor_slice.offset, tuple(tensor_slice.tensor.shape))
        }
    )
    with torch.no_grad():
        for tensor_slice in slices:
            tensor_slice.tensor.copy_(
                reader.read(tensor_slice.name, tensor_slice.offset, tuple(tensor_slice.tensor.shape))
            )


def restore_feedback(model: nn.Module, optimizer: DistributedOptimizer, reader: Reader) -> str | None:
    """Restore the error feedback of compressed collectives if the layout is unchanged, and reset it otherwise.

    Args:
        model: parallelized model.
        optimizer: optimizer of the model's parameters, already restored.
        reader: reader of the checkpoint; the files of `own_tensors` must be available.

    Returns:
        Message about a reset, the same on all ranks; None if nothing was lost.
    """
    feedback, plan, manifest = runtime(model).feedback, runtime(model).plan, reader.manifest
    if feedback is None:
        return None
    same = manifest.world_size == dist.get_world_size() and _reductions(manifest.job["plan"]) == _reductions(
        plan.model_dump(mode="json")
    )
    own = own_tensors(manifest, "feedback", dist.get_rank()) if same else []
    feedback.load({name.split("/", 2)[2]: reader.read(name) for name in own})
    if isinstance(optimizer.inner, OneBitAdam) and not same:
        optimizer.inner.restart_momenta()
    if same or not any(name.startswith("feedback/") for name in manifest.tensors):
        return None
    return "error feedback is reset: the checkpoint has another layout"


def own_tensors(manifest: Manifest, kind: str, rank: int) -> list[str]:
    """Names of the per-rank tensors of a rank; kind is "rng" or "feedback"."""
    return [name for name in manifest.tensors if name.startswith(f"{kind}/{rank:05d}/")]


def _reductions(plan: dict[str, Any]) -> list[Any]:
    """Settings of a plan on which the compressed gradient collectives depend."""
    comm = plan.get("comm", {})
    return [plan["parallel"], plan["pipeline"], *map(comm.get, ("compression", "compress_scope", "error_feedback"))]


def allocate_state(model: nn.Module, optimizer: DistributedOptimizer, manifest: Manifest) -> None:
    """Allocate the optimizer state that a checkpoint has for each parameter, in the layout of the parameter."""
    by_weight: dict[str, list[str]] = {}
    for name in manifest.tensors:
        kind, _, weight = name.partition("/")
        if kind not in ("weights", "buffers", *PER_RANK_KINDS):
            by_weight.setdefault(weight, []).append(kind)
    own = set(map(id, optimizer.parameters))
    for name, parameter in named_weights(model, runtime(model).anatomy).items():
        if id(parameter) not in own:
            continue
        state = optimizer.state[parameter]
        # Its states have other shapes than the parameter.
        if name in by_weight and isinstance(optimizer.inner, Adafactor):
            optimizer.inner.init_state(parameter)
        for kind in by_weight.get(name, []):
            entry = manifest.tensors[f"{kind}/{name}"]
            dtype = torch_dtype(entry.dtype, f"{kind}/{name}")
            if kind not in state and entry.shape:
                state[kind] = torch.zeros_like(parameter.detach(), dtype=dtype)
            elif kind not in state:
                device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
                state[kind] = torch.zeros((), dtype=dtype, device=device)
        optimizer.placement.place(parameter)


def _check_empty_buffers(model: nn.Module, reader: Reader) -> None:
    """Refuse a buffer that has grown since the model was made, of which `model_slices` has no slice to compare."""
    for name in [name for name, buffer in model.named_buffers() if buffer.numel() == 0]:
        entry = reader.manifest.tensors.get(f"buffers/{name}")
        if entry is not None and math.prod(entry.shape) > 0:
            raise CheckpointError(
                f"buffers/{name} is of shape {entry.shape}; in the model it is empty",
                where=str(reader.folder),
                rule="a buffer keeps its shape in training",
                fix="give the buffer its final shape when the model is made, or keep what grows outside of the model",
            )


def _check_slices(slices: list[TensorSlice], reader: Reader) -> None:
    for tensor_slice in slices:
        entry, dtype = reader.entry(tensor_slice.name), SAFETENSORS_DTYPES[tensor_slice.tensor.dtype]
        if (entry.dtype, entry.shape) != (dtype, tensor_slice.full_shape):
            raise CheckpointError(
                f"{tensor_slice.name} is {entry.dtype} of shape {entry.shape}; "
                f"in the model it is {dtype} of shape {tensor_slice.full_shape}",
                where=str(reader.folder),
                rule="a checkpoint is loaded into the model that wrote it, with the same plan.precision.update",
                fix="compare the job with the job in the manifest of the checkpoint",
            )
