"""Unmodified models with their weights, in the memory of one process."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from weft.anatomy.build import build_as
from weft.anatomy.classes import auto_class
from weft.checkpoint.weight_files import check_weight_files
from weft.errors import CheckpointError
from weft.job import Model


def build_plain(source: Model, config: Any, dtype: torch.dtype, kind: str = "causal") -> Any:
    """Build the unmodified model with full weights in host memory: loaded from its folder, or initialized from `init_seed`.

    Args:
        source: model table of a job.
        config: its configuration, see `read_config`.
        dtype: dtype of the weights.
        kind: `task.kind` of the job.

    Raises:
        CheckpointError: weights are missing or damaged, or their shapes do not match the configuration.
    """
    if source.path is None:
        torch.manual_seed(source.init_seed)
        return build_as(kind, config, dtype)
    if kind == "diffusion":
        return _load_diffusers(source.path, config, dtype)
    torch.manual_seed(source.init_seed)  # of a new classifier
    check_weight_files(Path(source.path), getattr(config, "transformers_weights", None))
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
    return model


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
