"""lm-eval's model interface over ranks: each data rank answers its part of the requests, and all ranks get all answers.

`HFLM` of lm-eval does the arithmetic; this module only divides the requests. Every rank builds all requests and computes all
metrics, so that the results are those of one process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from lm_eval.models.huggingface import HFLM

from weft.comm.objects import all_gather_json


def _no_more() -> None:
    return None


class DistributedLM(HFLM):
    """HFLM whose requests are divided over data ranks. Its three methods are collective."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        batch_size: int,
        *,
        part: int = 0,
        parts: int = 1,
        leads: bool = True,
        finish: Callable[[], None] = _no_more,
        progress: bool = False,
        chat_template_args: dict[str, Any] | None = None,
    ):
        """
        Args:
            model: model of Transformers on its device, or a callable with its `config` and `device` that returns logits.
            batch_size: rows per forward of a rank.
            part: data rank of this rank.
            parts: number of data ranks.
            leads: True on the one rank of each part whose answers count.
            finish: called when this rank has answered its requests of a call.
            progress: True to show a progress bar.
            chat_template_args: arguments of the chat template.
        """
        super().__init__(
            model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch_size,
            chat_template_args=chat_template_args or {},
        )
        self.part, self.parts, self.leads, self.finish, self.progress = part, parts, leads, finish, progress

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding gives it."""
        return [(value, greedy) for value, greedy in self._divide(super().loglikelihood, requests)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text."""
        return self._divide(super().loglikelihood_rolling, requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generated continuation of each prompt."""
        return self._divide(super().generate_until, requests)

    def _divide(self, answer: Callable[..., list[Any]], requests: list[Any]) -> list[Any]:
        """Answer the requests of this part, and gather the answers of all parts."""
        shares = divide([request.args[0] for request in requests], self.parts)
        own = [requests[index] for index in shares[self.part]]
        answers = answer(own, disable_tqdm=not self.progress) if own else []
        self.finish()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return answers
        found: dict[int, Any] = {}
        for gathered in all_gather_json([self.part, answers] if self.leads else None):
            if gathered is not None:
                found |= zip(shares[gathered[0]], gathered[1], strict=True)
        return [found[index] for index in range(len(requests))]


def divide(texts: Sequence[str], parts: int) -> list[list[int]]:
    """Indices of the requests of each part, balanced by length.

    Requests with the same text, such as the choices of a question, stay together: HFLM computes common tokens once.

    Args:
        texts: context of each request.
        parts: number of parts.
    """
    groups: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(text, []).append(index)
    ordered = sorted(groups.items(), key=lambda group: -len(group[0]) * len(group[1]))
    return [sorted(index for _, indices in ordered[part::parts] for index in indices) for part in range(parts)]
