"""Build an unmodified causal language model from its configuration, without memory for its weights."""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from weft.anatomy.transformers import refuse_kind
from weft.device.detect import detect
from weft.errors import ModelError


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the unmodified causal language model of a configuration on the meta device.

    Raises:
        ModelError: Transformers has no causal language model for this configuration, or cannot build it.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise ModelError(
            f"num_hidden_layers = {layers}",
            where=f"model_type {config.model_type}",
            rule="a model has at least one decoder block",
            fix="set model.config.num_hidden_layers to 1 or more",
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **implementations(dtype))
    except Exception as error:
        if type(error) is ValueError and str(error).startswith("Unrecognized configuration class"):
            raise refuse_kind(config) from None  # the library's message lists all families
        raise ModelError(
            f"Transformers cannot build a causal language model from this configuration: {error}",
            where=f"model_type {config.model_type}",
            rule="sizes are positive, and hidden sizes are divisible by head counts",
            fix="correct the sizes in model.config",
        ) from None
    model.config.use_cache = False
    return model


def implementations(dtype: torch.dtype) -> dict[str, str]:
    """Arguments that choose operator implementations: eager experts where torch has no grouped matmul, as for float64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 or not detect().has_grouped_matmul else {}
