"""Two checkpoints against each other, bit by bit, whatever layouts wrote them."""

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
from weft.checkpoint.slices import OF_RANKS

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What bits of a number are compared as, by its bytes."""


class TensorDifference(NamedTuple):
    """How a tensor of A differs from the one of the same name in B."""

    name: str
    elements: int
    """That differ in their bits."""
    of: int
    largest: float
    """Absolute difference; infinite where one is not a number, 0 where only the sign of a zero differs."""
    relative: float
    """Largest difference as a share of the larger of the two numbers."""
    first: tuple[int, ...]
    """Place of the first element that differs."""
    forms: str = ""
    """Formats and shapes, where those differ: then nothing else is compared."""

    def __str__(self) -> str:
        if self.forms:
            return f"{self.name}: {self.forms}"
        place = f"first at {list(self.first)}, " if self.first else ""
        return (
            f"{self.name}: {self.elements:,} of {self.of:,} elements, {place}"
            f"by {self.largest:.3g} at most, relatively {self.relative:.3g}"
        )


class Difference(NamedTuple):
    """All that differs between two checkpoints."""

    tensors: list[TensorDifference]
    """In the order of A: weights, the optimizer's state, buffers, generators."""
    compared: Counter[str]
    """Tensors that both have, by kind."""
    only_a: list[str]
    only_b: list[str]
    position: list[str]
    """Keys of the position that differ, with both values."""
    job: list[str]
    """Keys of the job that differ, with both values. They say how a checkpoint came about, and decide nothing."""

    @property
    def equal(self) -> bool:
        """Whether training would go on from both in the same way, under the same job."""
        return not (self.tensors or self.only_a or self.only_b or self.position)


def diff(a: Path, b: Path, *, generators: bool = False, key: bytes | None = None) -> Difference:
    """Compare two checkpoints, one tensor in memory at a time.

    Args:
        a, b: their folders; every byte of both is verified first.
        generators: compare random number generators too, and what compressed messages left out; they belong to ranks, so
            those of other layouts differ.
        key: that their manifests were written with.

    Raises:
        CheckpointError: one of them does not verify.
    """
    manifests = verify_folder(a, key), verify_folder(b, key)
    names_a, names_b = ([name for name in m.tensors if generators or kind_of(name) not in OF_RANKS] for m in manifests)
    both = sorted(set(names_a) & set(names_b), key=_place)
    with Reader(a, manifests[0]) as reader_a, Reader(b, manifests[1]) as reader_b:
        found = [_compare(name, reader_a, reader_b) for name in both]
    return Difference(
        tensors=[difference for difference in found if difference],
        compared=Counter(map(kind_of, both)),
        only_a=sorted(set(names_a) - set(names_b), key=_place),
        only_b=sorted(set(names_b) - set(names_a), key=_place),
        position=_keys(_position(manifests[0]), _position(manifests[1])),
        job=_keys(manifests[0].job, manifests[1].job),
    )


def kind_of(name: str) -> str:
    """weights, buffers, rng, feedback, or a name of the optimizer's, such as exp_avg."""
    return name.partition("/")[0]


def _place(name: str) -> tuple[int, list[tuple[str, int]]]:
    """What tensors are sorted by: kind, then names with their numbers by value, so that block 10 comes after block 2."""
    order = {"weights": 0, "buffers": 2, "rng": 3, "feedback": 4}.get(kind_of(name), 1)
    return order, [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def _compare(name: str, a: Reader, b: Reader) -> TensorDifference | None:
    one, other = a.manifest.tensors[name], b.manifest.tensors[name]
    if (one.format, one.shape) != (other.format, other.shape):
        forms = f"{one.format} {list(one.shape)} against {other.format} {list(other.shape)}"
        return TensorDifference(name, math.prod(one.shape), math.prod(one.shape), math.inf, math.inf, (), forms)
    x, y = a.read(name), b.read(name)
    differs = _bits(x) != _bits(y)
    elements = int(differs.sum())
    if not elements:
        return None
    first = tuple(differs.reshape(x.shape).nonzero()[0].tolist())
    largest, relative = _sizes(x.reshape(-1)[differs], y.reshape(-1)[differs])
    return TensorDifference(name, elements, x.numel(), largest, relative, first)


def _bits(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer, in one row."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(INTEGERS[tensor.element_size()])


def _sizes(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Largest absolute and relative difference of numbers in two rows."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    apart, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    relative = torch.where(apart == 0, apart, apart / larger)
    return _largest(apart), _largest(relative)


def _largest(differences: Tensor) -> float:
    return float(differences.nan_to_num(math.inf, posinf=math.inf).max())


def _position(manifest: Manifest) -> dict[str, Any]:
    return manifest.position.model_dump(mode="json")


def _keys(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Dotted keys whose values differ in two nested tables."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if _text(a) == _text(b) else [f"{prefix}: {_text(a)} against {_text(b)}"]
    inner = f"{prefix}." if prefix else ""
    return [
        text for key in [*a, *(key for key in b if key not in a)] for text in _keys(a.get(key), b.get(key), inner + key)
    ]


def _text(value: Any) -> str:
    return json.dumps(value)
