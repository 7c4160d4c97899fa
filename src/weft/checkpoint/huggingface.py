"""Hugging Face in and out: configurations, weights into shards, and folders that `from_pretrained` reads."""

import logging
import os
import shutil
import stat
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from weft.anatomy.transformers import refuse_kind
from weft.checkpoint.model_config import read_config
from weft.checkpoint.weight_files import check_weight_files
from weft.comm.objects import all_gather_json, broadcast_json
from weft.errors import CheckpointError, ModelError
from weft.job import Model
from weft.memory.packed import join_packed
from weft.precision.dtypes import DTYPES

EXPORTED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tokenizer.model.v*", "sentencepiece.bpe.model", "spiece.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "normalizer.json"),
    *("sentencepiece.model", "spm.model", "spm_char.model", "bpe.codes", "dict.txt", "byte_maps.json", "emoji.json"),
    *("source.spm", "target.spm", "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json"),
    *("word_shape.json", "word_pronunciation.json", "prophetnet.tokenizer"),
    *("generation_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
"""Files of tokenizers, chat templates, generation and processors: all that an export takes from beside a tokenizer."""


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The untouched model without memory, for a causal language modelling configuration.

    Raises:
        ModelError: Transformers has no causal language model of this kind, or cannot build it.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise ModelError(
            f"num_hidden_layers = {layers}",
            where=f"model_type {config.model_type}",
            rule="a model has at least one block",
            fix="set model.config.num_hidden_layers to 1 or more",
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **_implementations(dtype))
    except Exception as error:
        if type(error) is ValueError and str(error).startswith("Unrecognized configuration class"):
            raise refuse_kind(config) from None  # its message lists all families that there are
        raise ModelError(
            f"Transformers cannot build a causal language model of this configuration: {error}",
            where=f"model_type {config.model_type}",
            rule="sizes are positive, and those that divide each other do",
            fix="correct the sizes in model.config",
        ) from None
    model.config.use_cache = False
    return model


def build_plain(source: Model, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The untouched model with its weights, whole, on the host: from its folder, or fresh from `init_seed`.

    Raises:
        CheckpointError: weights are missing, damaged or of another shape than the configuration says.
    """
    if source.path is None:
        torch.manual_seed(source.init_seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **_implementations(dtype))
    check_weight_files(Path(source.path), getattr(config, "transformers_weights", None))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=True,
        )
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"the weights cannot be read: {error}",
            where=str(source.path),
            rule="a folder has config.json and *.safetensors files written by save_pretrained",
            fix="copy or download the folder again; weights in .bin files are written anew by save_pretrained",
        ) from None
    model, report = loaded
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise CheckpointError(
            f"{len(absent)} weights are missing or of another shape, the first is {absent[0]}",
            where=str(source.path),
            rule="every weight of the model must be in the folder",
            fix="name the folder of this very model; model.config alone starts from fresh weights",
        )
    return model


def _implementations(dtype: torch.dtype) -> dict[str, str]:
    """The library's own choice of operators, but for what its default cannot do: a grouped matmul in float64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def materialize(model: PreTrainedModel, source: Model, device: torch.device) -> None:
    """Give a parallelized meta model its weights, straight into the shards of each rank.

    Rank 0 holds the whole model once, in host memory, and sends it one tensor at a time; no other rank, and no
    accelerator, ever holds more than its shards and one tensor. Fresh weights are the same numbers as plain Transformers
    makes after `torch.manual_seed(init_seed)`.

    Args:
        model: from `build_on_meta`, then parallelized.
        source: where the weights come from.
        device: where the shards go.

    Raises:
        CheckpointError: on every rank, when rank 0 cannot read the weights.
    """
    dtype = next(model.parameters()).dtype
    plain, problem = None, ""
    if dist.get_rank() == 0:
        try:
            plain = build_plain(source, model.config, dtype)
        except CheckpointError as error:
            problem = str(error)
    problem = broadcast_json(problem)
    if problem:
        raise CheckpointError(problem)
    allocate(model, device)
    whole: dict[str, torch.Tensor] = {**dict(plain.named_buffers()), **plain.state_dict()} if plain else {}
    table = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in whole.items()]
    own = {**dict(model.named_buffers()), **model.state_dict()}
    packed = _packed_parameters(model)
    for name, shape, format in broadcast_json(table):
        tensor = torch.empty(shape, dtype=_dtype(format), device=device)
        if plain is not None:
            tensor.copy_(whole.pop(name))
        dist.broadcast(tensor, src=0)
        if name in own:
            _take_part(own[name], packed[name](tensor, True) if name in packed else tensor)


def allocate(model: PreTrainedModel, device: torch.device) -> None:
    """Give a parallelized meta model memory without contents: that of this rank's shards."""
    model.to_empty(device=device)
    if plain_ties_are_here(model):
        model.tie_weights()  # each use of a tied weight got a memory of its own


def _take_part(own: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy from a whole tensor what this rank holds of it."""
    if isinstance(own, DTensor):
        shape, offset = compute_local_shape_and_global_offset(whole.shape, own.device_mesh, own.placements)
        whole = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        own = own.to_local()
    own.detach().copy_(whole)


def plain_ties_are_here(model: Any) -> bool:
    """Whether the modules that share a weight are all on this rank; a pipeline may have cut them apart."""
    pipeline = getattr(model, "pipeline", None)
    return pipeline is None or (pipeline.relay.has_first() and pipeline.relay.has_last())


def _dtype(name: str) -> torch.dtype:
    """From its name, such as torch.float32."""
    return getattr(torch, name.removeprefix("torch."))


def gather_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All weights, whole, on rank 0's host; empty on other ranks. Every rank must call it."""
    noise = logging.getLogger("torch.distributed.tensor._redistribute")
    level = noise.level
    noise.setLevel(logging.ERROR)  # it warns that tensors over two mesh axes come in two messages
    try:
        return _gather_stages(model)
    finally:
        noise.setLevel(level)


@torch.no_grad()
def _gather_stages(model: Any) -> dict[str, torch.Tensor]:
    """One tensor at a time: put together inside its stage, and sent by the first rank of the stage."""
    own, packed = dict(model.state_dict()), _packed_parameters(model)
    stages: list[Any] = [[(name, tuple(value.shape), str(value.dtype)) for name, value in own.items()]]
    pipeline = getattr(model, "pipeline", None)
    group, rank, leads = None, 0, dist.get_rank() == 0
    if pipeline is not None:
        group, rank, leads = pipeline.group, pipeline.rank, pipeline.leads
        stages = all_gather_json(stages[0], group)
    gathered: dict[str, torch.Tensor] = {}
    ready = torch.zeros(1, device=next(iter(own.values())).device)
    for stage, names in enumerate(stages):
        for name, shape, format in names:
            whole = torch.empty(())
            if stage == rank:
                value = own[name]
                whole = join_packed(value.full_tensor() if isinstance(value, DTensor) else value)
                whole = packed[name](whole, False) if name in packed else whole
                if stage and leads:  # when rank 0 is ready: what is sent ahead would fill its channel
                    dist.recv(ready, group=group, group_src=0)
                    dist.send(whole.contiguous(), group=group, group_dst=0)
            elif leads and rank == 0:
                whole = torch.empty(shape, dtype=_dtype(format), device=ready.device)
                dist.send(ready, group=group, group_dst=stage)
                dist.recv(whole, group=group, group_src=stage)
            if leads and rank == 0 and name not in gathered:
                gathered[name] = whole.cpu() if whole.device.type != "cpu" else whole.clone()
    return gathered


def arrange_packed(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], *, to_rest: bool
) -> dict[str, torch.Tensor]:
    """Bring the rows of packed matrices from the order of the model's authors into that at rest, or back."""
    packed = _packed_parameters(model)
    return {name: packed[name](value, to_rest) if name in packed else value for name, value in weights.items()}


def _packed_parameters(model: torch.nn.Module) -> dict[str, Callable[[torch.Tensor, bool], torch.Tensor]]:
    """By name of a parameter that holds several projections: (tensor, to_rest) -> the other order of its rows."""
    found: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {}
    for name, module in model.named_modules():
        packed: Any = getattr(module, "packed", None)
        for last in packed.dim if packed else ():
            found[f"{name}.{last}"] = partial(_rearrange, packed, last)
    return found


def _rearrange(packed: Any, name: str, tensor: torch.Tensor, to_rest: bool) -> torch.Tensor:
    return (packed.by_rank if to_rest else packed.by_projection)(tensor, name)


def save_folder(
    config: PretrainedConfig, weights: dict[str, torch.Tensor], tokenizer: Path | None, folder: Path, dtype: torch.dtype
) -> None:
    """Write a Hugging Face folder: config, safetensors, tokenizer. It appears complete or not at all.

    Args:
        config: the model's configuration.
        weights: whole weights by name, as `gather_weights` returns them on rank 0.
        tokenizer: folder whose files go along; None for a model trained on bare tokens.
        folder: where to write; an older folder there is replaced once the new one is complete.
        dtype: number format of the saved weights.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    half = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(half, ignore_errors=True)
    saved = {name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in weights.items()}
    model.load_state_dict(saved, assign=True)
    model.tie_weights()
    model.config.use_cache = True
    model.save_pretrained(half)
    mode = stat.S_IMODE((half / "config.json").stat().st_mode)  # which follows the umask
    for file in half.glob("*.safetensors"):  # safetensors makes files that nobody else may read
        file.chmod(mode)
    for file in sorted(tokenizer.iterdir()) if tokenizer else ():
        regular = stat.S_ISREG(file.lstat().st_mode)  # what a link names may be anything
        if regular and not (half / file.name).exists() and _goes_along(file.name):
            shutil.copyfile(file, half / file.name, follow_symlinks=False)
    shutil.rmtree(folder, ignore_errors=True)
    half.rename(folder)


def _goes_along(name: str) -> bool:
    """Whether a file beside a tokenizer is exported with it."""
    return any(fnmatchcase(name, pattern) for pattern in EXPORTED)


def convert_folder(source: Path, target: Path, dtype: str) -> Path:
    """Copy a Hugging Face folder with its tokenizer, its weights in another number format.

    Args:
        source: folder with config.json and safetensors.
        target: folder to write; it must not exist.
        dtype: a name of `weft.precision.dtypes`.

    Raises:
        CheckpointError: there is no such folder, its weights are damaged, or the target exists.
    """
    if not (source / "config.json").is_file():
        rule, fix = (
            "a run that ended has its weights in export",
            "name a run that ended, or a step it saved with --step",
        )
        raise CheckpointError(f"there are no weights in {source}", rule=rule, fix=fix)
    if target.exists():
        raise CheckpointError(f"{target} exists", rule="an export overwrites nothing", fix="name another folder")
    folder = Model(path=str(source))
    model = build_plain(folder, read_config(folder), DTYPES[dtype])
    save_folder(model.config, dict(model.state_dict()), source, target, DTYPES[dtype])
    return target
