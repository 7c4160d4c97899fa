"""Loss inside of the head: the head of a model computes the cross entropy itself, so that no logits are kept.

    forward_pass.targets = targets          # of the tokens that this rank's head will see
    with slot.running(forward_pass):
        output = model(input_ids=...)       # logits [rows, tokens, 1], zeros: a model needs some
    loss = attach_loss(forward_pass.head_loss, output.logits)

Without targets the head returns logits as always. What the model does with the logits after its head (a scale, a softcap) is
found by an experiment on a small copy of the model.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.anatomy.shrink import VOCABULARY, memo_of, small_copy
from weft.anatomy.transformers import read_anatomy
from weft.compute.cross_entropy import Chunks, LogitTransform, Vocabulary, linear_cross_entropy_sum
from weft.data import IGNORED, MicroBatch
from weft.errors import ModelError, PlanError
from weft.parallel.loss.cross_entropy import own_vocabulary, vocab_size
from weft.parallel.sequence.forward_pass import ForwardPass, ForwardSlot
from weft.plan import ResolvedPlan

if TYPE_CHECKING:
    from weft.parallel.build import Build

ROWS, TOKENS, FIRST_TOKEN = 2, 12, 3
CLOSE = 1e-5  # relative difference of two losses in float32, of which the wrong transform differs by more than 1e-3


@dataclass
class LinearLoss:
    """A head that computes the loss of a forward with targets."""

    modules: tuple[nn.Module, ...]
    """The head, and the model."""
    slot: ForwardSlot
    """Forward that the model runs now."""
    transform: LogitTransform
    vocabulary: Vocabulary
    chunks: Chunks | None = None
    """Ranges of tokens that are computed; None: all."""

    def sees_all(self) -> bool:
        """False if code of the user sees the logits: a forward hook of the head or of the model may change them."""
        hooks = (hook for module in self.modules for hook in module._forward_hooks.values())
        return all(_origin(hook) in ("weft", "torch") for hook in hooks)


def attach_loss(loss: Tensor, logits: Tensor) -> Tensor:
    """The loss of a head, whose backward also reaches the logits that the model returned."""
    return _Attach.apply(loss, logits)


def install_linear_loss(
    model: PreTrainedModel, anatomy: Anatomy, mesh: DeviceMesh, transform: LogitTransform, slot: ForwardSlot
) -> LinearLoss:
    """Let the head of a model compute the loss of a forward with targets, in place.

    Args:
        model: model after tensor parallelism; the head is on this rank.
        anatomy: its roles.
        mesh: device mesh with the axes of `weft.topology.mesh`.
        transform: result of `find_transform`.
        slot: slot of the runtime of the model.
    """
    head = model.get_submodule(anatomy.head)
    vocabulary = own_vocabulary(mesh.get_group("tp"), vocab_size(model))
    return _install(head, LinearLoss((head, model), slot, transform, vocabulary))


def forwards_of(model: nn.Module, anatomy: Anatomy) -> tuple[Any, Any]:
    """Forwards of a model and of its head, to see whether somebody replaces them."""
    return vars(model).get("forward"), vars(model.get_submodule(anatomy.head)).get("forward")


def _origin(hook: Any) -> str:
    """Package that defines a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0]


def choose_linear_loss(model: Any, anatomy: Anatomy, plan: ResolvedPlan) -> LogitTransform | None:
    """Transform from the outputs of a head to logits; None if the loss is computed from logits.

    Args:
        model: full model on any device, including meta.
        anatomy: its roles.
        plan: plan.

    Raises:
        PlanError: the plan names the chunked implementation, and it does not apply.
    """
    asked = plan.compute.kernel("linear_cross_entropy")
    if asked == "reference":
        return None
    transform, reason = find_transform(model, anatomy, plan)
    if transform is None and asked != "auto":
        raise PlanError(
            f"linear_cross_entropy = {asked} for {anatomy.family}: {reason}",
            where="plan.compute.kernels",
            rule="the loss can be computed inside of the head if the head is a linear layer, and the logits are its outputs, "
            "with a scale or a softcap of the configuration (tested on a small copy of the model)",
            fix='set linear_cross_entropy to "auto" or "reference"',
        )
    return transform


def find_transform(model: Any, anatomy: Anatomy, plan: ResolvedPlan) -> tuple[LogitTransform | None, str]:
    """Transform from the outputs of a head to logits; None and the reason if the loss cannot be computed inside of the head.

    The candidates from the configuration are tried on a small copy of the model, whose loss must equal that of its logits.
    Arguments as for `choose_linear_loss`.
    """
    head = model.get_submodule(anatomy.head) if anatomy.head else None
    if type(head) is not nn.Linear:
        return None, f"the head is {'missing' if head is None else f'a {type(head).__name__}'}, not a linear layer"
    if plan.precision.backward == "fp16":
        return None, 'precision.backward = "fp16" begins at the logits'
    memo = memo_of(model)
    if "transform" not in memo:
        memo["transform"] = _try_transforms(model, anatomy)
    transform, reason = memo["transform"]
    return transform, reason


def _try_transforms(model: Any, anatomy: Anatomy) -> tuple[LogitTransform | None, str]:
    """Result of `find_transform` for a linear head."""
    config: Any = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scales = [getattr(config, "logit_scale", None), getattr(config, "lm_head_multiplier", None)]
    scales += [1 / value for value in (getattr(config, "logits_scaling", None),) if value]
    try:
        copy = small_copy(model, anatomy, None)
        rows = torch.randint(FIRST_TOKEN, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), torch.device("cpu"):
            logits = copy(input_ids=rows, use_cache=False).logits
            expected = F.cross_entropy(logits.flatten(0, 1).float(), rows.flatten(), reduction="sum")
            small_head, slot = copy.get_submodule(read_anatomy(copy).head), ForwardSlot()
            linear_loss = _install(small_head, LinearLoss((small_head, copy), slot, LogitTransform(), Vocabulary()))
            for scale in dict.fromkeys([1.0, *(float(scale) for scale in scales if scale)]):
                linear_loss.transform = LogitTransform(scale, cap)
                trial = ForwardPass(MicroBatch(rows, torch.arange(TOKENS).expand_as(rows), rows), targets=rows)
                with slot.running(trial):
                    copy(input_ids=rows, use_cache=False)
                if trial.head_loss is not None and abs(trial.head_loss - expected) < CLOSE * expected:
                    return linear_loss.transform, ""
    except ModelError as error:
        return None, error.what
    except Exception as error:  # families raise many types of exceptions for logits of another size
        return None, f"its forward needs logits ({type(error).__name__})"
    return None, "its logits are not those of its head, with a scale or a softcap of its configuration"


def _install(head: Any, linear_loss: LinearLoss) -> LinearLoss:
    head.forward = partial(_forward, head.forward, head, linear_loss)
    return linear_loss


def _forward(forward: Any, head: nn.Linear, linear_loss: LinearLoss, hidden: Tensor) -> Tensor:
    current = linear_loss.slot.current
    if current is None or current.targets is None:
        return forward(hidden)
    if current.targets.shape != hidden.shape[:-1]:
        raise ModelError(
            f"the head of {tuple(hidden.shape[:-1])} tokens has targets of {tuple(current.targets.shape)}",
            where="plan.compute.kernels, linear_cross_entropy",
            rule="the loss in the head needs a target for each token that the head sees",
            fix='set plan.compute.kernels = {linear_cross_entropy = "reference"}',
        )
    how = linear_loss.transform, linear_loss.vocabulary, linear_loss.chunks
    current.head_loss = linear_cross_entropy_sum(hidden, head.weight, head.bias, current.targets, IGNORED, *how)
    return _Empty.apply(hidden, current.head_loss)


class _Empty(torch.autograd.Function):
    """Zeros in the place of logits, in the graph of the hidden states, to which they pass no gradient.

    FSDP2 gathers the weights for backward in a hook on the output of the model. If the loss is not finite, the result is not
    either, so that the search for the first non-finite module ends at the head.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        return (loss * 0).to(hidden.dtype).repeat(*hidden.shape[:-1], 1)  # a copy, because FSDP2 warns about views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


class _Attach(torch.autograd.Function):
    """The loss; backward also reaches the empty logits, with a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.logits = logits.shape, logits.dtype, logits.device
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shape, dtype, device = ctx.logits
        return gradient, torch.zeros((), dtype=dtype, device=device).expand(shape)


def move_loss(build: "Build") -> None:
    """Step of `parallelize`: the loss inside of the head, which tensor parallelism has split by vocabulary."""
    build.begin("move_loss", "split_tensors", "average_loss")
    transform, stage_io = build.choices.transform, build.stage_io
    if transform is not None and (stage_io is None or stage_io.has_last()):
        slot = build.runtime.forward_slot
        build.runtime.linear_loss = install_linear_loss(build.model, build.anatomy, build.mesh, transform, slot)
