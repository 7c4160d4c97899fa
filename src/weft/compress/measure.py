"""Held-out loss and speed of a model folder, by plain Transformers in a separate process.

python -m weft.compress.measure FOLDER ROWS.safetensors   # prints JSON
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.errors import ModelError


@dataclass(frozen=True)
class Quality:
    """Quality of a model on held-out rows."""

    loss: float
    """Mean cross-entropy of all targets, in nats."""
    accuracy: float
    """Fraction of the targets that the model finds more likely than any other token."""
    tokens_per_second: float
    """Tokens read per second, one row at a time, on this machine."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(min(self.loss, 700.0))


def measure(folder: Path, rows: Tensor) -> Quality:
    """Measure a model in a fresh process, which only has the folder and the rows.

    Args:
        folder: Hugging Face folder.
        rows: held-out token ids [rows, tokens].

    Raises:
        ModelError: Transformers cannot load or run the model.
    """
    with tempfile.TemporaryDirectory(prefix="weft-compress-") as scratch:
        file = Path(scratch) / "rows.safetensors"
        save_file({"rows": rows.contiguous()}, file)
        command = [sys.executable, "-m", "weft.compress.measure", str(folder), str(file)]
        ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise ModelError(
            f"the model cannot be loaded or run: {(ended.stderr.strip().splitlines() or ['no message'])[-1]}",
            where=str(folder),
            rule="AutoModelForCausalLM.from_pretrained loads the folder",
            fix="run the command that follows to see all messages: " + " ".join(command[1:4]),
        )
    return Quality(**json.loads(ended.stdout.strip().splitlines()[-1]))


@torch.no_grad()
def _measure_here(folder: str, file: str) -> Quality:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    rows = load_file(file)["rows"]
    model(rows[:1, :2], use_cache=False)  # decompresses the weights
    total, right, began = 0.0, 0, time.perf_counter()
    for row in rows.split(1):
        logits = model(row[:, :-1], use_cache=False).logits.float()
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"))
        right += int((logits.argmax(-1) == row[:, 1:]).sum())
    tokens = rows[:, 1:].numel()
    return Quality(total / tokens, right / tokens, tokens / (time.perf_counter() - began))


if __name__ == "__main__":
    print(json.dumps(asdict(_measure_here(*sys.argv[1:]))))
