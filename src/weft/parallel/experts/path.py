"""Forward of an experts module: one path, of which each technique sets a field.

    limit       drop the copies beyond the capacity of an expert          capacity.py
    homes       from experts to slots, where experts have moved           homes.py, relocation.py
    exchange    rows to the ranks that compute their experts, and back    dispatch.py, matrices.py, replicas.py
    meanwhile   shared experts, while rows travel                         shared.py
    compute     matmuls of the rows of each expert                        the class, weft.compute, precision/fp8_layers.py
    rounding    weights of few bits                                       precision/quantized_layers.py
    linear      matmuls whose weight gradients are computed later         late_gradients.py, pipeline/weight_gradients.py

A new transport is one class with the call of `Exchange`. The user's module keeps all of its attributes: other weights than its
own are computed by a stand-in. Only `forward` is replaced, here and nowhere else.

A copy is one pair of a token and an expert that it has chosen. A slot is a place for the weights of an expert, in the order of
ranks; at first expert e is in slot e.

Shapes: T tokens of this rank, K experts per token, H hidden size, R rows that this rank computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weft.compute.experts import experts_forward
from weft.parallel.experts.homes import ExpertHomes

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Forward of an experts module: of rows or tokens [T, H], expert indices [T, K] and router weights [T, K]; [T, H]."""
Compute = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""The same as a function of the module, or of a stand-in with other weights."""
Linear = Callable[[Tensor, Tensor, bool, Tensor], Tensor]
"""Function with the arguments and the result of `weft.compute.experts.grouped_linear`."""
Weights = Mapping[str, Any]
"""Parameters of an experts module by name, [experts, ...] each; None for one that it does not have."""


class Part(NamedTuple):
    """Rows that this rank computes with the same weights."""

    rows: Tensor
    """[R, H]."""
    expert: Tensor
    """[R, 1] int64: expert of each row, among those of the weights."""
    weights: Weights | None = None
    """Weights of other experts than those of this rank."""


class Exchange(Protocol):
    """Transport of rows to the ranks that compute their experts, and of their outputs back to the tokens."""

    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object]
    ) -> tuple[list[Part], Callable[[list[Tensor]], Tensor]]:
        """Send rows. Collective; differentiable in hidden and weights.

        Args:
            hidden: [T, H] float; T may differ between ranks and be 0.
            index: [T, K] integer: experts of each token. A copy for expert `num_experts` is not sent and contributes zero.
            weights: [T, K] float: router weights.
            meanwhile: to be called exactly once, while rows are in flight: it also prepares the weights of this rank.

        Returns:
            parts: rows to compute, in the order in which they are computed.
            bring_back: function of the outputs of the parts, without router weights. Returns [T, H], the sum of the copies of
                each token, multiplied by their router weights.
        """


def no_op() -> None: ...


@dataclass
class ExpertPath:
    """Path of the tokens of one experts module."""

    experts: Any
    """Experts module, with a forward of tokens, expert indices and router weights; its parameters are those of this rank."""
    compute: Compute = field(init=False)
    limit: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Changes experts and router weights, [T, K] each: copies that are dropped have the weight 0, and under ep the expert
    `num_experts`, which is not sent."""
    homes: ExpertHomes | None = None
    exchange: Exchange | None = None
    meanwhile: Callable[[], object] = no_op
    rounding: Callable[[Weights], Weights] | None = None
    linear: Callable[[Any], Linear] | None = None
    """Makes the matmuls of one forward with the weights of this rank, for a module or a stand-in; called while rows travel. Not
    used in float64, of which there are no grouped matmuls, or for replicas, whose gradients are needed first."""

    def __post_init__(self) -> None:
        bound = self.experts.forward
        self.compute = self.own = unbound_forward(self.experts) or (lambda _, *arguments: bound(*arguments))

    def attach(self) -> None:
        """Replace the forward of the module, if there is anything to change."""
        changes = self.limit, self.homes, self.exchange, self.rounding, self.linear
        if self.compute is self.own and all(change is None for change in changes):
            return

        # Messages are no part of a compiled block. A function, because torch.compile would compile each block anew for a bound
        # method or a `partial`.
        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return self.run(hidden_states, top_k_index, top_k_weights)

        is_compiled = self.exchange is None and self.rounding is None
        self.experts.forward = forward if is_compiled else torch.compiler.disable(forward)

    def run(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Forward of the module, [T, H]."""
        if self.limit is not None:
            index, weights = self.limit(index, weights)
        if self.homes is not None:
            index = self.homes.slots(index)
        if self.exchange is None:
            return self._own_forward()(hidden, index, weights)
        prepared: list[Forward] = []

        def while_rows_travel() -> None:
            self.meanwhile()
            prepared.append(self._own_forward())

        parts, bring_back = self.exchange(hidden, index, weights, while_rows_travel)
        outputs = []
        for part in parts:
            forward = prepared[0] if part.weights is None else partial(self.compute, self._with(part.weights))
            outputs.append(run_experts(forward, part.rows, part.expert))
        return bring_back(outputs).to(hidden.dtype)

    def _own_forward(self) -> Forward:
        """Forward with the weights of this rank."""
        module, own = self.experts, self.experts._parameters
        if self.exchange is not None or self.rounding is not None:
            module = self._with(own)
        if self.linear is None or any(weight.dtype == torch.float64 for weight in own.values() if weight is not None):
            return partial(self.compute, module)
        return partial(experts_forward, module, linear=self.linear(module))

    def _with(self, weights: Weights) -> Any:
        return stand_in(self.experts, weights if self.rounding is None else self.rounding(weights))


def run_experts(forward: Forward, rows: Tensor, index: Tensor) -> Tensor:
    """Forward of an experts module on rows with one expert each, without router weights.

    Without rows it runs too, on a row of zeros: its backward exchanges gradients, and the parameters need zero gradients.

    Args:
        forward: forward of the module.
        rows: [R, H].
        index: [R, 1] int64.

    Returns:
        [R, H].
    """
    num_rows = len(rows)
    if num_rows == 0:
        rows, index = (torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])]) for tensor in (rows, index))
    return forward(rows, index, rows.new_ones(len(rows), 1))[:num_rows]


def stand_in(experts: nn.Module, weights: Weights) -> Any:
    """Object that computes as an experts module with other weights: of its class, with its settings and its submodules.

    Args:
        experts: the module, which is not changed.
        weights: its parameters [experts, ...], of any number of experts.
    """
    number = next(len(weight) for weight in weights.values() if weight is not None)
    other = object.__new__(type(experts))
    vars(other).update(vars(experts) | {"_parameters": weights, "num_experts": number})
    return other


def unbound_forward(experts: nn.Module) -> Compute | None:
    """Forward of a module as a function of the module: that of its class, or one that has been bound to it; None for another
    function, whose module cannot be replaced by a stand-in."""
    own: Any = vars(experts).get("forward")
    if own is None:
        return type(experts).forward
    if isinstance(own, partial):
        return own.func if own.args == (experts,) and not own.keywords else None
    return own.__func__ if getattr(own, "__self__", None) is experts else None
