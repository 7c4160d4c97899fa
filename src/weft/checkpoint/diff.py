"""Bitwise comparison of two checkpoints, independent of the layouts that wrote them."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.manifest import Manifest, verify_folder
from weft.checkpoint.restore import Reader
from weft.checkpoint.slices import PER_RANK_KINDS

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype as which the bits of an element are compared, by bytes of the element."""


class TensorDifference(NamedTuple):
    """Difference between a tensor of checkpoint A and the tensor of the same name in checkpoint B."""

    name: str
    elements: int
    """Number of elements whose bits differ."""
    of: int
    """Number of elements of the tensor."""
    largest: float
    """Largest absolute difference; infinite where an element is NaN, 0 where only the sign of zeros differs."""
    relative: float
    """Largest difference divided by the larger absolute value of the two elements."""
    first: tuple[int, ...]
    """Index of the first element that differs."""
    specs: str = ""
    """Dtypes and shapes, if they differ; then no elements are compared."""

    def __str__(self) -> str:
        if self.specs:
            return f"{self.name}: {self.specs}"
        index = f"first at {list(self.first)}, " if self.first else ""
        return (
            f"{self.name}: {self.elements:,} of {self.of:,} elements differ, {index}"
            f"by at most {self.largest:.3g} (relative {self.relative:.3g})"
        )


class CheckpointDifference(NamedTuple):
    """All differences between two checkpoints A and B."""

    tensors: list[TensorDifference]
    """Tensors that differ, in the order weights, optimizer state, buffers, generators."""
    compared: Counter[str]
    """Number of tensors that both checkpoints have, by kind."""
    only_a: list[str]
    """Names of the tensors that only A has."""
    only_b: list[str]
    """Names of the tensors that only B has."""
    position: list[str]
    """Keys of the position that differ, with both values."""
    job: list[str]
    """Keys of the job that differ, with both values. They are information only and do not make checkpoints unequal."""

    @property
    def equal(self) -> bool:
        """True if training under the same job would continue identically from both checkpoints."""
        return not (self.tensors or self.only_a or self.only_b or self.position)


def diff(a: Path, b: Path, *, generators: bool = False, key: bytes | None = None) -> CheckpointDifference:
    """Compare two checkpoints, one tensor in memory at a time.

    Args:
        a, b: checkpoint folders; every byte of both is verified first.
        generators: also compare per-rank tensors: states of random number generators and error feedback of compressed
            collectives. They differ between layouts.
        key: key that signed both manifests.

    Raises:
        CheckpointError: one of the checkpoints fails verification.
    """
    manifests = verify_folder(a, key), verify_folder(b, key)
    names_a, names_b = (
        [name for name in m.tensors if generators or kind_of(name) not in PER_RANK_KINDS] for m in manifests
    )
    both = sorted(set(names_a) & set(names_b), key=_sort_key)
    with Reader(a, manifests[0]) as reader_a, Reader(b, manifests[1]) as reader_b:
        found = [_compare(name, reader_a, reader_b) for name in both]
    return CheckpointDifference(
        tensors=[difference for difference in found if difference],
        compared=Counter(map(kind_of, both)),
        only_a=sorted(set(names_a) - set(names_b), key=_sort_key),
        only_b=sorted(set(names_b) - set(names_a), key=_sort_key),
        position=_changed_keys(_position(manifests[0]), _position(manifests[1])),
        job=_changed_keys(manifests[0].job, manifests[1].job),
    )


def kind_of(name: str) -> str:
    """Kind of a tensor: weights, buffers, rng, feedback, or a name of optimizer state such as exp_avg."""
    return name.partition("/")[0]


def _sort_key(name: str) -> tuple[int, list[tuple[str, int]]]:
    """Natural sort key of a tensor: kind, then name with numbers compared by value (block 10 after block 2)."""
    order = {"weights": 0, "buffers": 2, "rng": 3, "feedback": 4}.get(kind_of(name), 1)
    return order, [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def _compare(name: str, a: Reader, b: Reader) -> TensorDifference | None:
    one, other = a.manifest.tensors[name], b.manifest.tensors[name]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        specs = f"{one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
        return TensorDifference(name, math.prod(one.shape), math.prod(one.shape), math.inf, math.inf, (), specs)
    x, y = a.read(name), b.read(name)
    differs = _bits(x) != _bits(y)
    elements = int(differs.sum())
    if not elements:
        return None
    first = tuple(differs.reshape(x.shape).nonzero()[0].tolist())
    largest, relative = _largest_differences(x.reshape(-1)[differs], y.reshape(-1)[differs])
    return TensorDifference(name, elements, x.numel(), largest, relative, first)


def _bits(tensor: Tensor) -> Tensor:
    """Bits of each element as an integer, flattened."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(INTEGERS[tensor.element_size()])


def _largest_differences(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Largest absolute and largest relative difference between two flat tensors."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    apart, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    relative = torch.where(apart == 0, apart, apart / larger)
    return _largest(apart), _largest(relative)


def _largest(differences: Tensor) -> float:
    return float(differences.nan_to_num(math.inf, posinf=math.inf).max())


def _position(manifest: Manifest) -> dict[str, Any]:
    return manifest.position.model_dump(mode="json")


def _changed_keys(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Dotted keys whose values differ in two nested tables."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if _text(a) == _text(b) else [f"{prefix}: {_text(a)} against {_text(b)}"]
    inner = f"{prefix}." if prefix else ""
    return [
        text
        for key in [*a, *(key for key in b if key not in a)]
        for text in _changed_keys(a.get(key), b.get(key), inner + key)
    ]


def _text(value: Any) -> str:
    return json.dumps(value)
