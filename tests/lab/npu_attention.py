"""Stand-in for the attention operators of torch_npu: checks the arguments that Weft passes, and computes their definition.

The rules are those of the documentation of `torch_npu.npu_fusion_attention`, layout TND. The statistics of the softmax have the
layout in memory that MindSpeed reads: heads before tokens inside of each sequence, eight copies of a number.
"""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class NpuAttention(ModuleType):
    """The module torch_npu; `convert` and `back` move tensors from and to the device of a test."""

    def __init__(
        self, convert: Callable[[Tensor], Tensor] = lambda x: x, back: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        super().__init__("torch_npu")
        self.__spec__ = ModuleSpec("torch_npu", None)
        self.convert, self.back = convert, back
        self.calls: list[str] = []

    def take_calls(self) -> dict[str, int]:
        """Number of calls since the last time, by direction."""
        calls, self.calls = self.calls, []
        return {name: calls.count(name) for name in ("forward", "backward")}

    def npu_fusion_attention(
        self, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **arguments: Any
    ) -> tuple[Any, ...]:
        self.calls.append("forward")
        known = {"atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens"}
        lengths, visible = self._check(known, query, key, value, head_num, input_layout, arguments)
        out, maxima, sums = [], [], []
        for q, k, v, seen in self._sequences(lengths, visible, query, key, value):
            scores = _scores(q, k, arguments["scale"], seen)
            maximum = scores.amax(-1)
            exponentials = torch.exp(scores - maximum[..., None])
            out.append((exponentials / exponentials.sum(-1, keepdim=True) @ v).transpose(0, 1))
            maxima.append(maximum.flatten())
            sums.append(exponentials.sum(-1).flatten())
        shape = (len(query), head_num, 1)
        statistics = [self.back(torch.cat(x).view(shape).repeat(1, 1, 8)) for x in (maxima, sums)]
        return self.back(torch.cat(out).to(query.dtype)), *statistics, self.back(torch.empty(0)), 0, 0, 0

    def npu_fusion_attention_grad(
        self, query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **arguments: Any
    ) -> tuple[Tensor, ...]:
        self.calls.append("backward")
        known = {"atten_mask", "scale_value", "keep_prob", "pre_tockens", "next_tockens"}
        known |= {"softmax_max", "softmax_sum", "attention_in"}
        lengths, visible = self._check(known, query, key, value, head_num, input_layout, arguments)
        assert dy.is_contiguous()
        assert arguments["attention_in"].shape == dy.shape == query.shape
        statistics = [self.convert(arguments[name]) for name in ("softmax_max", "softmax_sum")]
        assert all(x.shape == (len(query), head_num, 8) for x in statistics)
        assert all(x.is_contiguous() and torch.equal(x, x[..., :1].expand_as(x)) for x in statistics)
        maximum, total = (x[..., 0].flatten() for x in statistics)
        groups, offset = head_num // key.shape[1], 0
        gradients: list[list[Tensor]] = [[], [], []]
        grads, outs = (self._split(x, lengths[0]) for x in (dy, arguments["attention_in"]))
        sequences = self._sequences(lengths, visible, query, key, value)
        for (q, k, v, seen), grad, out in zip(sequences, grads, outs, strict=True):
            own = slice(offset, offset + head_num * q.shape[1])
            offset = own.stop
            scores = _scores(q, k, arguments["scale_value"], seen)
            weights = torch.exp(scores - maximum[own].view(head_num, -1, 1)) / total[own].view(head_num, -1, 1)
            of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * arguments["scale_value"]
            gradients[0].append((of_scores @ k).transpose(0, 1))
            for index, x in ((1, of_scores.mT @ q), (2, weights.mT @ grad)):
                gradients[index].append(x.unflatten(0, (-1, groups)).sum(1).transpose(0, 1))
        dq, dk, dv = (self.back(torch.cat(x).to(query.dtype)) for x in gradients)
        return dq, dk, dv, self.back(torch.empty(0))

    def _check(
        self, known: set[str], query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, given: Any
    ) -> tuple[tuple[list[int], list[int]], list[Tensor | None]]:
        """Check arguments; returns the lengths of the sequences, and the mask of each."""
        required = {"actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "keep_prob"}
        assert required <= set(given) <= required | known, sorted(given)
        assert input_layout == "TND"
        assert key.shape == value.shape
        assert head_num == query.shape[1]
        assert head_num % key.shape[1] == 0
        assert query.shape[-1] == key.shape[-1]
        assert all(x.is_contiguous() and x.dtype == query.dtype for x in (query, key, value))
        assert given["keep_prob"] == 1.0
        ends = given["actual_seq_qlen"], given["actual_seq_kvlen"]
        assert [own[-1] for own in ends] == [len(query), len(key)]
        assert all(isinstance(end, int) for own in ends for end in own)
        lengths = tuple([stop - start for start, stop in pairwise((0, *own))] for own in ends)
        assert min(map(min, lengths)) > 0
        assert len(lengths[0]) == len(lengths[1]) <= 2048
        mode, mask = given["sparse_mode"], given.get("atten_mask")
        assert mode in (0, 3, 4)
        assert (mask is None) == (mode == 0)  # without a mask, the operator ignores the mode
        assert ("pre_tockens" in given) == ("next_tockens" in given) == (mode == 4)
        if mask is not None:
            assert torch.equal(self.convert(mask), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        masks = []
        for rows, columns in zip(*lengths, strict=True):
            if mode == 0:
                masks.append(None)
                continue
            assert rows == columns  # the alignment of others has never been tried on a device
            distance = torch.arange(columns) - torch.arange(rows)[:, None]
            low, high = (-given["pre_tockens"], given["next_tockens"]) if mode == 4 else (-columns, 0)
            masks.append((distance >= low) & (distance <= high))
        return (lengths[0], lengths[1]), masks

    def _split(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        """Each sequence of a tensor [T, H, D], [H, tokens, D] in at least float32."""
        wide = self.convert(x)
        wide = wide if wide.dtype == torch.float64 else wide.float()
        return [part.transpose(0, 1) for part in wide.split(lengths)]

    def _sequences(self, lengths: Any, visible: list[Any], query: Tensor, key: Tensor, value: Tensor) -> list[Any]:
        groups = query.shape[1] // key.shape[1]
        queries, keys, values = (
            self._split(query, lengths[0]),
            self._split(key, lengths[1]),
            self._split(value, lengths[1]),
        )
        repeated = ([x.repeat_interleave(groups, 0) for x in own] for own in (keys, values))
        return list(zip(queries, *repeated, visible, strict=True))


def _scores(q: Tensor, k: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    scores = q @ k.mT * scale
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)
