"""Model folders read by plain Transformers in a process without Weft: what a user gets, and its held-out loss and speed."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.errors import ModelError

CHECKED_TOKENS = 32
"""Length of the row whose logits are compared."""
SHOWN = 400  # characters of an error message that are shown


@dataclass(frozen=True)
class Quality:
    """Quality of a model on held-out texts."""

    loss: float
    """Mean cross-entropy of all targets, in nats."""
    accuracy: float
    """Fraction of the targets that the model finds more likely than any other token."""
    tokens_per_second: float
    """Targets per second, one text at a time, on this machine."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(min(self.loss, 700.0))


class Reading(NamedTuple):
    """Model as plain Transformers loads and computes it."""

    logits: Tensor
    """For the row [tokens, vocabulary], float32."""
    probes: dict[str, Tensor]
    """By name of a weight, its product with random columns: a difference of these is one of the weights."""
    quality: Quality | None
    """On the texts; None without texts."""


class PlainTransformers(ExitStack):
    """Process with plain Transformers, which cannot import Weft and reads one model after the other; a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="weft-compress-")))
        self._errors = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = self.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("plain.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        )
        self.callback(self._process.kill)

    def read(
        self,
        folder: Path,
        row: Tensor,
        texts: Sequence[Tensor] = (),
        *,
        dtype: str = "auto",
        where: Path | None = None,
    ) -> Reading:
        """Load a model, compute its logits for a row, and measure it on texts.

        Args:
            folder: Hugging Face folder.
            row: token ids.
            texts: token ids of each text; those that are no targets as their complements.
            dtype: dtype in which it is loaded; auto: that of its configuration.
            where: final name of the folder, for the message; None: it has it.

        Raises:
            ModelError: Transformers cannot load or run the model.
        """
        tokens, result = self._scratch / "tokens.safetensors", self._scratch / "result.safetensors"
        save_file(request(row, texts), tokens)
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):  # its last words say why
            print(json.dumps([str(folder), dtype, str(tokens), str(result)]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise ModelError(
                f"plain Transformers cannot load or run the model: {answer['error'][:SHOWN]}",
                where=str(where or folder),
                rule="AutoModelForCausalLM.from_pretrained loads the folder, and its logits are finite",
                fix='choose another recipe; where numbers overflow, set dtype = "fp32" in a recipe file',
            )
        return reading(answer, result)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with code {self._process.wait()}: {(lines or ['no message'])[-1]}"


def request(row: Tensor, texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors of a request, see `plain.read`."""
    if not texts:
        return {"row": row.contiguous()}
    lengths = torch.tensor([len(text) for text in texts])
    return {"row": row.contiguous(), "texts": torch.cat(list(texts)), "lengths": lengths}


def reading(answer: dict[str, Any], result: Path) -> Reading:
    """Reading of an answer and a file, see `plain.read`."""
    loss, right, targets, seconds = (answer[key] for key in ("loss", "right", "targets", "seconds"))
    quality = Quality(loss / targets, right / targets, targets / seconds) if targets else None
    probes = load_file(result)
    return Reading(probes.pop("logits"), probes, quality)


def measure(folder: Path, texts: Sequence[Tensor]) -> Quality:
    """Held-out loss and speed of a model; arguments and errors as of `PlainTransformers.read`."""
    with PlainTransformers() as plain:
        quality = plain.read(folder, torch.zeros(1, dtype=torch.int64), texts).quality
    assert quality is not None
    return quality


def checked_row(rows: Sequence[Tensor], vocabulary: int, positions: int | None) -> Tensor:
    """Token ids whose logits are compared: the begin of the longest calibration row, or tokens from all over the vocabulary.

    Args:
        rows: calibration rows, if there are any.
        vocabulary: number of tokens of the model.
        positions: number of positions of the model; None: any.
    """
    length = min(CHECKED_TOKENS, positions or CHECKED_TOKENS)
    return max(rows, key=len)[:length] if len(rows) else torch.linspace(0, vocabulary - 1, length).long()


def check_model(found: Reading, before: Reading, bounds: tuple[float, float], folder: Path) -> None:
    """Check that a compressed model is the model before, within the error of its format.

    Args:
        found: compressed model.
        before: model before.
        bounds: largest relative differences of logits and of a weight.
        folder: folder of the compressed model, for the message.

    Raises:
        ModelError: logits or a weight differ by more, or the logits are the same for all tokens.
    """
    of_logits, of_weight = bounds
    differences = {"logits": _difference(found.logits, before.logits)}
    if float(found.logits.std()) == 0 < float(before.logits.std()):
        differences["logits"] = math.inf
    differences |= {
        name: _difference(found.probes[name], own) for name, own in before.probes.items() if name in found.probes
    }
    for name, difference in differences.items():
        bound = of_logits if name == "logits" else of_weight
        if not difference <= bound or difference == math.inf:  # NaN, too
            raise ModelError(
                f"plain Transformers loads another model from the new folder: its {name} differ by {difference:.1%}",
                where=str(folder),
                rule=f"the format explains a difference of at most {bound:.0%}",
                fix="choose another recipe, or a larger dtype or smaller groups in a recipe file",
            )


def _difference(found: Tensor, before: Tensor) -> float:
    return float((found - before).norm() / before.norm().clamp(min=1e-30)) if found.shape == before.shape else 0.0
