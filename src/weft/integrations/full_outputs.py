"""Outputs of a model for a script that does not know about the plan: full rows under tp and cp, and float32.

A split model returns the logits of the tokens, and of the part of the vocabulary, of one rank. A user's script takes them for
those of full rows, and would be silently wrong. Here forward returns what the unmodified model returns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.errors import ModelError
from weft.integrations.fused_head import fused_output, take_arguments
from weft.parallel.loss.logits import gather_logits
from weft.parallel.runtime import runtime


class _Call(NamedTuple):
    """Arguments of the forward that is running."""

    tokens: int
    kept: Any
    """`logits_to_keep`: each rank has the logits of other tokens."""
    fused: dict[str, Any] | None
    """Arguments of TRL's fused head; None without it."""


class ReadOutputs:
    """Forward hooks that prepare the outputs of a model for a script that reads them."""

    def __init__(self) -> None:
        self.is_on = True
        """False: outputs stay as they are, because nobody reads them; the loss is not affected."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which outputs are not prepared."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


class Float32Outputs(ReadOutputs):
    """Forward hook that returns outputs in bf16 or fp16 as float32, as accelerate does under mixed precision.

    A script computes its own loss and metrics from them, and may gather them together with tensors in float32.
    """

    def __init__(self, model: nn.Module):
        """
        Args:
            model: parallelized model.
        """
        super().__init__()
        model.register_forward_hook(lambda _, __, output: convert_to_fp32(output) if self.is_on else None)


class FullOutputs(ReadOutputs):
    """Forward hooks that gather the logits of full rows over the full vocabulary. Differentiable; collective over tp and cp."""

    def __init__(self, model: PreTrainedModel):
        """
        Args:
            model: parallelized model; its forward is called with full rows.
        """
        super().__init__()
        self.model = model
        self._calls: list[_Call] = []
        model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._leave)

    def _enter(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self._calls.clear()  # a failed forward may have left a call
        rows = args[0] if args else kwargs.get("input_ids")
        if not isinstance(rows, Tensor):
            return None  # `shard_inputs` refuses it
        wanted = kwargs.get("output_router_logits")
        if getattr(self.model.config.get_text_config(), "output_router_logits", False) if wanted is None else wanted:
            raise ModelError(
                "output_router_logits = True under tp or cp",
                where="plan.parallel",
                rule="the auxiliary loss of the routers needs all tokens of a row on each rank",
                fix="set output_router_logits = False in the configuration of the model, and router_aux_loss_coef = 0 in the "
                "arguments of a trainer of TRL; or use ZeRO and ep alone",
            )
        fused = take_arguments(self.model, kwargs)
        self._calls.append(_Call(rows.shape[1], kwargs.pop("logits_to_keep", 0), fused))
        return args, kwargs

    def _leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        if not self._calls:
            return None
        tokens, kept, fused = self._calls.pop()
        parallel = runtime(self.model).plan.parallel
        splits_tokens = parallel.cp > 1 or (parallel.tp > 1 and parallel.sp)
        problem = ""
        if not isinstance(output, dict):
            problem = "return_dict=False"
        elif output.get("attentions") is not None:
            problem = "output_attentions=True"
        elif output.get("hidden_states") is not None and splits_tokens:
            problem = "output_hidden_states=True"
        if problem:
            raise ModelError(
                f"{problem} under tp or cp",
                where="forward",
                rule="logits are gathered; other outputs would be those of the tokens and heads of one rank",
                fix=f"call the model without {problem}, or set tp and cp of the plan to 1",
            )
        logits = output.get("logits")
        if logits is None or not (self.is_on or fused):
            return None
        if fused:
            return fused_output(self.model, logits, tokens, fused)
        full = gather_logits(self.model, logits, tokens)
        output["logits"] = full[:, slice(-kept, None) if isinstance(kept, int) else kept]  # -0: all tokens
        return output


def prepare_outputs(core: Any, is_mixed: bool) -> list[ReadOutputs]:
    """Hooks that a parallelized model needs for a script that reads its outputs.

    Args:
        core: parallelized model.
        is_mixed: True if forward has another dtype than the weights that the script has made.
    """
    parallelized = runtime(core)
    found: list[ReadOutputs] = []
    if parallelized.takes_full_rows and parallelized.anatomy.head and parallelized.pipeline is None:
        found.append(FullOutputs(core))  # the outputs of a pipeline are read by its last stage alone
    if is_mixed and parallelized.plan.precision.param_dtype in ("bf16", "fp16"):
        found.append(Float32Outputs(core))
    return found
