"""Packed documents: tried on a small copy of a model at start, whether each is computed as if it were alone in its row.

One forward takes rows of two documents the way that Weft runs them; another takes each document alone, through the
model as its authors wrote it, with eager attention and without masks and positions. Both must give the same logits.
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
LENGTHS = (13, 19)  # tokens of the two documents of a row: both longer than the windows of a small copy
TOLERANCE = 2e-3  # of the largest logit: rounding in float32 is below 3e-4 in all families, and what leaks above 6e-2
FIRST_TOKEN = 3  # smaller ones are special

Run = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, input_ids, position_ids) -> logits of all tokens, [rows, tokens, vocabulary]."""


@dataclass(frozen=True)
class Trial:
    """The result of an experiment on a small copy of a model."""

    difference: float
    """Largest difference of a logit to that of its document alone, as a share of the largest logit."""
    leak: float
    """Largest change of a logit of the second document when the first one is replaced, relative to the largest logit."""
    error: str | None = None
    """Why there is no result: no copy can be built, or it cannot run such rows."""

    @property
    def problem(self) -> str | None:
        """What is wrong, as the end of a sentence about the model; None where nothing is."""
        if self.error:
            return self.error
        if self.leak > TOLERANCE:
            return f"another first document moves the logits of the second by {self.leak:.0%}"
        if self.difference > TOLERANCE:
            return f"the logits of a document differ by {self.difference:.0%} from those of the document alone"
        return None


def run_rows(model: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of rows as a model that is not split runs them in training."""
    return model(input_ids=input_ids, **row_arguments(model, position_ids)).logits


def try_documents(
    model: PreTrainedModel, anatomy: Anatomy, seq_len: int | None = None, run: Run = run_rows, packed: bool = True
) -> Trial:
    """Compare rows as Weft runs them with each of their documents alone through the untouched model, on a small copy.

    It takes about a tenth of a second on CPU. No token of a model with random weights is left out: what is read of the
    other document, in attention, in a convolution or in a state, moves logits by a thousandth at least.

    Args:
        model: whole, on any device or the meta device; it is not touched.
        anatomy: its roles.
        seq_len: tokens of a row of the job; windows that are no shorter have no effect then. None: rows of any length.
        run: how rows run; it may change the copy that it is given.
        packed: rows have two documents; else one.
    """
    try:
        copy = small_copy(model, anatomy, seq_len)
    except ModelError as error:
        return Trial(0.0, 0.0, error.what)
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
        except Exception as error:  # each family fails in its own way on masks that it does not know
            what = " ".join(str(error).split())[:120]
            return Trial(0.0, 0.0, f"it fails on masks of documents ({type(error).__name__}: {what})")
    leak = _off(second, together[:, LENGTHS[0] :], alone) if packed else 0.0
    return Trial(_off(together, alone, alone), leak)


def _off(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """The largest difference in a row, as a share of the largest logit; of the second worst row.

    A row alone may be off by rounding: where two experts, or two keys of sparse attention, have nearly equal scores.
    """
    rows = (found - expected).abs().amax((1, 2)) / scale.abs().max()
    return rows.nan_to_num(nan=float("inf")).sort().values[-2].item()


def _implementation(model: PreTrainedModel) -> str:
    """The attention of the model, where a CPU has it."""
    own = model.config._attn_implementation
    return own if own in ("eager", "sdpa") else "eager"
