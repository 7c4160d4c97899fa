"""Check on a small copy of a model that packed documents do not affect each other.

One forward pass runs rows of two documents with the masks and positions that Weft uses in training. Another runs each document
alone through the unmodified model, with eager attention and without masks and positions. Both must give the same logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.anatomy.shrink import VOCABULARY, small_copy
from weft.anatomy.transformers import row_arguments
from weft.errors import ModelError

ROWS = 8
LENGTHS = (13, 19)  # tokens of the two documents of a row, longer than the attention windows of a small copy
TOLERANCE = 2e-3  # relative to the largest logit; float32 rounding is below 3e-4 in all families, a leak is above 6e-2
FIRST_TOKEN = 3  # smaller ids are special tokens

RunRows = Callable[[Any, Tensor, Tensor], Tensor]
"""Forward function (model, input_ids, position_ids) -> logits of all tokens, [rows, tokens, vocabulary]."""


@dataclass(frozen=True)
class PackingCheck:
    """Result of `check_packing`."""

    difference: float
    """Largest difference between a logit in a packed row and the same logit of the document alone, relative to the largest
    logit."""
    leak: float
    """Largest change of a logit of the second document when the first document is replaced, relative to the largest logit."""
    error: str | None = None
    """Reason why the check could not run: no small copy can be built, or the copy fails on packed rows."""

    @property
    def problem(self) -> str | None:
        """Problem found by the check, as the end of a sentence about the model; None if there is none."""
        if self.error:
            return self.error
        if self.leak > TOLERANCE:
            return f"replacing the first document changes the logits of the second by {self.leak:.0%}"
        if self.difference > TOLERANCE:
            return f"the logits of a packed document differ by {self.difference:.0%} from its logits without packing"
        return None


def run_rows(model: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of rows, run as in training without parallelism."""
    return model(input_ids=input_ids, **row_arguments(model, position_ids)).logits


def check_packing(
    model: PreTrainedModel, anatomy: Anatomy, seq_len: int | None = None, run: RunRows = run_rows, packed: bool = True
) -> PackingCheck:
    """Compare packed rows with their documents run alone through the unmodified model, on a small copy of the model.

    The check takes about 0.1 s on a CPU. Every token of a model with random weights matters: any leak from the other document
    through attention, a convolution or a recurrent state changes logits by at least a thousandth.

    Args:
        model: full model on any device, including meta; it is not modified.
        seq_len: tokens per row of the job; attention windows of at least this length have no effect. None: any length.
        run: forward function for rows; it may modify the copy that it receives.
        packed: True: rows have two documents; False: rows have one document.
    """
    try:
        copy = small_copy(model, anatomy, seq_len)
    except ModelError as error:
        return PackingCheck(0.0, 0.0, error.what)
    lengths = LENGTHS if packed else (sum(LENGTHS),)
    generator = torch.Generator().manual_seed(0)
    rows, others = (torch.randint(FIRST_TOKEN, VOCABULARY, (ROWS, sum(LENGTHS)), generator=generator) for _ in range(2))
    others[:, LENGTHS[0] :] = rows[:, LENGTHS[0] :]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(ROWS, -1)
    with torch.no_grad(), torch.device("cpu"):
        alone = torch.cat([copy(input_ids=part, use_cache=False).logits for part in rows.split(lengths, 1)], 1)
        try:
            copy.set_attn_implementation(_implementation(model))
            together = run(copy, rows, positions)
            second = run(copy, others, positions)[:, LENGTHS[0] :] if packed else together
        except Exception as error:  # families raise many types of exceptions for masks that they do not support
            what = " ".join(str(error).split())[:120]
            return PackingCheck(0.0, 0.0, f"it fails with document masks ({type(error).__name__}: {what})")
    leak = _relative_error(second, together[:, LENGTHS[0] :], alone) if packed else 0.0
    return PackingCheck(_relative_error(together, alone, alone), leak)


def _relative_error(actual: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Largest difference in the second worst row, relative to the largest logit.

    The worst row is ignored: rounding may change the choice between two experts, or between two keys of sparse attention, with
    nearly equal scores.
    """
    rows = (actual - expected).abs().flatten(1).amax(1) / scale.abs().max()
    return rows.nan_to_num(nan=float("inf")).sort().values[-2].item()


def _implementation(model: PreTrainedModel) -> str:
    """Attention implementation of the model if a CPU supports it, else eager."""
    own = model.config._attn_implementation
    return own if own in ("eager", "sdpa") else "eager"
