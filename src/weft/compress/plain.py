"""Plain Transformers in a process that cannot import Weft: `python plain.py` answers requests, each a JSON list in a line.

A request has the arguments of `read`; the answer is one JSON object.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

PROBES = 16


@torch.no_grad()
def read(folder: str, dtype: str, tokens: str, result: str) -> dict[str, Any]:
    """Load a model, write what identifies it, and measure it on texts.

    Args:
        folder: Hugging Face folder.
        dtype: dtype in which it is loaded; auto: that of its configuration.
        tokens: safetensors file with `row` [tokens]; and `texts`, one after the other, with their `lengths`. A token of a text
            that is no target is the complement of its id.
        result: safetensors file to write: `logits` of the row [tokens, vocabulary], and by the name of each weight its product
            with random columns [rows, PROBES], which are the same for all models.

    Returns:
        Sums over the targets of the texts: `loss` in nats, `right` (the most likely token), and `targets`; `seconds`.

    Raises:
        ValueError: weights are missing, or logits are not finite.
    """
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    model, report = loaded
    if lost := [*sorted(report["missing_keys"]), *map(str, report["mismatched_keys"])]:
        raise ValueError(f"{len(lost)} weights are missing or have the wrong shape, the first is {lost[0]}")
    given, seen = load_file(tokens), model.eval()
    found = seen(given["row"][None], use_cache=False).logits[0].float()  # unpacks the weights
    if not found.isfinite().all():
        raise ValueError(f"its logits are not finite in {str(model.dtype).removeprefix('torch.')}")
    random = torch.Generator()
    weights = {name: w.flatten(0, -2) for name, w in seen.state_dict().items() if w.is_floating_point() and w.ndim > 1}
    probes = {
        name: w.float() @ torch.randn(w.shape[1], PROBES, generator=random.manual_seed(0))
        for name, w in weights.items()
    }
    save_file({**probes, "logits": found.contiguous()}, result)
    loss, right, targets, began = 0.0, 0, 0, time.perf_counter()
    for text in given["texts"].split(given["lengths"].tolist()) if "texts" in given else ():
        ids, expected = torch.where(text < 0, ~text, text), text[1:]
        found = seen(ids[None, :-1], use_cache=False).logits[0].float()[expected >= 0]
        expected = expected[expected >= 0]
        loss += float(torch.nn.functional.cross_entropy(found, expected, reduction="sum"))
        right += int((found.argmax(-1) == expected).sum())
        targets += len(expected)
    if loss != loss:
        raise ValueError("its loss on the held-out texts is not finite")
    return {"loss": loss, "right": right, "targets": targets, "seconds": time.perf_counter() - began}


def main() -> None:
    """Answer each request of stdin on stdout, which libraries do not write to."""
    sys.modules["weft"] = None  # type: ignore[assignment]  # an import of Weft would raise
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for line in sys.stdin:
        try:
            answer = read(*json.loads(line))
        except Exception as error:  # families and formats raise all types of errors
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
