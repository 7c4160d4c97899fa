"""Data pipeline: from text files to packed token batches, indexed by global sample position.

The launcher calls `prepare` once. Each rank opens `Rows` on the prepared tokens and iterates over their `batches`.
"""

from weft.data.baselines import scored_pairs, unigram_and_bigram
from weft.data.batches import IGNORED, MicroBatch, batches, evaluation_batches
from weft.data.prepare import OF_TOKENS, prepare
from weft.data.prepared import Prepared
from weft.data.record_batches import RecordBatch, TaskRows, open_rows
from weft.data.row_split import RowSplit
from weft.data.rows import Row, Rows
from weft.data.shards import TokenSpan

AnyBatch = MicroBatch | RecordBatch

__all__ = [
    "IGNORED",
    "OF_TOKENS",
    "AnyBatch",
    "MicroBatch",
    "Prepared",
    "RecordBatch",
    "Row",
    "RowSplit",
    "Rows",
    "TaskRows",
    "TokenSpan",
    "batches",
    "evaluation_batches",
    "open_rows",
    "prepare",
    "scored_pairs",
    "unigram_and_bigram",
]
