"""Packed sequences of different lengths, and the interface of the kernels that compute their attention.

Tensors of a kernel hold the tokens of all its sequences one after the other:

    q     [Tq, Hq, D]
    k     [Tk, Hkv, D]; query head h uses key head h // (Hq / Hkv)
    v     [Tk, Hkv, Dv]
    out   [Tq, Hq, Dv], in the dtype of q
    lse   [Hq, Tq], log-sum-exp of the scores, in float64 for float64, else in float32

Backward takes out and lse of the full softmax, of which the keys of a call may be a part: the gradients of all calls add up
to the gradient of the full attention (Dao et al., FlashAttention, 2022).
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Sequences(NamedTuple):
    """Sequences of one call, none of them empty, and the keys that their queries see.

    With n queries and m keys, query i sees key j if i + m - n - left <= j <= i + m - n + right: the last query is aligned
    with the last key, as in FlashAttention. Every query sees a key.
    """

    queries: tuple[int, ...]
    """0 and the end of each sequence in the tokens of q."""
    keys: tuple[int, ...]
    """0 and the end of each sequence in the tokens of k."""
    left: int
    """Number of keys before the aligned one that a query sees; -1 for all."""
    right: int
    """0 for causal sequences, which have as many queries as keys; -1 for all keys after the aligned one."""
    query_borders: Tensor
    """`queries` as int32 on the device."""
    key_borders: Tensor
    """`keys` as int32 on the device."""
    longest_query: int
    """Largest number of queries of a sequence."""
    longest_key: int
    """Largest number of keys of a sequence."""


class TokenDropout(NamedTuple):
    """Dropout of attention probabilities by the positions of their tokens; see `weft.compute.dropout`."""

    rate: float
    seed: int
    heads: Tensor
    """int64 [Hq], index of each query head in the model."""
    rows: Tensor
    """int64 [Tq], row of each query."""
    queries: Tensor
    """int64 [Tq], position of each query in its row."""
    keys: Tensor
    """int64 [Tk], position of each key in its row."""


class VarlenKernel(NamedTuple):
    """Implementation of attention over packed sequences.

    forward(q, k, v, sequences, scale, softcap, dropout) -> (out, lse)
    backward(grad, q, k, v, out, lse, sequences, scale, softcap, dropout) -> (dq, dk, dv), in the dtypes of q, k and v

    `softcap` is None or the cap of the scores, `dropout` is None or a `TokenDropout`; both are None for kernels that
    `choose_kernel` does not take with them.
    """

    name: str
    """Name for the log."""
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
