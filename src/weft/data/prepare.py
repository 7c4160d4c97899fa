"""Data preparation by the launcher before ranks start: find documents, tokenize them into the cache, cut the splits."""

import errno
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.data import corpus, store
from weft.data import tokenizer as tok
from weft.data.chat import read_chats
from weft.data.chat_template import ChatTemplate, encode_chats
from weft.data.digests import digest_files
from weft.data.prepared import Prepared
from weft.data.records import prepare_records
from weft.data.remote_cache import find_folder, share_folders, with_usable_store
from weft.data.rows import Rows
from weft.data.shards import ROW_TYPES, TokenSpan, open_array
from weft.errors import DataError
from weft.job import Data, Task
from weft.launch.scratch import open_marked
from weft.own_code import load_function

CHAT_SOURCES = ("jsonl", "parquet", "datasets")
OF_TOKENS = ("causal", "masked")
"""Tasks whose rows are cut from a stream of tokens."""
CAUSAL = Task()
BYTES_PER_TOKEN = 4  # average bytes of text per token, only for the estimate of disk space


def prepare(data: Data, *, model_folder: Path | None, log: Callable[[str], None], task: Task = CAUSAL) -> Prepared:
    """Tokenize the corpus of a job, or find its tokens in the cache; of other tasks, store the records.

    Runs once, before any rank starts, so that no rank waits at a barrier while another rank tokenizes.

    Args:
        model_folder: model folder; if it has a tokenizer, it is used instead of training one (data.tokenizer = "train").
        log: called with a line of progress before and after slow operations.

    Raises:
        DataError: the corpus is missing, empty, damaged, too small for one row of each split, or too large for the disk.
    """
    data = with_usable_store(_with_usable_cache(data, log), log)
    make = _prepare_tokens if task.kind in OF_TOKENS else prepare_records
    prepared = make(data, task, model_folder=model_folder, log=log)
    share_folders(prepared, data, log)
    return prepared


def _prepare_tokens(data: Data, task: Task, *, model_folder: Path | None, log: Callable[[str], None]) -> Prepared:
    """Tokens of a corpus, of which each split has at least one row."""
    for folder in store.remove_stale_scratch(Path(data.cache).expanduser()):
        log(f"removed a scratch folder of a killed run: {folder}")
    check_format(data)
    if data.format == "chat":
        prepared = _prepare_chats(data, model_folder, log)
    else:
        prepared = (
            _prepare_rows(data)
            if data.source == "tokens"
            else _prepare_text(data, model_folder, log, masked=task.kind == "masked")
        )
    for name, spans, num_tokens in (
        ("train", prepared.train, prepared.train_tokens),
        ("held-out", prepared.held_out, prepared.held_out_tokens),
    ):
        rows = Rows(spans, seq_len=data.seq_len, packing=data.packing, shuffle=False, seed=0)
        if not len(rows) and (name == "train" or data.held_out):
            raise DataError(
                f"the {name} split has {num_tokens} tokens, too few for one row",
                where=f"data.sets = {', '.join(data.sets)}" if data.sets else f"data.path = {data.path}",
                rule="each split has at least one chat"
                if data.format == "chat"
                else f"a row has seq_len + 1 = {data.seq_len + 1} tokens, and each split has at least one row",
                fix="use more chats, or another data.held_out (0: no held-out split)"
                if data.format == "chat"
                else "use more text, a smaller data.seq_len, or another data.held_out (0: no held-out split)",
            )
    return prepared


def _with_usable_cache(data: Data, log: Callable[[str], None]) -> Data:
    """Data table with a cache folder of this user, if that of data.cache belongs to another user or to a read-only disk."""
    folder = existing = Path(data.cache).expanduser().absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return data
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            return data  # refused where it is used
        problem = error.strerror
    own = Path(tempfile.gettempdir()) / f".weft-cache-{os.getuid()}"
    try:
        open_marked(own)
    except OSError:
        return data
    log(f"data.cache = {folder} cannot be written: {problem}; tokens are cached in {own}")
    return data.model_copy(update={"cache": str(own)})


def _prepare_rows(data: Data) -> Prepared:
    if not data.path:
        rule, fix = 'data.path is an .npy file for source "tokens"', "set data.path to an .npy file"
        raise DataError("source tokens has no path", where="data.path", rule=rule, fix=fix)
    path = Path(data.path).expanduser().resolve()
    array = open_array(path, ndim=2, dtypes=ROW_TYPES)
    num_rows, width = array.shape
    if width != data.seq_len + 1:
        rule = f"the shape is [rows, seq_len + 1], and data.seq_len = {data.seq_len}"
        fix = f"set data.seq_len = {width - 1}"
        raise DataError(f"{path} has the shape [{num_rows}, {width}]", where=str(path), rule=rule, fix=fix)
    if not num_rows:
        rule = "a corpus has at least one row"
        raise DataError(f"{path} has no rows", where=str(path), rule=rule, fix="write at least one row")
    (contents,) = digest_files([path], Path(data.cache).expanduser(), _vocab_size)
    num_held_out = max(1, round(num_rows * data.held_out)) if data.held_out else 0
    cut = (num_rows - num_held_out) * width
    return Prepared(
        train=(TokenSpan(str(path), None, 0, cut),) if cut else (),
        held_out=(TokenSpan(str(path), None, cut, num_rows * width),) if num_held_out else (),
        tokenizer=None,
        vocab_size=contents.measure or 0,
        end_of_text=None,
        digest=contents.digest,
    )


def check_rows(data: Data, digest: str) -> None:
    """Refuse a file of rows whose content is another than when the run was prepared; it is read only if it was written since.

    Args:
        data: data table of a job with source "tokens".
        digest: `Prepared.digest`.

    Raises:
        DataError: the file has changed.
    """
    path = Path(data.path or "").expanduser().resolve()
    (contents,) = digest_files([path], Path(data.cache).expanduser(), _vocab_size)
    if contents.digest != digest:
        raise DataError(
            f"{path} has changed since the run was prepared",
            where=f"data.path = {data.path}",
            rule="ranks read rows from the file during the whole run, and a resumed run reads the same rows",
            fix="write new rows into another file; continue from the last checkpoint with the file as it was",
        )


def _vocab_size(path: Path) -> int:
    """Vocabulary size that the ids in a file of rows require."""
    ids = open_array(path, ndim=2, dtypes=ROW_TYPES)
    return max(int(np.max(ids)), ~int(np.min(ids))) + 1  # a token without loss is the complement of its id


class _CorpusFiles(NamedTuple):
    """Files of a corpus."""

    kind: str
    """Type of the files, a key of `corpus.READERS`."""
    files: list[Path]
    content: str
    """Digests of the files."""


def _prepare_text(data: Data, model_folder: Path | None, log: Callable[[str], None], masked: bool) -> Prepared:
    cache = Path(data.cache).expanduser().resolve()
    if ":" not in data.source:
        files = corpus.find_files(data)
        corpus.check_not_empty(data, files)
        digests = [contents.digest for contents in digest_files(files, cache)]
        content = "".join(sorted(digests) if data.shuffle else digests)
        return _tokenize(data, _CorpusFiles(data.source, files, content), model_folder, cache, log, masked)
    # A function is called once: its documents are read again to train a tokenizer, and their digest finds cached tokens.
    with store.scratch_folder(cache / store.cache_key("documents", data.source), estimate=0) as scratch:
        file = scratch / "documents.jsonl"
        log(f"reading the documents of {data.source}")
        content = corpus.write_documents(load_function(data.source, "data.source"), data, file)
        corpus.check_not_empty(data, [file])
        return _tokenize(data, _CorpusFiles("jsonl", [file], content), model_folder, cache, log, masked)


def check_format(data: Data) -> None:
    """Check that the keys of the data table fit its format.

    Raises:
        DataError: chats in a source without records, or keys of chats with text.
    """
    if data.format == "chat":
        if data.source not in CHAT_SOURCES:
            raise DataError(
                f'data.format = "chat" with data.source = "{data.source}"',
                where="data.source",
                rule=f"chats are records of {', '.join(CHAT_SOURCES)}",
                fix='set data.source = "jsonl", and data.path to a file with one chat per line',
            )
        if data.path and data.sets:
            raise DataError(
                f"data.path = {data.path} and data.sets = {', '.join(data.sets)}",
                where="data.sets",
                rule="data.sets replaces data.path",
                fix="remove data.path, or add it to data.sets",
            )
    elif data.sets or data.too_long != "truncate" or data.chat_template_args:
        key = "sets" if data.sets else "chat_template_args" if data.chat_template_args else "too_long"
        raise DataError(
            f'data.{key} with data.format = "text"',
            where=f"data.{key}",
            rule="text is one stream of documents, which rows cut",
            fix=f'set data.format = "chat", or remove data.{key}',
        )


def _prepare_chats(data: Data, model_folder: Path | None, log: Callable[[str], None]) -> Prepared:
    """Tokenize sets of chats, or find their tokens in the cache."""
    cache = Path(data.cache).expanduser().resolve()
    folder = model_folder if data.tokenizer == "train" else Path(data.tokenizer)
    if folder is None or (data.tokenizer == "train" and not tok.has_tokenizer(folder)):
        raise DataError(
            f"no tokenizer for chats{f' in {folder}' if folder else ''}",
            where="data.tokenizer",
            rule="chats are rendered by the template of a tokenizer, and a tokenizer trained on text has none",
            fix="set data.tokenizer to the folder of an instruct model's tokenizer",
        )
    folder = folder.expanduser().resolve()
    template = ChatTemplate(tok.load_tokenizer(folder), str(folder), data.chat_template_args)
    if template.writes_time:
        log(
            f"the chat template of {folder} writes the date or time (strftime_now): the tokens in {cache} have that of the day "
            "on which they were made; a run resumes only with them"
        )
    train: list[TokenSpan] = []
    held_out: list[TokenSpan] = []
    digests, trains_stop = [], False
    for path, weight in (data.sets or {data.path or "": 1.0}).items():
        store_folder, manifest = _tokenize_chats(data.model_copy(update={"path": path}), template, folder, cache, log)
        splits = store.split_store(store_folder, manifest, data.held_out)
        spans, count = store.repeat_chats(splits[0], weight)
        if not count:
            raise DataError(
                f"{weight} times the chats of {path} is none",
                where=f"data.sets = {path}",
                rule="the number of chats in an epoch is rounded, and each set has one at least",
                fix="increase the weight, or remove the set",
            )
        if weight != 1:
            log(f"{path}: an epoch has {count} chats")
        train += spans
        held_out += splits[1]
        contents = [entry.digest for entry in manifest.files.values()]  # a template may write the date
        digests.append([store_folder.name, weight, contents])
        trains_stop = trains_stop or (manifest.chats is not None and manifest.chats.stops)
    if not trains_stop:
        source = "model.path" if data.tokenizer == "train" else "data.tokenizer"
        log(
            f"no stop token has a loss: the chat template of {source} ends the assistant's turn with the next header, or "
            "outside of {% generation %}, so that the model does not learn to end it; to change this, set data.tokenizer to "
            f"a folder whose chat_template.jinja ends this turn with {template.tokenizer.eos_token}"
        )
    digest = store.cache_key("tokens", digests)
    return Prepared(
        tuple(train), tuple(held_out), str(folder), manifest.vocab_size, manifest.end_of_text, digest=digest
    )


def _tokenize_chats(
    data: Data, template: ChatTemplate, tokenizer_folder: Path, cache: Path, log: Callable[[str], None]
) -> tuple[Path, store.StoreManifest]:
    """Store of one set of chats, in the cache."""
    files = corpus.find_files(data)
    digests = [contents.digest for contents in digest_files(files, cache)]
    content = "".join(sorted(digests) if data.shuffle else digests)
    of_template = tok.digest_tokenizer(tokenizer_folder), template.digest()
    settings = data.source, data.seq_len, data.too_long, data.shuffle, store.SHARD_TOKENS
    folder = cache / store.cache_key("tokens", "chat", content, *of_template, *settings)
    capacity, tokenizer = data.seq_len + 1, template.tokenizer
    if not find_folder(folder, data, log):
        source_bytes = sum(path.stat().st_size for path in files)
        log(f"tokenizing the chats of {data.path}: {len(files)} files, {source_bytes / 1e6:.1f} MB")
        with store.build_folder(folder, estimate=2 * 4 * source_bytes // BYTES_PER_TOKEN) as scratch:
            counts = store.ChatCounts()
            chats = read_chats(data.source, files)
            store.write_store(
                scratch,
                encode_chats(template, chats, capacity=capacity, too_long=data.too_long, counts=counts),
                shuffle=data.shuffle,
                vocab_size=max(tokenizer.get_vocab().values()) + 1,
                end_of_text=tokenizer.eos_token_id,
                shard_tokens=store.SHARD_TOKENS,
                chats=counts,
                capacity=capacity,
            )
            if not counts.chats:
                raise DataError(
                    f"no chat in {len(files)} file{'s' * (len(files) > 1)}, after {counts.dropped} were dropped",
                    where=f"data.path = {data.path}",
                    rule=f"a set has at least one chat of at most seq_len + 1 = {capacity} tokens",
                    fix="use another file, or a larger data.seq_len",
                )
    manifest = store.read_store(folder)
    known = manifest.chats
    assert known is not None
    log(
        f"{data.path}: {known.chats} chats with {manifest.tokens} tokens, {known.targets} of them with a loss; "
        f"{known.truncated} truncated to seq_len + 1 = {capacity} tokens, {known.dropped} dropped"
    )
    if known.unread:
        log(f"{data.path}: fields without effect, as the chat template does not read them: {known.unread}")
    return folder, manifest


def _tokenize(
    data: Data,
    found: _CorpusFiles,
    model_folder: Path | None,
    cache: Path,
    log: Callable[[str], None],
    masked: bool,
) -> Prepared:
    """Tokenize files, or find their tokens in the cache."""
    tokenizer_folder = _find_tokenizer(data, found, model_folder, cache, log, masked)
    ending = _ends_of_documents(tokenizer_folder) if masked else []
    key = store.cache_key(
        *("tokens", data.source, found.content, tok.digest_tokenizer(tokenizer_folder), data.shuffle),
        *(store.SHARD_TOKENS, *ending),
    )
    folder = cache / key
    if find_folder(folder, data, log):
        log(f"using tokens from the cache: {folder}")
    else:
        source_bytes = sum(path.stat().st_size for path in found.files)
        log(f"tokenizing {len(found.files)} files, {source_bytes / 1e6:.1f} MB")
        began = time.monotonic()
        tokenizer = tok.load_tokenizer(tokenizer_folder, needs_end=not masked)
        ending = ending or [tokenizer.eos_token_id]
        # Tokens are on the disk twice while they are being ordered.
        with store.build_folder(folder, estimate=2 * 4 * source_bytes // BYTES_PER_TOKEN) as scratch:
            parts = tok.encode(tokenizer, corpus.documents(found.kind, found.files), ending)
            vocab_size = max(tokenizer.get_vocab().values()) + 1
            store.write_store(
                scratch,
                parts,
                shuffle=data.shuffle,
                vocab_size=vocab_size,
                end_of_text=ending[-1],
                leading=str(tokenizer.decode(tok.added_tokens(tokenizer)[0])),
            )
        log(f"tokenized in {time.monotonic() - began:.1f} s: {folder}")
    manifest = store.read_store(folder)
    if manifest.leading:
        log(f"documents begin with {manifest.leading}, as each text of the tokenizer in {tokenizer_folder}")
    train, held_out = store.split_store(folder, manifest, data.held_out)
    return Prepared(train, held_out, str(tokenizer_folder), manifest.vocab_size, manifest.end_of_text, digest=key)


def _ends_of_documents(folder: Path) -> list[int]:
    """Ids with which documents of masked words end: as the tokenizer ends a sentence, else its end-of-text token.

    Raises:
        DataError: the tokenizer has no such token, or no mask token.
    """
    tokenizer = tok.load_tokenizer(folder, needs_end=False)
    ending = tok.added_tokens(tokenizer)[1] or [id_ for id_ in (tokenizer.eos_token_id,) if id_ is not None]
    if tokenizer.mask_token_id is None or not ending:
        raise DataError(
            f"the tokenizer in {folder} has no {'mask token' if ending else 'token that ends a text'}",
            where="data.tokenizer",
            rule='task.kind = "masked" replaces tokens by the tokenizer\'s mask_token, and ends each document',
            fix='name a tokenizer with one, or set data.tokenizer = "train"',
        )
    return ending


def _find_tokenizer(
    data: Data,
    found: _CorpusFiles,
    model_folder: Path | None,
    cache: Path,
    log: Callable[[str], None],
    masked: bool,
) -> Path:
    """Folder of the tokenizer; a tokenizer is trained into the cache if neither the job nor the model names one."""
    if data.tokenizer != "train":
        return Path(data.tokenizer).expanduser().resolve()
    if model_folder is not None and tok.has_tokenizer(model_folder):
        return model_folder.expanduser().resolve()
    folder = cache / store.cache_key(
        "tokenizer", data.source, found.content, data.vocab_size, *(["mask"] if masked else [])
    )
    if not find_folder(folder, data, log):
        log(f"training a tokenizer with {data.vocab_size} entries")
        with store.build_folder(folder, estimate=64 * data.vocab_size) as scratch:
            texts = corpus.documents(found.kind, found.files)
            tok.train_tokenizer(texts, vocab_size=data.vocab_size, folder=scratch, mask=masked)
    return folder
