"""What the compressed reductions of a rank carry from one step to the next: what messages left out, and local momenta.

Error feedback (Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019):
what a message did not say is added to the next one, so that after T steps all that has been decoded is all that was put in, but
for the last error. Both sides do it: a worker for what it sends to the owners of the other parts, and the owner of a part for
the mean that it sends back.

Of momenta, which change slowly, messages say by how much they have changed, and all who receive them add that up (Richtárik et
al., EF21, 2021; Fatkhullin et al., Momentum Provably Improves Error Feedback, 2023): what is left out is a part of the change,
not of the momentum.

What a step changes is pending until `commit`: a step that is skipped leaves everything as it was.
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec


class CommittedTensor:
    """A tensor that a step changes for good only with `commit`."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        self.settled = torch.zeros(shape, device=device)
        self.pending = torch.zeros(shape, device=device)
        self.is_open = False

    def open(self) -> Tensor:
        """The tensor to change, in place, as this step has left it until now."""
        if not self.is_open:
            self.pending.copy_(self.settled)
            self.is_open = True
        return self.pending

    def commit(self, factor: float) -> None:
        """Let what is pending be settled, times a factor."""
        if self.is_open:
            # The tensors stay, and their memory changes hands: a snapshot knows the settled one.
            self.settled.data, self.pending.data = self.pending.data, self.settled.data
            if factor != 1:
                self.settled.mul_(factor)
        self.is_open = False

    def discard(self) -> None:
        """Forget what is pending."""
        self.is_open = False


class Feedback:
    """The state of all compressed reductions of a rank.

    Args:
        codec: of the messages of workers.
        owner_codec: of those with which owners send the mean back; None for the same.
        keeps_errors: whether there is error feedback.
        takes_momentum: whether momenta are reduced in place of gradients; the first reductions, until `begin` names a decay,
            are then not compressed.
    """

    def __init__(
        self, codec: Codec, owner_codec: Codec | None = None, *, keeps_errors: bool = True, takes_momentum: bool = False
    ):
        self.codec, self.owner_codec = codec, owner_codec or codec
        self.keeps_errors, self.takes_momentum = keeps_errors, takes_momentum
        self.loss_scale = 1.0
        self.decay: float | None = None
        self.carried: dict[str, CommittedTensor] = {}
        """By "error/NAME", "momentum/NAME" and "mean/NAME", for the name of each reduction."""
        self.found: dict[str, Tensor] = {}
        """Of a checkpoint, until the reduction asks for it."""

    @property
    def is_on(self) -> bool:
        """Whether this step's reductions are compressed."""
        return not self.takes_momentum or self.decay is not None

    def begin(self, loss_scale: float = 1.0, decay: float | None = None) -> None:
        """Before a step's first backward; forgets what a skipped step has left.

        Args:
            loss_scale: factor on the gradients of this step, which what is carried does not have.
            decay: of the momenta, from the step on in which they are reduced; None before.
        """
        self.loss_scale, self.decay = loss_scale, decay
        for carried in self.carried.values():
            carried.discard()

    def commit(self, factor: float = 1.0) -> None:
        """After a step whose update is made.

        Args:
            factor: on momenta that were clipped to it: what was carried on with them is scaled alike. Errors of gradients
                are what they were before clipping.
        """
        for carried in self.carried.values():
            carried.commit(factor if self.decay is not None else 1.0)

    def add_to(self, name: str, gradient: Tensor, *, momentum: bool) -> Tensor:
        """What a reduction has to send: this gradient, or what it makes of the momentum, and what was left out before.

        With error feedback a momentum is sent as its change, for `add_change`.

        Args:
            name: of the reduction.
            gradient: [parts, length], of any float format; it is not changed.
            momentum: whether this reduction is the one that makes momenta of gradients.

        Returns:
            [parts, length] float32, without loss scale. The caller lets it be what this message leaves out; with error
            feedback that is what is carried on.
        """
        shape, device = tuple(gradient.shape), gradient.device
        errors = self._carry(f"error/{name}", shape, device) if self.keeps_errors else None
        total = errors.open() if errors is not None else torch.zeros(shape, device=device)
        share = 1 / self.loss_scale
        if momentum and self.decay is not None:
            carried = self._carry(f"momentum/{name}", shape, device)
            is_first = not carried.is_open
            velocity = carried.open()
            share *= 1 - self.decay
            if is_first:  # of the step's micro-batches, where each is reduced
                total.add_(velocity, alpha=self.decay - 1 if self.keeps_errors else self.decay)
                velocity.mul_(self.decay)
            velocity.add_(gradient, alpha=share)
        return total.add_(gradient, alpha=share)

    def add_change(self, name: str, mean: Tensor, *, momentum: bool) -> Tensor:
        """The mean momentum, of a mean change of momenta, in place; what is no momentum, or whole, stays as it is.

        Args:
            name: of the reduction.
            mean: [length] float32, of what `add_to` has made, without loss scale.
            momentum: as for `add_to`.
        """
        if not (momentum and self.decay is not None and self.keeps_errors):
            return mean
        carried = self._carry(f"mean/{name}", tuple(mean.shape), mean.device)
        is_first = not carried.is_open
        known = carried.open().add_(mean)
        return mean.copy_(known) if is_first else mean  # micro-batches after the first are added to what it came to

    def add_up(self, name: str, gradient: Tensor) -> None:
        """Let a gradient that no message compresses become momentum, in place, for the optimizer to see one kind of thing.

        Args:
            name: of the reduction.
            gradient: any shape; a mean over ranks.
        """
        if self.decay is None:
            return
        carried = self._carry(f"momentum/{name}", tuple(gradient.shape), gradient.device)
        is_first = not carried.is_open
        velocity = carried.open()
        before = velocity.mul_(self.decay) if is_first else torch.zeros_like(velocity)
        added = gradient.float() * ((1 - self.decay) / self.loss_scale)
        gradient.copy_((before + added).mul_(self.loss_scale))
        velocity.add_(added)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of this rank, by name; each stays the same tensor."""
        return {name: carried.settled for name, carried in self.carried.items()}

    def all_tensors(self) -> list[Tensor]:
        """All that is held, what is pending too."""
        return [tensor for carried in self.carried.values() for tensor in (carried.settled, carried.pending)]

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on with what a checkpoint has of this rank, or begin anew with nothing.

        Args:
            tensors: float32, by the names of `tensors`; of another shape than a reduction has, they are left out.
        """
        self.found = dict(tensors)
        for name, carried in self.carried.items():
            carried.discard()
            found = self.found.pop(name, None)
            if found is not None and found.shape == carried.settled.shape:
                carried.settled.copy_(found)
            else:
                carried.settled.zero_()

    def _carry(self, name: str, shape: tuple[int, ...], device: torch.device) -> CommittedTensor:
        carried = self.carried.get(name)
        if carried is None:
            carried = self.carried[name] = CommittedTensor(shape, device)
            found = self.found.pop(name, None)
            if found is not None and found.shape == shape:
                carried.settled.copy_(found)
        return carried
