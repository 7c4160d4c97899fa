"""State of compressed reductions between steps: compression errors (error feedback) and local momenta.

Error feedback (Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019)
adds the compression error of a message to the next message. After T steps, the sum of the decoded messages equals the sum of
the inputs except for the last error. Both sides apply it: a worker to its messages to the owners of the other parts, and the
owner of a part to the mean that it sends back.

Momenta change slowly, so that messages contain their changes, which all receivers add up (Richtárik et al., EF21, 2021;
Fatkhullin et al., Momentum Provably Improves Error Feedback, 2023). The compression error is then a fraction of the change
instead of the momentum.

Changes of a step are pending until `commit`, so that a skipped step leaves the state unchanged.
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec


class CommittedTensor:
    """Tensor whose changes in a step are pending until `commit`."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        self.committed = torch.zeros(shape, device=device)
        self.pending = torch.zeros(shape, device=device)
        self.is_open = False

    def open(self) -> Tensor:
        """Pending tensor of this step, for changes in place."""
        if not self.is_open:
            self.pending.copy_(self.committed)
            self.is_open = True
        return self.pending

    def commit(self, factor: float) -> None:
        """Commit the pending tensor, times a factor."""
        if self.is_open:
            # The tensor objects stay and swap their memory, since a snapshot refers to the committed tensor.
            self.committed.data, self.pending.data = self.pending.data, self.committed.data
            if factor != 1:
                self.committed.mul_(factor)
        self.is_open = False

    def discard(self) -> None:
        """Discard the pending changes."""
        self.is_open = False


class Feedback:
    """State of all compressed reductions of a rank.

    Args:
        codec: codec of the messages of workers.
        owner_codec: codec of the messages with which owners send the mean back; None: the same codec.
        keeps_errors: True for error feedback.
        takes_momentum: True to reduce momenta instead of gradients; reductions are then uncompressed until `begin` gets a
            decay.
    """

    def __init__(
        self, codec: Codec, owner_codec: Codec | None = None, *, keeps_errors: bool = True, takes_momentum: bool = False
    ):
        self.codec, self.owner_codec = codec, owner_codec or codec
        self.keeps_errors, self.takes_momentum = keeps_errors, takes_momentum
        self.loss_scale = 1.0
        self.decay: float | None = None
        self.states: dict[str, CommittedTensor] = {}
        """State by "error/NAME", "momentum/NAME" and "mean/NAME", for the name of each reduction."""
        self.loaded: dict[str, Tensor] = {}
        """State of a checkpoint for reductions that have not run yet."""

    @property
    def is_on(self) -> bool:
        """True if the reductions of this step are compressed."""
        return not self.takes_momentum or self.decay is not None

    def begin(self, loss_scale: float = 1.0, decay: float | None = None) -> None:
        """Begin a step, before its first backward; discard the pending changes of a skipped step.

        Args:
            loss_scale: loss scale of the gradients of this step; the state has none.
            decay: decay of the momenta; None in the steps before momenta are reduced.
        """
        self.loss_scale, self.decay = loss_scale, decay
        for state in self.states.values():
            state.discard()

    def commit(self, factor: float = 1.0) -> None:
        """Commit the state after the update of a step.

        Args:
            factor: factor by which momenta were clipped; their state is scaled alike. Errors of gradients are not clipped.
        """
        for state in self.states.values():
            state.commit(factor if self.decay is not None else 1.0)

    def add_to(self, name: str, gradient: Tensor, *, momentum: bool) -> Tensor:
        """Input of a compressed reduction: the gradient, or the momentum updated with it, plus the previous error.

        With error feedback, the change of the momentum is sent instead of the momentum, see `add_change`.

        Args:
            name: name of the reduction.
            gradient: [parts, length], of any float dtype; not modified.
            momentum: True if this reduction turns gradients into momenta.

        Returns:
            [parts, length] float32, without loss scale. The caller overwrites it with the compression error of its message,
            which error feedback keeps.
        """
        shape, device = tuple(gradient.shape), gradient.device
        errors = self._state(f"error/{name}", shape, device) if self.keeps_errors else None
        total = errors.open() if errors is not None else torch.zeros(shape, device=device)
        share = 1 / self.loss_scale
        if momentum and self.decay is not None:
            state = self._state(f"momentum/{name}", shape, device)
            is_first = not state.is_open
            velocity = state.open()
            share *= 1 - self.decay
            if is_first:  # first micro-batch of the step; the others are reduced separately
                total.add_(velocity, alpha=self.decay - 1 if self.keeps_errors else self.decay)
                velocity.mul_(self.decay)
            velocity.add_(gradient, alpha=share)
        return total.add_(gradient, alpha=share)

    def add_change(self, name: str, mean: Tensor, *, momentum: bool) -> Tensor:
        """Convert a mean change of momenta into the mean momentum, in place. Gradients and full momenta are unchanged.

        Args:
            name: name of the reduction.
            mean: [length] float32, the mean over ranks of the tensors of `add_to`, without loss scale.
            momentum: as for `add_to`.
        """
        if not (momentum and self.decay is not None and self.keeps_errors):
            return mean
        state = self._state(f"mean/{name}", tuple(mean.shape), mean.device)
        is_first = not state.is_open
        known = state.open().add_(mean)
        return mean.copy_(known) if is_first else mean  # later micro-batches return their change alone, which is added

    def add_up(self, name: str, gradient: Tensor) -> None:
        """Convert an uncompressed gradient into a momentum, in place, so that the optimizer gets momenta of all parameters.

        Args:
            name: name of the reduction.
            gradient: mean gradient over ranks, of any shape.
        """
        if self.decay is None:
            return
        state = self._state(f"momentum/{name}", tuple(gradient.shape), gradient.device)
        is_first = not state.is_open
        velocity = state.open()
        before = velocity.mul_(self.decay) if is_first else torch.zeros_like(velocity)
        added = gradient.float() * ((1 - self.decay) / self.loss_scale)
        gradient.copy_((before + added).mul_(self.loss_scale))
        velocity.add_(added)

    def tensors(self) -> dict[str, Tensor]:
        """Checkpoint state of this rank, by name; the tensor objects never change."""
        return {name: state.committed for name, state in self.states.items()}

    def all_tensors(self) -> list[Tensor]:
        """All tensors in memory, pending tensors included."""
        return [tensor for state in self.states.values() for tensor in (state.committed, state.pending)]

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load the state of this rank from a checkpoint; without tensors, reset the state.

        Args:
            tensors: float32, by the names of `tensors`; a tensor with another shape than that of its reduction is ignored.
        """
        self.loaded = dict(tensors)
        for name, state in self.states.items():
            state.discard()
            loaded = self.loaded.pop(name, None)
            if loaded is not None and loaded.shape == state.committed.shape:
                state.committed.copy_(loaded)
            else:
                state.committed.zero_()

    def _state(self, name: str, shape: tuple[int, ...], device: torch.device) -> CommittedTensor:
        state = self.states.get(name)
        if state is None:
            state = self.states[name] = CommittedTensor(shape, device)
            loaded = self.loaded.pop(name, None)
            if loaded is not None and loaded.shape == shape:
                state.committed.copy_(loaded)
        return state
