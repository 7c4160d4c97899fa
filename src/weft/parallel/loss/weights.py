"""Weights of the losses of data ranks, for models that compute a mean over their own labels: by targets, rows or elements.

The mean over ranks of means over the targets of each rank is not the mean over all targets. How a loss weighs its targets is
found by experiment: the means of the field, computed from the logits and labels of a forward, are compared with its loss.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.collectives import all_reduce
from weft.data import IGNORED
from weft.topology.mesh import DATA_AXES

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
ROUNDED = 1e-2  # tolerance of a loss computed in 16 bits


class Candidate(NamedTuple):
    """A mean over the labels of a forward."""

    loss: Tensor
    """Its value."""
    weight: Tensor
    """Number of targets, rows or elements that it averages, float64."""


def _targets(logits: Tensor, labels: Tensor) -> Candidate:
    """Mean over all labels that are targets."""
    loss = F.cross_entropy(logits.flatten(0, -2).double(), labels.flatten())
    return Candidate(loss, (labels != IGNORED).sum().double())


def _rows(logits: Tensor, labels: Tensor) -> Candidate:
    """Mean over rows of the means over the targets of a row."""
    losses = F.cross_entropy(logits.flatten(0, -2).double(), labels.flatten(), reduction="none").view(len(labels), -1)
    targets = (labels != IGNORED).view(len(labels), -1).sum(1)
    kept = targets > 0
    return Candidate((losses.sum(1)[kept] / targets[kept]).mean(), kept.sum().double())


def _squares(logits: Tensor, labels: Tensor) -> Candidate:
    return Candidate(
        F.mse_loss(logits.double(), labels.double()), torch.tensor(float(len(labels)), dtype=torch.float64)
    )


def _classes(logits: Tensor, labels: Tensor) -> Candidate:
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    return Candidate(loss, torch.tensor(float(len(labels)), dtype=torch.float64))


def _spans(logits: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Candidate:
    """Mean of the losses of the first and of the last token of answers; positions outside of the row are no targets."""
    losses, counts = zip(
        *(
            _targets(own, torch.where(at < own.shape[1], at, IGNORED))
            for own, at in zip(logits, (at.reshape(len(at)) for at in labels), strict=True)
        ),
        strict=True,
    )
    return Candidate(torch.stack(losses).mean(), torch.stack(counts).max())


Mean = Callable[[Any, Any], Candidate]


def means_of(inputs: Mapping[str, Any], output: Any) -> dict[str, Candidate]:
    """Means that the loss of a forward may be, by name; those that do not fit the shapes are left out.

    Args:
        inputs: arguments of the forward.
        output: its output.
    """
    labels, logits = inputs.get("labels"), getattr(output, "logits", None)
    if isinstance(inputs.get("start_positions"), Tensor) and hasattr(output, "start_logits"):
        ends = (output.start_logits, output.end_logits), (inputs["start_positions"], inputs["end_positions"])
        return {"spans": _spans(*ends)}
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor):
        return {}
    means: dict[str, Mean] = {}
    if not labels.is_floating_point() and logits.shape[:-1] == labels.shape:
        means = {"targets": _targets, "rows": _rows}
    elif not labels.is_floating_point() and labels.ndim > 0 and logits.shape[:-1].numel() == labels.numel():
        labels, means = labels.view(logits.shape[:-1]), {"targets": _targets}
    if labels.is_floating_point() and logits.numel() == labels.numel():
        logits, means = logits.view_as(labels), {"squares": _squares, "classes": _classes}
    return {name: mean(logits.detach(), labels.to(logits.device)) for name, mean in means.items()}


class LossWeights:
    """Mean that the loss of a model is; known after a forward in which the means differ."""

    def __init__(self, name: str, mesh: DeviceMesh):
        """
        Args:
            name: class of the model, for the warning.
            mesh: device mesh of all ranks.
        """
        self.name, self.mesh = name, mesh
        self.left: list[str] | None = None
        """Means that the losses of all forwards so far have been, the same on every rank; None before the first forward."""

    def weight(self, loss: Tensor, inputs: Mapping[str, Any], output: Any) -> Tensor:
        """Weight of the loss of this rank, float64 scalar. Collective over the data ranks while several means are possible.

        Args:
            loss: loss of the forward.
            inputs: its arguments.
            output: its output.
        """
        one = torch.ones((), dtype=torch.float64, device=loss.device)
        if self.left == []:
            return one
        with torch.no_grad():
            means = means_of(inputs, output)
            if self.left is None or len(self.left) > 1:
                self._narrow(loss, means)
        first = next((name for name in self.left or () if name in means), None)
        return one if first is None else means[first].weight.to(loss.device)

    def _narrow(self, loss: Tensor, means: dict[str, Candidate]) -> None:
        """Keep the means that agree with the loss on all data ranks; a rank without targets agrees with all."""
        tolerance = TOLERANCES.get(loss.dtype, ROUNDED)
        names = ["targets", "rows", "squares", "classes", "spans"] if self.left is None else self.left
        wrong = torch.zeros(len(names), device=loss.device)
        for index, name in enumerate(names):
            if name not in means:
                wrong[index] = 1
            elif bool(means[name].weight > 0):
                wrong[index] = (means[name].loss - loss.double()).abs() > tolerance * loss.double().abs().clamp(
                    min=1e-6
                )
        found = all_reduce(wrong, self.mesh, DATA_AXES, "max").tolist()
        self.left = [name for name, is_wrong in zip(names, found, strict=True) if not is_wrong]
        if not self.left and all(self.mesh.get_local_rank(axis) == 0 for axis in self.mesh.mesh_dim_names or ()):
            warnings.warn(
                f"the loss of {self.name} is no mean over its labels that Weft knows: the losses of all data ranks count the "
                "same. If their numbers of targets differ, compute the loss yourself, and pass items= to run.backward",
                stacklevel=2,
            )
