"""Recorded steps and tensors of the two sides of a comparison, and their differences."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

TensorKind = Literal["output", "gradient", "weight", "weight before"]
"""Kinds of recorded tensors; "weight before" only for a step after the first, to compute the changes of the weights."""
KINDS: tuple[TensorKind, ...] = ("output", "gradient", "weight")
"""Compared kinds, in order of comparison."""


@dataclass(frozen=True)
class RecordedTensor:
    """Metadata of a tensor that a side has recorded."""

    kind: TensorKind
    name: str
    """Name of the module (output) or of the parameter."""
    largest: float = 0.0
    """Largest magnitude of its elements."""
    spread: float = 0.0
    """Largest difference between ranks of this side that should hold the same values, including the stages of a tied weight."""


@dataclass(frozen=True)
class RecordedStep:
    """Loss and gradient norm of one step of a side."""

    loss: float
    grad_norm: float
    problem: str | None = None
    """Reason why the update was skipped; None if it was not."""


@dataclass(frozen=True)
class Side:
    """Content of side.json: steps and tensor metadata of one side."""

    steps: list[RecordedStep]
    learning_rate: float
    """Learning rate of the step with recorded tensors."""
    tensors: list[RecordedTensor]
    """Recorded tensors, in order of comparison."""
    step: int = 1
    """Step with recorded tensors, counted from 1."""

    def write(self, folder: Path) -> None:
        (folder / "side.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Side":
        fields = json.loads((folder / "side.json").read_text(encoding="utf-8"))
        steps = [RecordedStep(**step) for step in fields["steps"]]
        tensors = [RecordedTensor(**tensor) for tensor in fields["tensors"]]
        return cls(steps, fields["learning_rate"], tensors, fields["step"])


def tensor_file(folder: Path, kind: TensorKind, name: str, piece: int = 0) -> Path:
    """File of a recorded tensor. Outputs have one piece per row of the global batch, other tensors a single piece."""
    return folder / kind / name / f"{piece:06d}.safetensors"


@dataclass(frozen=True)
class Difference:
    """Difference of two sides in one tensor."""

    kind: TensorKind
    name: str
    size: float
    """Largest difference, relative to the scale of the tensor."""
    tolerance: float
    """Maximum of `size` for equal tensors."""
    index: tuple[int, ...] = ()
    """Index of the largest difference; for an output: row of the global batch, token, feature."""
    note: str = ""

    @property
    def exceeds(self) -> bool:
        return not self.size <= self.tolerance

    def __str__(self) -> str:
        scale = "the learning rate" if self.kind == "weight" else "its largest value"
        size = f"off by {self.size:.1e} of {scale}, tolerance {self.tolerance:.1e}"
        problem = size if math.isfinite(self.size) else "" if self.note else "finite on one side only"
        index = f"at {list(self.index)}" if self.index else ""
        return f"{self.kind} of {self.name}: {', '.join(part for part in (problem, index, self.note) if part)}"


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: steps and tensors of two sides."""

    steps: list[tuple[RecordedStep, RecordedStep]]
    tensors: list[Difference]
    tolerance: float
    step: int = 1
    """Step with recorded tensors, counted from 1."""

    @property
    def first(self) -> Difference | None:
        """First tensor that differs by more than rounding."""
        return next((tensor for tensor in self.tensors if tensor.exceeds), None)

    @property
    def first_step(self) -> int | None:
        """First step, counted from 1, whose loss or gradient norm differs by more than rounding."""
        sizes = [max(relative(a.loss, b.loss), relative(a.grad_norm, b.grad_norm)) for a, b in self.steps]
        return next((step for step, size in enumerate(sizes, 1) if size > self.tolerance), None)

    @property
    def agrees(self) -> bool:
        return self.first is None and self.first_step is None

    def by_kind(self) -> dict[TensorKind, list[Difference]]:
        """Tensors of each kind, in order, without empty kinds."""
        kinds = dict.fromkeys(tensor.kind for tensor in self.tensors)
        return {kind: [tensor for tensor in self.tensors if tensor.kind == kind] for kind in kinds}

    def problems(self) -> list[tuple[str, int, str]]:
        """Side, step and reason of each skipped update."""
        return [
            (side, index, step.problem)
            for index, pair in enumerate(self.steps, 1)
            for side, step in zip("AB", pair, strict=True)
            if step.problem
        ]


def relative(a: float, b: float) -> float:
    """Difference of two numbers relative to the larger number; 0 if neither is finite, infinite if exactly one is finite."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), abs(b), sys.float_info.min)
    return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
