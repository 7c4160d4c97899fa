"""2:4: of every four numbers the two largest, as bfloat16, and where they stand: 36 bits, a quarter of what float32 takes and
a bit more (the pattern is that of sparse tensor cores: Mishra et al., Accelerating Sparse Deep Neural Networks, 2021).

    values      2 x 16 bits a group, first all first ones, then all second ones
    places      2 x 2 bits a group, two groups a byte

The four of a group stand a quarter of all numbers apart, not side by side: neighbours are a row of a matrix, say the embedding
of one token, which are all large or all zero, while what stands far apart has places to give away to each other. Not more than
half of what a step has to say is left out; with error feedback it is said later (Stich et al., Sparsified SGD with Memory,
2018). A sum over ranks is not sparse any more: owners send it in 8 bits (`int8.py`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks

GROUP = 4


def structured_reference(numbers: Tensor) -> Tensor:
    """What numbers, float32 of one dim, are after their way: of equal magnitudes those that come first are kept."""
    kept = torch.zeros_like(numbers)
    groups = -(-len(numbers) // GROUP)
    for start in range(groups):
        places = range(start, len(numbers), groups)
        magnitudes = numbers[start::groups].abs().nan_to_num(torch.inf, torch.inf).tolist()
        for number in sorted(range(len(places)), key=lambda number: -magnitudes[number])[:2]:
            kept[places[number]] = numbers[places[number]].bfloat16()
    return kept


def _encode(numbers: Tensor) -> Tensor:
    """By comparing pairs: the larger of each, unless both of one pair are larger than both of the other. All in integers,
    and choices by masks of all ones or none, which a CPU is ten times as fast at as at `torch.where`.
    """
    quarters = pad(numbers, (0, -numbers.shape[1] % GROUP)).view(len(numbers), GROUP, -1).view(torch.int32)
    a, b, c, d = quarters.unbind(1)  # [rows, groups] each
    # A float's bits without its sign are ordered as its magnitude is; not-a-number is above all.
    size_a, size_b, size_c, size_d = (quarters & 0x7FFFFFFF).unbind(1)
    b_larger, d_larger = _is_less(size_a, size_b), _is_less(size_c, size_d)
    high, other_high = torch.maximum(size_a, size_b), torch.maximum(size_c, size_d)
    a_and_b = ~_is_less(torch.minimum(size_a, size_b), other_high)
    c_and_d = _is_less(high, torch.minimum(size_c, size_d))
    first_is_a, first_is_b = a_and_b | ~(b_larger | c_and_d), b_larger & ~(a_and_b | c_and_d)
    second_is_d, second_is_c = c_and_d | (d_larger & ~a_and_b), ~(d_larger | a_and_b | c_and_d)
    first = (a & first_is_a) | (b & first_is_b) | (c & c_and_d)
    second = (d & second_is_d) | (c & second_is_c) | (b & a_and_b)
    places = (first_is_b & 1) | (c_and_d & 2) | (second_is_d & 12) | (second_is_c & 8) | (a_and_b & 4)
    values = torch.cat([first, second], 1).view(torch.float32).bfloat16()
    nibbles = in_blocks(places.to(torch.uint8), 2)
    return torch.cat([as_bytes(values), nibbles[..., 0] | (nibbles[..., 1] << 4)], 1)


def _is_less(one: Tensor, other: Tensor) -> Tensor:
    """All ones where it is, else none; of int32 numbers that are not negative."""
    return (one - other) >> 31


def _decode(messages: Tensor, length: int) -> Tensor:
    rows, groups = len(messages), -(-length // GROUP)
    values = from_bytes(messages[:, : 4 * groups], torch.bfloat16).float().view(rows, 2, groups)
    packed = messages[:, 4 * groups :]
    nibbles = torch.stack([packed & 15, packed >> 4], 2).view(rows, -1)[:, :groups]
    places = torch.stack([nibbles & 3, nibbles >> 2], 1).long()
    return values.new_zeros(rows, GROUP, groups).scatter_(1, places, values).view(rows, -1)[:, :length]


def _bytes(length: int) -> int:
    groups = -(-length // GROUP)
    return 4 * groups + -(-groups // 2)


STRUCTURED = Codec("2:4", _bytes, _encode, _decode)
