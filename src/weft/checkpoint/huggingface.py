"""Hugging Face in and out: configurations, weights into shards, and folders that `from_pretrained` reads."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from weft.errors import CheckpointError, ModelError
from weft.job import Model
from weft.precision.dtypes import DTYPES


def read_config(source: Model) -> PretrainedConfig:
    """The Transformers configuration a job names: of its folder, of a config.json, or of a table.

    Raises:
        ModelError: no such file, no such model_type, or values the configuration refuses.
    """
    try:
        if isinstance(source.config, dict):
            settings = dict(source.config)
        else:
            path = Path(source.path) / "config.json" if source.path else Path(str(source.config))
            settings = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except FileNotFoundError as error:
        raise ModelError(f"there is no file {error.filename}", where="model", fix="check the path") from None
    except KeyError as error:
        what = f"the model's configuration has no {error}" if error.args == ("model_type",) else str(error)
        raise ModelError(what, where="model.config", rule="model_type names the family, such as llama") from None
    except Exception as error:  # each family validates in its own way: whatever it says goes to the user
        raise ModelError(f"the configuration is refused: {error}", where="model.config") from None


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The untouched model without memory, for a causal language modelling configuration.

    Raises:
        ModelError: Transformers has no causal language model of this kind, or cannot build it.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **_implementations(dtype))
    except Exception as error:
        raise ModelError(
            f"Transformers cannot build a causal language model of this configuration: {error}",
            where=f"model_type {config.model_type}",
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
        ) from None
    model, report = loaded
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise CheckpointError(
            f"{len(absent)} weights are missing or of another shape, the first is {absent[0]}",
            where=str(source.path),
            rule="every weight of the model must be in the folder",
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
    problem = _broadcast_text(problem)
    if problem:
        raise CheckpointError(problem)
    model.to_empty(device=device)
    model.tie_weights()  # each use of a tied weight got a memory of its own
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    weights: Any = arrange_packed(model, dict(plain.state_dict()), to_rest=True) if plain else {}
    set_model_state_dict(model, weights, options=options)
    originals = dict(plain.named_buffers()) if plain else {}
    for name, buffer in model.named_buffers():  # those that are not saved, such as rotary frequencies
        if plain is not None:
            buffer.copy_(originals[name])
        dist.broadcast(buffer, src=0)


def _broadcast_text(text: str) -> str:
    """The text of rank 0, on every rank."""
    size = torch.tensor([len(text.encode())])
    dist.broadcast(size, src=0)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0 and text:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).decode()


def gather_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All weights, whole, on rank 0's host; empty on other ranks. Every rank must call it."""
    noise = logging.getLogger("torch.distributed.tensor._redistribute")
    level = noise.level
    noise.setLevel(logging.ERROR)  # it warns that tensors over two mesh axes come in two messages
    try:
        gathered: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    finally:
        noise.setLevel(level)
    return arrange_packed(model, gathered, to_rest=False)


def arrange_packed(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], *, to_rest: bool
) -> dict[str, torch.Tensor]:
    """Bring the rows of packed matrices from the order of the model's authors into that at rest, or back."""
    for name, module in model.named_modules():
        packed: Any = getattr(module, "packed", None)
        for last in packed.dim if packed else ():
            full = f"{name}.{last}"
            if full in weights:
                arrange = packed.by_rank if to_rest else packed.by_projection
                weights[full] = arrange(weights[full], last)
    return weights


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
    for file in sorted(tokenizer.iterdir()) if tokenizer else ():
        if file.is_file() and not (half / file.name).exists() and file.suffix not in (".safetensors", ".lock"):
            shutil.copy2(file, half / file.name)
    shutil.rmtree(folder, ignore_errors=True)
    half.rename(folder)


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
        raise CheckpointError(f"there are no weights in {source}", fix="name a run that ended, or a step it saved")
    if target.exists():
        raise CheckpointError(f"{target} exists", rule="an export overwrites nothing", fix="name another folder")
    model = build_plain(Model(path=str(source)), AutoConfig.from_pretrained(source), DTYPES[dtype])
    save_folder(model.config, dict(model.state_dict()), source, target, DTYPES[dtype])
    return target
