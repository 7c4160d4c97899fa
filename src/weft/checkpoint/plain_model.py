"""Unmodified models with their weights, in the memory of one process, and the dtypes of these weights."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions, no_init_weights

from weft.anatomy.build import build_as
from weft.anatomy.classes import auto_class
from weft.checkpoint.model_config import differing_ties
from weft.checkpoint.packed_folder import unpacked
from weft.checkpoint.shard_file import TORCH_DTYPES
from weft.checkpoint.stored_slices import RowSpan, SliceReader, StoredLayout, find_layout, stored_name
from weft.checkpoint.weight_files import StoredTensor, stored_tensors
from weft.errors import CheckpointError
from weft.job import Model
from weft.memory.storages import saved_buffers

LARGEST_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)
"""Larger numbers have infinite squares in float32, as in norms."""


def build_plain(source: Model, config: Any, dtype: torch.dtype, kind: str = "causal") -> Any:
    """Build the unmodified model with full weights in host memory: loaded from its folder, or initialized from `init_seed`.

    Args:
        source: model table of a job.
        config: its configuration, see `read_config`.
        dtype: dtype of the weights.
        kind: `task.kind` of the job.

    Raises:
        CheckpointError: weights are missing or damaged, or their shapes do not match the configuration.
        ModelError: the folder has some of its tied weights with different values.
    """
    if source.path is None:
        torch.manual_seed(source.init_seed)
        return build_as(kind, config, dtype)
    if kind == "diffusion":
        return _load_diffusers(source.path, config, dtype)
    torch.manual_seed(source.init_seed)  # of a new classifier
    stored_tensors(Path(source.path), getattr(config, "transformers_weights", None))
    try:
        loaded: Any = auto_class(kind, config).from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=kind == "classification",
        )
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"the weights cannot be read: {error}",
            where=str(source.path),
            rule="a model folder has config.json and *.safetensors files written by save_pretrained",
            fix="copy or download the folder again; convert weights in .bin files with save_pretrained",
        ) from None
    model, report = loaded
    bad_keys = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if kind == "classification":
        missing = [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])]
        bad_keys = sorted(key for key in missing if not _is_on_top(model, key))
    if bad_keys:
        raise CheckpointError(
            f"{len(bad_keys)} weights are missing or have the wrong shape, the first is {bad_keys[0]}",
            where=str(source.path),
            rule="the folder has every weight of the model, in its shape",
            fix="name the folder of this model; model.config without model.path starts from newly initialized weights",
        )
    for name, first in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(name) is not model.get_parameter_or_buffer(first):
            raise differing_ties(name, first, str(source.path))
    _compute_buffers(model, partial(build_as, kind, config, dtype))
    return model


def find_slices(source: Model, config: Any, dtype: torch.dtype, kind: str) -> tuple[Any, StoredLayout] | None:
    """Unmodified model of a folder, whose weights have no values yet, and the places where they are stored.

    Args:
        source, config, dtype, kind: as of `build_plain`, whose result has the same buffers and other weights.

    Returns:
        See `slices_of`; None, too, for a new model, and one of Diffusers.

    Raises:
        CheckpointError: a file is damaged, or has quantized weights.
    """
    if source.path is None or kind == "diffusion":
        return None
    return slices_of(Path(source.path), config, partial(build_as, kind, config, dtype))


def slices_of(folder: Path, config: Any, build: Callable[[], Any]) -> tuple[Any, StoredLayout] | None:
    """Model whose weights have no values yet, and the places where a folder has them; see `find_layout`.

    Args:
        folder: Hugging Face folder.
        config: its configuration.
        build: function that makes the model.

    Returns:
        None if the model is to be loaded as a whole: some weights are not found, are quantized, or are changed by the library
        when it loads them.

    Raises:
        CheckpointError: a file is damaged, or has quantized weights that the configuration does not describe.
    """
    if getattr(config, "quantization_config", None) is not None:
        return None
    stored = unpacked(stored_tensors(folder, getattr(config, "transformers_weights", None), in_4_bits=True))
    with no_init_weights():  # the memory of its weights is not touched
        model = build()
    layout = find_layout(model, stored) if isinstance(model, PreTrainedModel) else None
    if layout is None or _zeroes_padding(model) or not _ties_are_equal(model, layout, stored):
        return None
    _initialize_buffers(model)
    return model, layout


@torch.no_grad()
def _zeroes_padding(model: PreTrainedModel) -> bool:
    """True if the library sets the rows of padding of loaded embeddings to zero, as in Youtu."""
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel) and not part.is_custom_code()):
        for module in part.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 1
                vars(module.weight)["_is_hf_initialized"] = True
                guard_torch_init_functions()(part._init_weights)(module)
                if not module.weight[module.padding_idx].all():
                    return True
    return False


def _ties_are_equal(model: PreTrainedModel, layout: StoredLayout, stored: Mapping[str, StoredTensor]) -> bool:
    """False if the folder has a tied weight a second time, in another shape or with other values."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    keys = {name: key for name in ties if (key := stored_name(name, model, stored))}
    again = {name: [RowSpan(key, 0, 0, math.prod(stored[key].shape[:-1]))] for name, key in keys.items()}
    with SliceReader(layout) as first, SliceReader(StoredLayout(again, layout.files)) as second:
        for name, key in keys.items():
            weight = model.get_parameter_or_buffer(ties[name])
            if stored[key].shape != tuple(weight.shape) or ties[name] not in layout.spans:
                return False
            whole = weight.shape, (0,) * weight.ndim, weight.shape, TORCH_DTYPES[stored[key].dtype]
            if not torch.equal(first.read(ties[name], *whole), second.read(name, *whole)):
                return False
    return True


def unusable_weight(tensor: Tensor) -> float | None:
    """Largest magnitude in a tensor with a number that no step and no rounding can use: NaN, infinite, or too large."""
    largest = (
        float(torch.linalg.vector_norm(tensor, torch.inf)) if tensor.is_floating_point() and tensor.numel() else 0.0
    )
    return None if largest <= LARGEST_WEIGHT else largest  # NaN is not


def refused_weights(bad: Mapping[str, float], file_of: Callable[[str], str]) -> CheckpointError:
    """Error for weights that are not usable; it names the first in alphabetical order.

    Args:
        bad: result of `unusable_weight` by name.
        file_of: file of a tensor by its name.
    """
    name, others = min(bad), f"; {len(bad) - 1} other tensors have such weights, too" if len(bad) > 1 else ""
    what = f"{name} has a weight of {bad[name]:.3g}" if math.isfinite(bad[name]) else f"{name} is not finite"
    return CheckpointError(
        what + others,
        where=file_of(name),
        rule=f"weights are finite and at most {LARGEST_WEIGHT:.2g}: no step and no rounding can use others",
        fix="use weights from another source or from an earlier step",
    )


def kept_in_float32(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> set[str]:
    """Names of tensors that stay in float32 in a model of another dtype.

    They are the weights that the library keeps there, and saved buffers, such as the biases that balance experts.

    Args:
        model: model of Transformers or of another library.
        names: names of its weights and buffers.
        dtype: dtype of the model.
    """
    patterns = model._get_dtype_plan(dtype) if isinstance(model, PreTrainedModel) else ()
    pattern = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns) or r"(?!)")
    return {name for name in names if pattern.search(name)} | saved_buffers(model).keys()


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating-point tensor in another dtype; other tensors as they are.

    Raises:
        CheckpointError: a number is too large for float16.
    """
    if not tensor.is_floating_point():
        return tensor
    result = tensor.to(dtype)
    if dtype == torch.float16 and bool(result.isinf().any()):
        raise CheckpointError(
            f"{name} has weights that are too large for float16",
            where=f"the largest is {float(tensor.abs().max()):.3g}",
            rule=f"numbers of this dtype are at most {torch.finfo(dtype).max:g}",
            fix="choose bf16 or fp32",
        )
    return result


def dtype_of(model: Any, weights: Mapping[str, Tensor]) -> torch.dtype:
    """Dtype of a model whose weights have several: that of its configuration if some have it, else that of the first."""
    found = [weight.dtype for weight in weights.values() if weight.is_floating_point()]
    own = getattr(model.config, "dtype", None)  # models of Diffusers have none
    return own if own in found else found[0]


@torch.no_grad()
def _compute_buffers(model: Any, build: Callable[[], Any]) -> None:
    """Give the buffers of a loaded model that no file has the values that `__init__` computes, in place.

    Transformers runs `__init__` on the meta device. Afterwards, `_init_weights` computes the buffers that are not saved; those
    of classes of the user that it does not know have undefined memory.

    Args:
        model: model of Transformers, loaded from a folder.
        build: function that makes the model anew.
    """
    if _own_buffers(model):
        with no_init_weights():  # the memory of its weights is not touched
            made = build()
        for name in _initialize_buffers(made):
            model.get_buffer(name).copy_(made.get_buffer(name))


@torch.no_grad()
def _initialize_buffers(made: Any) -> list[str]:
    """Give buffers of a model that was made without `_init_weights` the values that a loaded model has.

    Returns:
        Names of those that `_init_weights` leaves as `__init__` made them, though it is not the library that has made them.
    """
    kept = []
    parts = {name: part for name, part in made.named_modules() if isinstance(part, PreTrainedModel)}
    for full in _own_buffers(made):
        name = full.rpartition(".")[0]
        module, buffer = made.get_submodule(name), made.get_buffer(full)
        part = parts[max((inner for inner in parts if f"{name}.".startswith(inner and f"{inner}.")), key=len)]
        value, undefined = buffer.clone(), True
        for fill in (0, 1):  # `_init_weights` leaves a buffer that it does not know as it is
            buffer.fill_(fill)
            part._init_weights(module)
            undefined &= bool((buffer == fill).all())
        if undefined:
            buffer.copy_(value)
            kept.append(full)
    return kept


def _own_buffers(model: Any) -> list[str]:
    """Names of the buffers that no file has, in modules of a user."""
    saved = model.state_dict()
    names = [name for name, _ in model.named_buffers() if name not in saved]
    return [name for name in names if not _is_of_library(model.get_submodule(name.rpartition(".")[0]))]


def _is_of_library(module: nn.Module) -> bool:
    """True for a module of Transformers or torch, whose buffers `from_pretrained` computes."""
    return type(module).__module__.startswith(("transformers.", "torch."))


def _is_on_top(model: Any, key: str) -> bool:
    """True for a weight that a model for another task lacks: of the classifier on top, or of the pooler below it."""
    return not key.startswith(f"{model.base_model_prefix}.") or ".pooler." in key


def _load_diffusers(folder: str, config: dict[str, Any], dtype: torch.dtype) -> Any:
    try:
        return auto_class("diffusion", config).from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"the weights cannot be read: {error}",
            where=folder,
            rule="a model folder has config.json and *.safetensors files written by save_pretrained",
            fix="copy or download the folder again; of a pipeline, name the folder transformer in it",
        ) from None
