"""Data pipeline: from text files to packed token batches, indexed by global sample position.

The launcher calls `prepare` once. Each rank opens `Rows` on the prepared tokens and iterates over their `batches`.
"""

from weft.data.baselines import scored_pairs, unigram_and_bigram
from weft.data.batches import IGNORED, MicroBatch, batches, evaluation_batches
from weft.data.prepare import Prepared, prepare
from weft.data.row_split import RowSplit
from weft.data.rows import Row, Rows
from weft.data.shards import TokenSpan

__all__ = [
    "IGNORED",
    "MicroBatch",
    "Prepared",
    "Row",
    "RowSplit",
    "Rows",
    "TokenSpan",
    "batches",
    "evaluation_batches",
    "prepare",
    "scored_pairs",
    "unigram_and_bigram",
]
