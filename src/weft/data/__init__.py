"""Text and records become packed token batches, by global sample position.

The launcher calls `prepare` once; each rank opens `Rows` on what it found and draws `batches` from them.
"""

from weft.data.baselines import scored_pairs, unigram_and_bigram
from weft.data.batches import IGNORED, MicroBatch, batches, count_micro_batches, evaluation_batches
from weft.data.prepare import Prepared, prepare
from weft.data.rows import Row, Rows
from weft.data.shards import Span

__all__ = [
    "IGNORED",
    "MicroBatch",
    "Prepared",
    "Row",
    "Rows",
    "Span",
    "batches",
    "count_micro_batches",
    "evaluation_batches",
    "prepare",
    "scored_pairs",
    "unigram_and_bigram",
]
