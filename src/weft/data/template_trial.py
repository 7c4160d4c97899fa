"""Trial of a chat template before it renders records: a template is a program of somebody else, which may not end."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 2  # of CPU, for two short messages, which take less than a hundredth
BYTES = 2**30
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def refuse_endless(
    tokenizer: "PreTrainedTokenizerBase", where: str, arguments: Mapping[str, Any] | None = None
) -> None:
    """Refuse a chat template that computes or writes without end, by a trial in a fork with limits of CPU and memory.

    Args:
        tokenizer: tokenizer with a chat template.
        where: folder of the tokenizer, for the message.
        arguments: arguments of the template.

    Raises:
        DataError: the trial exceeds a limit. An error of the template in the trial is none: it may refuse these messages.
    """
    child = os.fork()
    if child == 0:
        _render(tokenizer, arguments or {})
    _, status = os.waitpid(child, 0)
    if status:
        raise DataError(
            f"the chat template does not end: two messages take more than {SECONDS} s of CPU or {BYTES >> 30} GiB",
            where=where,
            rule="the template renders every chat",
            fix="use the template of an instruct model, or correct its loops",
        )


def _render(tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any]) -> None:
    """Render two messages and end the process; with another code than 0 beyond the limits."""
    code = 1
    try:
        used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        for limit, most in (("CORE", 0), ("CPU", SECONDS), ("AS", used + BYTES)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
        tokenizer.apply_chat_template(MESSAGES, tokenize=False, **arguments)
        code = 0
    except MemoryError:
        pass
    except BaseException:
        code = 0
    finally:
        os._exit(code)
