"""Reading checkpoints back, into any layout: each rank reads the boxes that it holds from the files that they lie in."""

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

from weft.anatomy.roles import Anatomy
from weft.checkpoint.boxes import find_fault
from weft.checkpoint.folders import list_checkpoints, set_aside, step_of
from weft.checkpoint.manifest import Entry, Manifest, Part, read_manifest, refused, verify_file, verify_names
from weft.checkpoint.shard_file import FORMATS, torch_format
from weft.checkpoint.slices import OF_RANKS, TensorSlice, model_pieces, named_weights, optimizer_pieces
from weft.comm.objects import all_gather_json, broadcast_json
from weft.errors import CheckpointError
from weft.plan import Plan


class Reader:
    """Reads boxes of tensors from a checkpoint that has been verified. A context manager; files are mapped, not loaded."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.files: dict[str, Any] = {}
        self.stack = ExitStack()

    def entry(self, name: str) -> Entry:
        """What the manifest says of a tensor.

        Raises:
            CheckpointError: it is not there.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"there is no tensor {name}",
                where=str(self.folder),
                rule="a checkpoint is read by the model that wrote it, under any plan",
                fix="compare model.config with the job in the checkpoint's manifest",
            )
        return entry

    def files_of(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> set[str]:
        """The files that a box lies in."""
        return {part.file for part, _, _ in _boxes(self.entry(name), offset, shape)}

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """A box of a tensor, on the host, in the format in which it was saved; without offset and shape the whole of it.

        Raises:
            CheckpointError: there is no such tensor, the box is not inside of it, or a file does not hold what its manifest
                says.
        """
        entry = self.entry(name)
        offset, shape = offset or (0,) * len(entry.shape), entry.shape if shape is None else shape
        boxes = _boxes(entry, offset, shape)
        self._check_cover(name, shape, boxes)
        whole = torch.empty(shape, dtype=torch_format(entry.format, f"{self.folder}, {name}"))
        for part, low, high in boxes:
            inside = tuple(slice(*ends) for ends in zip(low - part.offset, high - part.offset, strict=True))
            target = tuple(slice(*ends) for ends in zip(low - offset, high - offset, strict=True))
            whole[target] = self._slice(part, entry, inside)
        return whole

    def _check_cover(self, name: str, shape: tuple[int, ...], boxes: list[tuple[Part, Any, Any]]) -> None:
        """That boxes do not overlap and together are the whole: then every number is read, once."""
        lows, highs = (np.array([box[i] for box in boxes]).reshape(len(boxes), len(shape)) for i in (1, 2))
        if find_fault(lows, highs, shape):
            raise refused(self.folder, f"the parts of {name} do not make up a box of shape {shape}")

    def _slice(self, part: Part, entry: Entry, inside: tuple[slice, ...]) -> Tensor:
        try:
            if part.file not in self.files:
                self.files[part.file] = self.stack.enter_context(safe_open(self.folder / part.file, "pt"))
            found = self.files[part.file].get_slice(part.key)
            if (found.get_dtype(), tuple(found.get_shape())) == (entry.format, part.shape):
                return found[inside] if inside else self.files[part.file].get_tensor(part.key)
            problem = f"{part.key} is {found.get_dtype()} of shape {found.get_shape()}"
        except (SafetensorError, OSError) as error:
            problem = str(error)
        raise refused(self.folder, f"{part.file} does not hold what the manifest says: {problem}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()


def _boxes(entry: Entry, offset: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[Part, np.ndarray, np.ndarray]]:
    """The parts of a tensor that a box meets, with the ends of what they have in common."""
    begin = np.array(offset, np.int64)
    found = []
    for part in entry.parts:
        low = np.maximum(np.array(part.offset, np.int64), begin)
        high = np.minimum(np.array(part.offset, np.int64) + part.shape, begin + shape)
        if (low < high).all():
            found.append((part, low, high))
    return found


def verify_together(folder: Path, key: bytes | None = None) -> Manifest:
    """Check every byte of a checkpoint, each rank a share of the files. Every rank must call it.

    Args:
        key: that its manifest was written with.

    Raises:
        CheckpointError: on every rank, with the first file that is not as it was written.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    problem, manifest = None, None
    try:
        manifest = read_manifest(folder, key)
        problem = verify_names(folder, manifest)
        for name, file in list(manifest.files.items())[rank::world_size]:
            problem = problem or verify_file(folder, name, file)
    except CheckpointError as error:
        problem = error.what
    problems = [text for text in all_gather_json(problem) if text]
    if problems or manifest is None:
        raise refused(folder, problems[0])
    return manifest


def choose(
    candidates: Iterable[Path], say: Callable[[str], None], key: bytes | None = None
) -> tuple[Path, Manifest] | None:
    """The first of some checkpoints that verifies; None where none does. Every rank must call it.

    Args:
        candidates: folders, the best first; those of rank 0 count.
        say: told what was passed over and why, on every rank.
        key: that their manifests were written with.
    """
    for name in broadcast_json([str(path) for path in candidates]):
        folder = Path(name)
        try:
            return folder, verify_together(folder, key)
        except CheckpointError as error:
            say(f"{folder.name} is passed over: {error.what}")
    return None


def archive_newer(run: Path, chosen: Path | None, step: int, say: Callable[[str], None]) -> None:
    """Set checkpoints aside whose steps come again, when training goes on after a step. For one rank."""
    for folder in list_checkpoints(run):
        another = chosen is None or not folder.samefile(chosen)
        if step_of(folder) > step or (step_of(folder) == step and another):
            say(f"{folder.name} is now {set_aside(folder).name}")


def restore(
    model: nn.Module,
    anatomy: Anatomy,
    optimizer: torch.optim.Optimizer,
    reader: Reader,
    provide: Callable[[set[str]], None],
    settle: Callable[[nn.Parameter], object] = lambda parameter: None,
) -> None:
    """Give a parallelized model and its optimizer the state of a checkpoint, in place, whatever layout wrote it.

    Args:
        model: parallelized; its memory exists, its contents do not matter.
        anatomy: of the whole model.
        optimizer: over its parameters; a state that it has already is overwritten.
        reader: of a verified checkpoint.
        provide: called once, on every rank, with the names of the files that this rank reads.
        settle: called with each parameter when its states are there, before they have values; may move them.

    Raises:
        CheckpointError: the checkpoint lacks a tensor of the model, or has it in another shape or format.
    """
    make_state(model, anatomy, optimizer, reader.manifest, settle)
    pieces = model_pieces(model, anatomy) + optimizer_pieces(model, anatomy, optimizer)
    for piece in pieces:
        _check(piece, reader)
    provide({name for piece in pieces for name in reader.files_of(piece.name, piece.offset, tuple(piece.tensor.shape))})
    with torch.no_grad():
        for piece in pieces:
            piece.tensor.copy_(reader.read(piece.name, piece.offset, tuple(piece.tensor.shape)))


def restore_feedback(model: Any, optimizer: torch.optim.Optimizer, reader: Reader, plan: Plan) -> str | None:
    """Go on with what compressed reductions have left out, if each rank does now what it did then; else without.

    Args:
        model: parallelized.
        optimizer: over its parameters, restored.
        reader: of the checkpoint; the files of `own_tensors` are there.
        plan: resolved, of the model.

    Returns:
        What could not be gone on with, the same on all ranks; None if nothing.
    """
    feedback, manifest = getattr(model, "feedback", None), reader.manifest
    if feedback is None:
        return None
    same = manifest.world_size == dist.get_world_size() and _reductions(manifest.job["plan"]) == _reductions(
        plan.model_dump(mode="json")
    )
    own = own_tensors(manifest, "feedback", dist.get_rank()) if same else []
    feedback.load({name.split("/", 2)[2]: reader.read(name) for name in own})
    restart = getattr(optimizer, "restart_momenta", None)  # of 1-bit Adam
    if restart and not same:
        restart()
    if same or not any(name.startswith("feedback/") for name in manifest.tensors):
        return None
    return "what compressed messages had left out begins at zero: it belongs to the ranks of another layout"


def own_tensors(manifest: Manifest, kind: str, rank: int) -> list[str]:
    """Names of the tensors that belong to a rank: "rng" or "feedback"."""
    return [name for name in manifest.tensors if name.startswith(f"{kind}/{rank:05d}/")]


def _reductions(plan: dict[str, Any]) -> list[Any]:
    """The part of a plan that decides which messages ranks send each other in place of gradients."""
    comm = plan.get("comm", {})
    return [plan["parallel"], plan["pipeline"], *map(comm.get, ("compression", "compress_scope", "error_feedback"))]


def make_state(
    model: nn.Module,
    anatomy: Anatomy,
    optimizer: torch.optim.Optimizer,
    manifest: Manifest,
    settle: Callable[[nn.Parameter], object],
) -> None:
    """Let an optimizer have, of the layout of its parameters, the tensors that a checkpoint has for them."""
    by_weight: dict[str, list[str]] = {}
    for name in manifest.tensors:
        kind, _, weight = name.partition("/")
        if kind not in ("weights", "buffers", *OF_RANKS):
            by_weight.setdefault(weight, []).append(kind)
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in named_weights(model, anatomy).items():
        if id(parameter) not in own:
            continue
        state = optimizer.state[parameter]
        for kind in by_weight.get(name, []):
            entry = manifest.tensors[f"{kind}/{name}"]
            dtype = torch_format(entry.format, f"{kind}/{name}")
            if kind not in state and entry.shape:
                state[kind] = torch.zeros_like(parameter.detach(), dtype=dtype)
            elif kind not in state:
                place = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
                state[kind] = torch.zeros((), dtype=dtype, device=place)
        settle(parameter)


def _check(piece: TensorSlice, reader: Reader) -> None:
    entry, wanted = reader.entry(piece.name), (FORMATS[piece.tensor.dtype], piece.whole)
    if (entry.format, entry.shape) != wanted:
        raise CheckpointError(
            f"{piece.name} is {entry.format} of shape {entry.shape}; the model's is {wanted[0]} of shape {wanted[1]}",
            where=str(reader.folder),
            rule="a checkpoint is read by the model that wrote it, with the same plan.precision.update",
            fix="compare the job with the one in the checkpoint's manifest",
        )
