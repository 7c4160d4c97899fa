"""Processes with plain Transformers that cannot import Weft: each loads one folder, as a fork of one that has the imports."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.compress import measure
from weft.compress import plain as script

SERVER = """
import os, sys, traceback

sys.modules["weft"] = None  # an import of Weft raises
import compressed_tensors, torch, transformers
from compressed_tensors.compressors import ModelCompressor
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

torch.set_num_threads(1)


def run(folder, rows, logits):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        ids = load_file(rows)["rows"]
        save_file({"logits": model.eval()(ids).logits}, logits)
        model.generate(ids[:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert not any(name.startswith("weft.") for name in sys.modules)


for line in sys.stdin:
    fork = os.fork()
    if not fork:
        try:
            run(*line.rstrip("\\n").split("\\t"))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""


class FreshTransformers:
    """Context manager of the process that forks the others."""

    def __enter__(self) -> "FreshTransformers":
        self.errors = tempfile.TemporaryFile()  # open as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()  # forks of the test process hold its stdin open, so that it would not read the end
        self.process.communicate()
        self.errors.close()

    def logits(self, folder: Path, rows: Tensor, scratch: Path) -> Tensor:
        """Logits of rows of tokens by the model of a folder, whose keys are all there and all used; it also generates.

        Args:
            folder: Hugging Face folder.
            rows: token ids [rows, tokens].
            scratch: folder for files.
        """
        save_file({"rows": rows}, scratch / "rows.safetensors")
        paths = [str(folder), str(scratch / "rows.safetensors"), str(scratch / "logits.safetensors")]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\t".join(paths) + "\n")
        self.process.stdin.flush()
        code = self.process.stdout.readline()
        self.errors.seek(0)
        assert code == "0\n", self.errors.read().decode(errors="replace")[-2000:]
        return load_file(paths[2])["logits"]


class HereInAFork:
    """What `PlainTransformers` is, in a fork that has the imports but not the pipes of the process of other tests."""

    def __enter__(self) -> "HereInAFork":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def read(
        self, folder: Path, row: Tensor, texts: Sequence[Tensor] = (), dtype: str = "auto", **_: object
    ) -> measure.Reading:
        """Read a model with the script of the process."""
        with tempfile.TemporaryDirectory() as scratch:
            tokens, logits = f"{scratch}/tokens", f"{scratch}/logits"
            save_file(measure.request(row, texts), tokens)
            return measure.reading(script.read(str(folder), dtype, tokens, logits), Path(logits))
