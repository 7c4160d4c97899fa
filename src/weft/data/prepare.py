"""What the launcher does once before ranks start: find documents, tokenise them into the cache, cut the splits."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from weft.data import corpus, store
from weft.data import tokenizer as tok
from weft.data.digests import digest_files
from weft.data.rows import Rows
from weft.data.shards import ROW_TYPES, Span, open_array
from weft.errors import DataError
from weft.job import Data

BYTES_PER_TOKEN = 4  # of text, for the estimate of disk space alone


@dataclass(frozen=True)
class Prepared:
    """Tokens that are ready to be mapped by every rank."""

    train: tuple[Span, ...]
    """Where the train split lies."""
    held_out: tuple[Span, ...]
    """Where the held-out split lies; empty if data.held_out is 0."""
    tokenizer: str | None
    """Hugging Face folder of the tokenizer; None for source "tokens"."""
    vocab_size: int
    """Entries that a model's embedding must have: the largest id and one."""
    end_of_text: int | None
    """Id that ends each document; None for source "tokens"."""
    digest: str = ""
    """Of what the splits are cut from: the file of rows, or the source, the tokenizer and their settings."""
    accepted: tuple[str, ...] = ()
    """`identity` of other tokens, of checkpoints that this run may go on from all the same."""

    @property
    def train_tokens(self) -> int:
        """Number of tokens of the train split."""
        return sum(span.last - span.first for span in self.train)

    @property
    def held_out_tokens(self) -> int:
        """Number of tokens of the held-out split."""
        return sum(span.last - span.first for span in self.held_out)

    @property
    def identity(self) -> str:
        """A digest of which tokens there are and how they are split, wherever they lie."""
        splits = [[(span.first, span.last) for span in spans] for spans in (self.train, self.held_out)]
        return blake3(json.dumps([self.digest, splits]).encode()).hexdigest()

    def to_json(self) -> str:
        """Everything as JSON that `from_json` reads back to an equal object."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Prepared":
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        splits = {name: tuple(Span(**span) for span in fields[name]) for name in ("train", "held_out")}
        return cls(**{**fields, **splits, "accepted": tuple(fields.get("accepted", ()))})


def prepare(data: Data, *, model_folder: Path | None, say: Callable[[str], None]) -> Prepared:
    """Make the tokens of a job ready, or find them in the cache.

    Runs once, before any rank starts, so that no rank waits at a barrier while another tokenises.

    Args:
        data: the job's data table.
        model_folder: folder of the model, whose tokenizer is taken where data.tokenizer is "train".
        say: is told in short lines what takes time.

    Raises:
        DataError: data is missing, empty, damaged, too small for one row of each split, or too large for the disk.
    """
    for folder in store.remove_leftovers(Path(data.cache).expanduser()):
        say(f"removed what a run that was killed has left: {folder}")
    prepared = _prepare_rows(data) if data.source == "tokens" else _prepare_text(data, model_folder, say)
    for name, spans, num_tokens in (
        ("train", prepared.train, prepared.train_tokens),
        ("held-out", prepared.held_out, prepared.held_out_tokens),
    ):
        rows = Rows(spans, seq_len=data.seq_len, packing=data.packing, shuffle=False, seed=0)
        if not len(rows) and (name == "train" or data.held_out):
            raise DataError(
                f"the {name} split has {num_tokens} tokens, too few for one row",
                where=f"data.path = {data.path}",
                rule=f"a row takes seq_len + 1 = {data.seq_len + 1} tokens, and each split has at least one row",
                fix="use more text, a smaller data.seq_len, or another data.held_out (0 keeps nothing for evaluation)",
            )
    return prepared


def _prepare_rows(data: Data) -> Prepared:
    if not data.path:
        rule, fix = "it is one file of rows", "set data.path to an .npy file"
        raise DataError("source tokens has no path", where="data.path", rule=rule, fix=fix)
    path = Path(data.path).expanduser().resolve()
    array = open_array(path, ndim=2, dtypes=ROW_TYPES)
    num_rows, width = array.shape
    if width != data.seq_len + 1:
        rule = f"it is [rows, seq_len + 1], and data.seq_len = {data.seq_len}"
        fix = f"set data.seq_len = {width - 1}"
        raise DataError(f"{path} has the shape [{num_rows}, {width}]", where=str(path), rule=rule, fix=fix)
    if not num_rows:
        rule = "a corpus has at least one row"
        raise DataError(f"{path} has no rows", where=str(path), rule=rule, fix="write at least one row")
    (contents,) = digest_files([path], Path(data.cache).expanduser(), _vocab_size)
    num_held_out = max(1, round(num_rows * data.held_out)) if data.held_out else 0
    cut = (num_rows - num_held_out) * width
    return Prepared(
        train=(Span(str(path), None, 0, cut),) if cut else (),
        held_out=(Span(str(path), None, cut, num_rows * width),) if num_held_out else (),
        tokenizer=None,
        vocab_size=contents.measure or 0,
        end_of_text=None,
        digest=contents.digest,
    )


def _vocab_size(path: Path) -> int:
    """Entries that the ids in a file of rows need."""
    return int(np.max(open_array(path, ndim=2, dtypes=ROW_TYPES))) + 1


def _prepare_text(data: Data, model_folder: Path | None, say: Callable[[str], None]) -> Prepared:
    files = corpus.find_files(data)
    corpus.check_not_empty(data, files)
    cache = Path(data.cache).expanduser().resolve()
    digests = [contents.digest for contents in digest_files(files, cache)]
    content = "".join(sorted(digests) if data.shuffle else digests)
    tokenizer_folder = _find_tokenizer(data, model_folder, files, content, cache, say)
    key = _key("tokens", data.source, content, tok.digest_tokenizer(tokenizer_folder), data.shuffle, store.SHARD_TOKENS)
    folder = cache / key
    if folder.is_dir():
        say(f"tokens from the cache: {folder}")
    else:
        source_bytes = sum(path.stat().st_size for path in files)
        say(f"tokenising {len(files)} files, {source_bytes / 1e6:.1f} MB")
        began = time.monotonic()
        tokenizer = tok.load_tokenizer(tokenizer_folder)
        # Tokens lie on disk twice while they are put in order.
        with store.building(folder, estimate=2 * 4 * source_bytes // BYTES_PER_TOKEN) as scratch:
            parts = tok.encode(tokenizer, corpus.documents(data.source, files))
            vocab_size = max(tokenizer.get_vocab().values()) + 1
            store.write_store(
                scratch, parts, shuffle=data.shuffle, vocab_size=vocab_size, end_of_text=tokenizer.eos_token_id
            )
        say(f"tokenised in {time.monotonic() - began:.1f} s: {folder}")
    manifest = store.read_store(folder)
    train, held_out = store.split_store(folder, manifest, data.held_out)
    return Prepared(train, held_out, str(tokenizer_folder), manifest.vocab_size, manifest.end_of_text, digest=key)


def _find_tokenizer(
    data: Data, model_folder: Path | None, files: list[Path], content: str, cache: Path, say: Callable[[str], None]
) -> Path:
    """The folder of the tokenizer; trained into the cache where there is none."""
    if data.tokenizer != "train":
        return Path(data.tokenizer).expanduser().resolve()
    if model_folder is not None and tok.has_tokenizer(model_folder):
        return model_folder.expanduser().resolve()
    folder = cache / _key("tokenizer", data.source, content, data.vocab_size)
    if not folder.is_dir():
        say(f"training a tokenizer of {data.vocab_size} entries")
        with store.building(folder, estimate=64 * data.vocab_size) as scratch:
            texts = corpus.documents(data.source, files)
            tok.train_tokenizer(texts, vocab_size=data.vocab_size, folder=scratch)
    return folder


def _key(kind: str, *settings: object) -> str:
    """Name of a cache folder: the kind, and a digest of all that decides its contents."""
    return f"{kind}-{hashlib.blake2b(json.dumps([2, *settings]).encode(), digest_size=12).hexdigest()}"
