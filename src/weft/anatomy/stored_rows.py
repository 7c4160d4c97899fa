"""Rows of a weight that each of its stored tensors has.

Transformers stores some weights under other names than the model gives them, and a stack of experts as matrices: the rows of
`experts.gate_up_proj` [experts, 2 x units, hidden] are those of `experts.0.gate_proj.weight`, `experts.0.up_proj.weight`, ...
"""

from typing import Any

import torch
from torch import Tensor

Rows = dict[str, Tensor | None]
"""Row indices of each stored tensor, by its name, in its shape but for one column; None: it is the weight."""


def stored_rows(model: Any, name: str) -> Rows:
    """Stored tensors of a weight; none if they have other rows than the weight.

    The indices of the rows are converted by the library in place of the weight.

    Args:
        model: model of Transformers, on any device.
        name: name of one of its weights or buffers, seen as a matrix [rows, columns], with the last dimension as columns.
    """
    owner, _, attribute = name.rpartition(".")
    leading = getattr(model.get_submodule(owner), attribute).shape[:-1]
    indices = torch.arange(leading.numel()).view(*leading, 1)
    found: Rows = as_stored(model, {name: indices})
    flat = [rows.flatten() for rows in found.values() if rows is not None and rows.shape[-1:] == (1,)]
    return found if len(flat) == len(found) and torch.equal(torch.cat(flat).sort().values, indices.flatten()) else {}


def as_stored(model: Any, indices: dict[str, Tensor]) -> dict[str, Any]:
    """Convert indices as the library converts the weights in whose place they are, when it saves them.

    Args:
        model: model of Transformers, on any device.
        indices: tensors by the names of weights and buffers.

    Returns:
        Tensors by the names in files; none if the library cannot convert them, as where other weights are in the same file
        tensor.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(model, indices))
    except (AttributeError, IndexError, KeyError, RuntimeError, ValueError):
        return {}
