"""2:4 codec: the two largest of every four elements as bfloat16, and their indices, 9 bits per element.

The pattern is that of sparse tensor cores (Mishra et al., Accelerating Sparse Deep Neural Networks, 2021). Message layout:

    values      2 x 16 bits per group: all first values, then all second values
    indices     2 x 2 bits per group, two groups per byte

The four elements of a group are a quarter of the tensor apart instead of adjacent. Adjacent elements belong to one row of a
matrix, for example the embedding of one token, and tend to be all large or all zero. Distant elements are independent, so that
fewer large elements are dropped. At most half of the magnitude of a message is dropped; with error feedback, dropped elements
are sent later (Stich et al., Sparsified SGD with Memory, 2018). A sum over ranks is no longer sparse, so that owners send it in
8 bits (`int8.py`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks
from weft.comm.compression.int8 import INT8

GROUP = 4


def _encode(elements: Tensor) -> Tensor:
    """Encode by pairwise comparison: keep the larger element of each pair, or both of a pair that exceed both of the other.

    The comparisons use integers and bit masks, which are ten times as fast on a CPU as `torch.where`.
    """
    quarters = pad(elements, (0, -elements.shape[1] % GROUP)).view(len(elements), GROUP, -1).view(torch.int32)
    a, b, c, d = quarters.unbind(1)  # [rows, groups] each
    # Without the sign, the bits of floats are ordered by magnitude, with NaN above all other values.
    size_a, size_b, size_c, size_d = (quarters & 0x7FFFFFFF).unbind(1)
    b_larger, d_larger = _is_less(size_a, size_b), _is_less(size_c, size_d)
    high, other_high = torch.maximum(size_a, size_b), torch.maximum(size_c, size_d)
    a_and_b = ~_is_less(torch.minimum(size_a, size_b), other_high)
    c_and_d = _is_less(high, torch.minimum(size_c, size_d))
    first_is_a, first_is_b = a_and_b | ~(b_larger | c_and_d), b_larger & ~(a_and_b | c_and_d)
    second_is_d, second_is_c = c_and_d | (d_larger & ~a_and_b), ~(d_larger | a_and_b | c_and_d)
    first = (a & first_is_a) | (b & first_is_b) | (c & c_and_d)
    second = (d & second_is_d) | (c & second_is_c) | (b & a_and_b)
    indices = (first_is_b & 1) | (c_and_d & 2) | (second_is_d & 12) | (second_is_c & 8) | (a_and_b & 4)
    values = torch.cat([first, second], 1).view(torch.float32).bfloat16()
    nibbles = in_blocks(indices.to(torch.uint8), 2)
    return torch.cat([as_bytes(values), nibbles[..., 0] | (nibbles[..., 1] << 4)], 1)


def _is_less(one: Tensor, other: Tensor) -> Tensor:
    """Bit mask, all ones where one < other and else zero, for non-negative int32."""
    return (one - other) >> 31


def _decode(messages: Tensor, length: int) -> Tensor:
    rows, groups = len(messages), -(-length // GROUP)
    values = from_bytes(messages[:, : 4 * groups], torch.bfloat16).float().view(rows, 2, groups)
    packed = messages[:, 4 * groups :]
    nibbles = torch.stack([packed & 15, packed >> 4], 2).view(rows, -1)[:, :groups]
    indices = torch.stack([nibbles & 3, nibbles >> 2], 1).long()
    return values.new_zeros(rows, GROUP, groups).scatter_(1, indices, values).view(rows, -1)[:, :length]


def _bytes(length: int) -> int:
    groups = -(-length // GROUP)
    return 4 * groups + -(-groups // 2)


# A second selection would drop half of the mean again, and int8 is no larger.
STRUCTURED = Codec("2:4", _bytes, _encode, _decode, owner=INT8)
