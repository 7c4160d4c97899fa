"""Hugging Face models: gather the weights of shards, and save folders that `from_pretrained` loads."""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from weft.checkpoint.export_files import SavedAsIs, drop_same_generation, finish_folder, write_config
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain, cast, dtype_of, kept_in_float32
from weft.comm.objects import all_gather_json, broadcast_json
from weft.errors import CheckpointError
from weft.inputs import check_new
from weft.job import Model
from weft.launch.scratch import part_folder
from weft.memory.packed import unpack_tensor
from weft.parallel.runtime import packed_parameters, runtime
from weft.parallel.weights import to_local
from weft.precision.dtypes import DTYPES


def dtype_named(name: str) -> torch.dtype:
    """Dtype by name, such as torch.float32."""
    return getattr(torch, name.removeprefix("torch."))


def gather_weights(model: PreTrainedModel, *, trained_only: bool = False) -> dict[str, torch.Tensor]:
    """Gather full weights in host memory of rank 0; empty on the other ranks. All ranks must call this function.

    Args:
        model: parallelized model.
        trained_only: True to leave out frozen weights and buffers.
    """
    with _without_warning():
        return _gather_stages(model, trained_only)


@torch.no_grad()
def full_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Full weights and saved buffers, one after the other, on every rank; a tied weight once, by its first name.

    Collective: all ranks must take all of them.

    Args:
        model: parallelized model without a pipeline.

    Yields:
        Name and full tensor on the device, in the dtype of storage; it may be the memory of the model itself.
    """
    packed = packed_parameters(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = names.difference(name for name, _ in model.named_parameters())
    for name, value in model.state_dict().items():
        if name in tied:
            continue
        with _without_warning():
            full = _full_weight(name, value, packed)
        yield name, full


@contextmanager
def _without_warning() -> Iterator[None]:
    """Context without the warning that tensors over two mesh axes are gathered in two collectives."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _full_weight(name: str, value: torch.Tensor, packed: dict[str, Callable[..., torch.Tensor]]) -> torch.Tensor:
    """Full tensor of a weight, in the order of rows of Transformers. Collective in the stage of the weight."""
    full = unpack_tensor(value.full_tensor() if isinstance(value, DTensor) else value)
    return packed[name](full, False) if name in packed else full


@torch.no_grad()
def _gather_stages(model: Any, trained_only: bool) -> dict[str, torch.Tensor]:
    """Gather the weights one tensor at a time: all-gather inside its stage, then send from the stage's first rank.

    The names of a tied weight have one tensor, from which a save of Transformers knows them.
    """
    packed, trained = packed_parameters(model), {name for name, p in model.named_parameters() if p.requires_grad}
    own = {name: value for name, value in model.state_dict().items() if name in trained or not trained_only}
    device = to_local(next(model.parameters())).device
    first_names: dict[int, str] = {}
    tied = {name: first_names.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    stages: list[Any] = [[(name, tuple(x.shape), str(x.dtype), tied.get(name, name)) for name, x in own.items()]]
    pipeline, to_host = runtime(model).pipeline, _copier(model)
    group, rank, leads = None, 0, dist.get_rank() == 0
    if pipeline is not None:
        group, rank, leads = pipeline.group, pipeline.rank, pipeline.is_stage_leader
        stages = all_gather_json(stages[0], group)
    gathered: dict[str, torch.Tensor] = {}
    ready = torch.zeros(1, device=device)
    for stage, names in enumerate(stages):
        for name, shape, dtype_name, first in names:
            if first != name:
                if leads and rank == 0 and name not in gathered:
                    gathered[name] = gathered[first]
                continue
            full = torch.empty(())
            if stage == rank:
                full = _full_weight(name, own[name], packed)
                if stage and leads:  # wait until rank 0 is ready: messages sent ahead would fill its buffer
                    dist.recv(ready, group=group, group_src=0)
                    dist.send(full.contiguous(), group=group, group_dst=0)
            elif leads and rank == 0:
                full = torch.empty(shape, dtype=dtype_named(dtype_name), device=ready.device)
                dist.send(ready, group=group, group_dst=stage)
                dist.recv(full, group=group, group_src=stage)
            if leads and rank == 0 and name not in gathered:
                gathered[name] = to_host(full)
    anatomy = runtime(model).anatomy
    head, embedding = f"{anatomy.head}.weight", f"{anatomy.embedding}.weight"
    if anatomy.tied and head in gathered and embedding in gathered:  # two stages have a copy each
        gathered[head] = gathered[embedding]
    return gathered


def _copier(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function that copies a gathered weight to the host: to a file, if the weights do not fit into memory."""
    on_disk = runtime(model).on_disk
    return on_disk.copy if on_disk else partial(torch.Tensor.to, device="cpu", copy=True)


def export_model(
    model: Any, folder: Path, tokenizer: Path | None, dtype: torch.dtype, source: Path | None = None
) -> str:
    """Gather the weights of a parallelized model and write them as a Hugging Face folder. Collective; rank 0 writes.

    Args:
        model: parallelized model of Transformers or Diffusers, or of another library with `save_pretrained`.
        folder: folder to write; an existing folder is replaced when the new one is complete.
        tokenizer: folder whose tokenizer files are copied; None for those of `source`.
        dtype: dtype of the saved weights.
        source: model folder that the model came from, whose other files are copied; None for a new model.

    Returns:
        Error message, for example of a full disk, the same on all ranks; "" if the folder was written.
    """
    weights, problem = gather_weights(model), ""
    if dist.get_rank() == 0:
        try:
            save_model(_whole(model), weights, folder, dtype, source, tokenizer)
        except (
            CheckpointError,
            OSError,
            SafetensorError,
            RuntimeError,
            ValueError,
        ) as error:  # other ranks wait for it
            problem = str(error)
    return broadcast_json(problem)


def own_class(model: Any) -> Any:
    """Class of a model before FSDP2 made a subclass."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _whole(model: Any) -> Any:
    """The model; on a rank of a pipeline, which lacks the parts of other stages, one on the meta device with all parts."""
    if runtime(model).pipeline is None:
        return model
    own = own_class(model)
    with torch.device("meta"):
        whole = own(copy.deepcopy(model.config))
    if model.can_generate():
        whole.generation_config = model.generation_config
    return whole


def save_folder(
    config: Any,
    weights: dict[str, torch.Tensor],
    tokenizer: Path | None,
    folder: Path,
    dtype: torch.dtype | None,
    source: Path | None = None,
) -> None:
    """Write the Hugging Face folder of a causal language model; see `save_model`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    save_model(model, weights, folder, dtype, source, tokenizer)


def save_model(
    model: Any,
    weights: dict[str, torch.Tensor],
    folder: Path,
    dtype: torch.dtype | None,
    source: Path | None,
    tokenizer: Path | None = None,
) -> None:
    """Write a Hugging Face folder with given weights. The folder appears complete or not at all.

    Args:
        model: model with the names of the weights, parallelized or not; it may be on the meta device. It is not changed.
        weights: full weights by name, as `gather_weights` returns them on rank 0.
        folder: folder to write; an existing folder is replaced when the new folder is complete.
        dtype: dtype of the saved weights, but for those that stay in float32 (`kept_in_float32`); None: each keeps its own.
        source: model folder that the model came from, whose other files are copied; None for a new model.
        tokenizer: folder whose tokenizer files are copied; None for those of `source`.

    Raises:
        CheckpointError: a weight is too large for the dtype.
    """
    tied, apart = _tied_weights(model, weights)
    saved = {name: weight for name, weight in weights.items() if name not in tied}
    if dtype is not None:
        kept = kept_in_float32(model, saved, dtype)
        saved = {
            name: cast(name, weight, torch.promote_types(weight.dtype, dtype) if name in kept else dtype)
            for name, weight in saved.items()
        }
    dtype = dtype or dtype_of(model, saved)  # a save empties the dict
    counts = Counter(map(id, saved.values()))  # of weights that a user has tied; a file has a tensor for each name
    saved = {name: weight.clone() if counts[id(weight)] > 1 else weight for name, weight in saved.items()}
    with part_folder(folder) as scratch:
        part, shell = scratch / "model", with_state(model, saved)
        shell.save_pretrained(part)
        if isinstance(model, PreTrainedModel):
            if apart and not tied:
                shell.config.tie_word_embeddings = False
            write_config(shell.config, part, source, dtype)
            drop_same_generation(part, model.config, source)
        finish_folder(part, "config.json", tokenizer, folder, source)


def _tied_weights(model: Any, weights: dict[str, torch.Tensor]) -> tuple[set[str], set[str]]:
    """Names that the configuration ties to another weight: those with equal values, and those with values of their own.

    Ranks of a pipeline have two copies of a tied weight; a user may have untied weights, or loaded them from a folder that has
    both.
    """
    ties: dict[str, str] = {}
    if isinstance(model, PreTrainedModel):
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    found = {name: weights[first] for name, first in ties.items() if name in weights and first in weights}
    equal = {name for name, weight in found.items() if weights[name] is weight or torch.equal(weights[name], weight)}
    return equal, found.keys() - equal


def with_state(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """Object with the modules of a model whose `save_pretrained` writes given weights; the model is not changed.

    Its class is that before FSDP2 made a subclass, and settings of generation that others published are not refused.
    """
    own = own_class(model)
    shell = object.__new__(own)
    attributes = vars(model) | {"state_dict": lambda *_, **__: weights}
    if isinstance(model, PreTrainedModel):  # a save writes the class and the dtype into the configuration
        attributes |= {"config": copy.deepcopy(model.config)}
        if model.can_generate():
            attributes["generation_config"] = SavedAsIs.of(model.generation_config)
    attributes.pop("save_pretrained", None)  # that of a script
    vars(shell).update(attributes)
    return shell


def convert_folder(source: Path, target: Path, dtype: str, kind: str = "causal") -> Path:
    """Copy a Hugging Face folder with its tokenizer, and convert the weights to another dtype.

    Args:
        source: folder with config.json and safetensors.
        target: folder to write; it must not exist.
        dtype: dtype of the written weights, a name of `weft.precision.dtypes`.
        kind: `task.kind` of the job.

    Raises:
        CheckpointError: the source does not exist, its weights are damaged, or the target exists.
    """
    if not (source / "config.json").is_file():
        rule, fix = (
            "a finished run has its weights in the folder export",
            "name a finished run, or choose one of its checkpoints with --step",
        )
        raise CheckpointError(f"there are no weights in {source}", rule=rule, fix=fix)
    check_new(target)
    folder = Model(path=str(source))
    model = build_plain(folder, read_config(folder, kind), DTYPES[dtype], kind)
    save_model(model, dict(model.state_dict()), target, DTYPES[dtype], source)
    return target
