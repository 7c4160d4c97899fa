"""Build an unmodified model from its configuration, without memory for its weights."""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from weft.anatomy.classes import WORDS, auto_class
from weft.anatomy.transformers import unknown_kind
from weft.device.detect import detect
from weft.errors import ModelError, WeftError


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype, kind: str = "causal") -> Any:
    """Build the unmodified model of a configuration on the meta device.

    Args:
        config: configuration; of a model of Diffusers, its table.
        dtype: dtype of the weights.
        kind: `task.kind` of the job: a causal language model, or a model for another task.

    Raises:
        ModelError: the library has no such model for this configuration, or cannot build it.
    """
    if kind == "diffusion":
        return _build(config, dtype, kind, str(config.get("_class_name")))
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise ModelError(
            f"num_hidden_layers = {layers}",
            where=f"model_type {config.model_type}",
            rule="a model has at least one decoder block",
            fix="set model.config.num_hidden_layers to 1 or more",
        )
    model = _build(config, dtype, kind, f"model_type {config.model_type}")
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model


def _build(config: Any, dtype: torch.dtype, kind: str, where: str) -> Any:
    try:
        with torch.device("meta"):
            return build_as(kind, config, dtype)
    except WeftError:
        raise
    except Exception as error:
        if type(error) is ValueError and str(error).startswith("Unrecognized configuration class"):
            raise unknown_kind(config, kind) from None  # the library's message lists all families
        library = "Diffusers" if kind == "diffusion" else "Transformers"
        raise ModelError(
            f"{library} cannot build a {WORDS.get(kind, 'model')} from this configuration: {error}",
            where=where,
            rule="sizes are positive, and hidden sizes are divisible by head counts",
            fix="correct the sizes in model.config",
        ) from None


def build_as(kind: str, config: Any, dtype: torch.dtype) -> Any:
    """Build a newly initialized model of a kind of task."""
    cls = auto_class(kind, config)
    if kind == "diffusion":  # the method `to` of Diffusers warns of modules that stay in float32
        return nn.Module.to(cls.from_config(config), dtype)
    return cls.from_config(config, dtype=dtype, **implementations(dtype))


def implementations(dtype: torch.dtype) -> dict[str, str]:
    """Arguments that choose operator implementations: eager experts where torch has no grouped matmul, as for float64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 or not detect().has_grouped_matmul else {}
