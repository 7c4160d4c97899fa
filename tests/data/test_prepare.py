import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from datasets import Dataset
from tokenizers import processors
from transformers import AutoTokenizer

from tests.data.synthetic import documents_of, rows_of, saved_rows, stored
from tests.lab.commands import start_python
from tests.lab.small_models import save_words
from weft.data import IGNORED, Prepared, corpus, digests, prepare
from weft.data import tokenizer as tok
from weft.data.record_batches import Example, masked
from weft.data.store import build_folder, remove_stale_scratch
from weft.errors import DataError
from weft.job import Data, Task

TEXTS = [f"Text {i}: " + " ".join(f"wörd{i * j % 17}" for j in range(30)) + "\n" for i in range(40)]


def quiet(line: str) -> None:
    """Ignore progress lines."""


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tok.train_tokenizer(TEXTS, vocab_size=300, folder=folder)
    return folder


@pytest.fixture
def job(tmp_path, tokenizer_folder):
    """Function that makes a data table with small rows, a separate cache and an existing tokenizer."""

    def make(**settings):
        defaults = {
            "source": "text",
            "cache": str(tmp_path / "cache"),
            "tokenizer": str(tokenizer_folder),
            "seq_len": 16,
        }
        return Data(**{**defaults, "held_out": 0.1, **settings})

    return make


def documents_in(prepared: Prepared) -> list[str]:
    """Decoded text of every document, in the order of the stream."""
    tokenizer = tok.load_tokenizer(Path(prepared.tokenizer))
    texts = []
    for span in [*prepared.train, *prepared.held_out]:
        tokens, starts = np.load(span.tokens), np.load(span.starts)
        edges = [*starts[(starts >= span.first) & (starts < span.last)], span.last]
        for begin, end in itertools.pairwise(edges):
            assert tokens[end - 1] == prepared.end_of_text
            texts.append(tokenizer.decode(tokens[begin : end - 1]))
    return texts


def write_source(source: str, folder: Path) -> str:
    """Write the texts as files of a source; returns data.path."""
    (folder / "deep" / "er").mkdir(parents=True)
    halves = {"a": TEXTS[:25], "deep/er/b": TEXTS[25:]}
    for name, texts in halves.items():
        if source == "jsonl":
            lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
            (folder / f"{name}.jsonl").write_text("\n".join([*lines, "", '{"text": ""}']), encoding="utf-8")
        elif source == "parquet":
            table = arrow.table({"id": range(len(texts)), "text": texts})
            parquet.write_table(table, folder / f"{name}.parquet", row_group_size=7)
        elif source == "datasets":
            Dataset.from_dict({"id": range(len(texts)), "text": texts}).save_to_disk(folder / name)
        else:
            for i, text in enumerate(texts):
                (folder / f"{name}{i:02d}.txt").write_text(text, encoding="utf-8")
    (folder / ".hidden.txt").write_bytes(b"\xff")
    return str(folder)


@pytest.mark.must("format: text, files", case="text")
@pytest.mark.must("format: text, jsonl", case="jsonl")
@pytest.mark.must("format: text, parquet", case="parquet")
@pytest.mark.must("format: text, datasets", case="datasets")
@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "datasets"])
def test_each_source_gives_every_document_in_order(tmp_path, job, source):
    path = write_source(source, tmp_path / "corpus")
    prepared = prepare(job(source=source, path=path, shuffle=False), model_folder=None, log=quiet)
    assert documents_in(prepared) == TEXTS
    assert prepared.vocab_size == 300
    share = prepared.held_out_tokens / (prepared.train_tokens + prepared.held_out_tokens)
    assert share == pytest.approx(0.1, abs=0.02)
    assert Prepared.from_json(prepared.to_json()) == prepared


@pytest.mark.parametrize("sizes", [(61, 39), (39, 61), (50, 25, 25), (1, 1, 98), (100,)])
@pytest.mark.parametrize("asked", [0.02, 0.3, 0.9])
def test_the_held_out_share_is_as_requested_for_any_documents(tmp_path, sizes, asked):
    documents = documents_of([size * 100 for size in sizes])
    train, held_out = stored(tmp_path / "store", documents, held_out=asked)
    tokens = [sum(span.last - span.first for span in spans) for spans in (train, held_out)]
    assert sum(tokens) == 10_000
    assert tokens[1] == pytest.approx(asked * 10_000, abs=0.25 * min(asked, 1 - asked) * 10_000)
    rows = [rows_of(spans, 16) for spans in (train, held_out)]  # a token is an input of only one split
    inputs = [{token for i in range(len(split)) for token in split[i].tokens[:-1].tolist()} for split in rows]
    assert all(inputs)
    assert not inputs[0] & inputs[1]


def test_a_cut_near_a_document_falls_between_documents(tmp_path):
    _, held_out = stored(tmp_path / "store", documents_of([500, 300, 79, 21]), held_out=0.02)
    assert [(span.first, span.last) for span in held_out] == [(879, 900)]


def test_globs_and_single_files(tmp_path, job):
    path = write_source("text", tmp_path / "corpus")
    deep = prepare(job(path=f"{path}/**/b*.txt", shuffle=False, held_out=0.2), model_folder=None, log=quiet)
    assert documents_in(deep) == TEXTS[25:]
    one = prepare(job(path=f"{path}/a03.txt", held_out=0, seq_len=8), model_folder=None, log=quiet)
    assert documents_in(one) == [TEXTS[3]]
    assert one.held_out == ()


def test_shuffled_documents_do_not_depend_on_file_names(tmp_path, job):
    texts = random.Random(0).sample(TEXTS, len(TEXTS))
    for name, ordered in (("x", TEXTS), ("y", texts)):
        (tmp_path / name).mkdir()
        for i, text in enumerate(ordered):
            (tmp_path / name / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    prepared = [
        prepare(job(path=str(tmp_path / name), cache=str(tmp_path / f"cache-{name}")), model_folder=None, log=quiet)
        for name in "xy"
    ]
    assert documents_in(prepared[0]) == documents_in(prepared[1])
    assert sorted(documents_in(prepared[0])) == sorted(TEXTS)
    assert documents_in(prepared[0]) != TEXTS


@pytest.mark.must("format: text, python")
def test_the_standard_library_is_the_default_source(tmp_path):
    files = corpus.find_files(Data())
    names = {path.name for path in files}
    assert {"argparse.py", "heapq.py"} <= names
    assert not any("site-packages" in path.parts[-3:] for path in files)
    argparse = next(path for path in files if path.name == "argparse.py")
    assert list(corpus.documents("python", [argparse])) == [argparse.read_text(encoding="utf-8")]
    for name, raw in {"null.py": b"x = 1\0", "latin.py": b"# \xe9", "empty.py": b"", "good.py": b"x = 1"}.items():
        (tmp_path / name).write_bytes(raw)
    assert list(corpus.documents("python", sorted(tmp_path.iterdir()))) == ["x = 1"]


@pytest.mark.must("format: tokens, file.npy")
def test_ready_rows_are_used_in_place(tmp_path, job):
    (span,) = saved_rows(tmp_path / "rows.npy", 50, 16)
    prepared = prepare(job(source="tokens", path=span.tokens), model_folder=None, log=quiet)
    assert (prepared.train[0].last, prepared.held_out[0].first, prepared.held_out[0].last) == (
        45 * 17,
        45 * 17,
        50 * 17,
    )
    assert (prepared.tokenizer, prepared.end_of_text, prepared.vocab_size) == (None, None, 50 * 17)
    assert Prepared.from_json(prepared.to_json()) == prepared
    assert not list((tmp_path / "cache").glob("tokens-*"))


@pytest.mark.must("format: token cache")
def test_the_same_content_is_tokenized_once(tmp_path, job, monkeypatch):
    path = write_source("text", tmp_path / "corpus")
    first = prepare(job(path=path), model_folder=None, log=quiet)
    # A cache hit must not load a tokenizer.
    monkeypatch.setattr(tok, "load_tokenizer", lambda folder: pytest.fail("tokenized again"))
    (tmp_path / "corpus").rename(tmp_path / "moved")
    (tmp_path / "moved" / "a00.txt").rename(tmp_path / "moved" / "z.txt")
    said = []
    again = prepare(job(path=str(tmp_path / "moved"), seq_len=8), model_folder=None, log=said.append)
    assert again == first
    assert "cache" in said[0]
    other = prepare(job(path=str(tmp_path / "moved"), held_out=0.3), model_folder=None, log=quiet)
    assert other.held_out_tokens > first.held_out_tokens
    monkeypatch.undo()
    (tmp_path / "moved" / "z.txt").write_text("something else", encoding="utf-8")
    changed = prepare(job(path=str(tmp_path / "moved")), model_folder=None, log=quiet)
    assert changed.train[0].tokens != first.train[0].tokens


def test_the_order_is_part_of_the_cached_content(tmp_path, job):
    path = write_source("jsonl", tmp_path / "corpus") + "/a.jsonl"
    in_order, shuffled = [
        prepare(job(source="jsonl", path=path, shuffle=shuffle), model_folder=None, log=quiet)
        for shuffle in (False, True)
    ]
    assert documents_in(in_order) == TEXTS[:25]
    assert documents_in(shuffled) != TEXTS[:25]
    assert sorted(documents_in(shuffled)) == sorted(TEXTS[:25])


def test_the_tokenizer_is_from_the_model_or_trained(tmp_path, job, tokenizer_folder):
    path = write_source("text", tmp_path / "corpus")
    trained = job(path=path, tokenizer="train", vocab_size=280)
    of_model = prepare(trained, model_folder=tokenizer_folder, log=quiet)
    assert (of_model.tokenizer, of_model.vocab_size) == (str(tokenizer_folder), 300)
    said = []
    here = prepare(trained, model_folder=tmp_path, log=said.append)
    assert here.vocab_size == 280
    assert said[0] == "training a tokenizer with 280 entries"
    assert documents_in(here)
    again = prepare(
        trained.model_copy(update={"cache": str(tmp_path / "other")}), model_folder=None, log=quiet
    )  # trained again, with identical bytes
    assert tok.digest_tokenizer(Path(again.tokenizer)) == tok.digest_tokenizer(Path(here.tokenizer))
    assert again.tokenizer != here.tokenizer
    ids = tok.load_tokenizer(Path(here.tokenizer)).encode("any bytes: \x00 é 漢 \U0001f9f5")
    assert tok.load_tokenizer(Path(here.tokenizer)).decode(ids) == "any bytes: \x00 é 漢 \U0001f9f5"


def test_long_documents_are_encoded_in_pieces(tokenizer_folder, monkeypatch):
    tokenizer = tok.load_tokenizer(tokenizer_folder)
    texts = ["line one\nline two\nline three\n", "x" * 25, "short"]
    ending = [tokenizer.eos_token_id]
    whole = list(tok.encode(tokenizer, texts, ending))
    assert [digest is not None for _, digest in whole] == [True] * 3
    monkeypatch.setattr(tok, "PIECE_CHARACTERS", 10)
    monkeypatch.setattr(tok, "BATCH_CHARACTERS", 12)
    parts = list(tok.encode(tokenizer, texts, ending))
    assert [tokenizer.decode(ids) for ids, _ in parts] == [
        *("line one\n", "line two\n", "line three", "\n<|endoftext|>"),
        *("x" * 10, "x" * 10, "xxxxx<|endoftext|>", "short<|endoftext|>"),
    ]
    assert [digest for _, digest in parts if digest is not None] == [digest for _, digest in whole]


@pytest.fixture(scope="module")
def beginning(tmp_path_factory):
    """Tokenizer that begins every text with <s>, as those of Llama and Gemma do, and that can hide tokens."""
    folder = tmp_path_factory.mktemp("beginning")
    tok.train_tokenizer(TEXTS, vocab_size=300, folder=folder, mask=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_documents_begin_as_the_tokenizer_begins_a_text(task, tmp_path, job, beginning, monkeypatch):
    monkeypatch.setattr(tok, "PIECE_CHARACTERS", 50)  # a document in pieces begins once
    path, tokenizer = write_source("jsonl", tmp_path / "corpus"), AutoTokenizer.from_pretrained(beginning)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    settings = job(source="jsonl", path=path, shuffle=False, held_out=0, tokenizer=str(beginning))
    for _ in range(2):  # the second time from the cache
        said = []
        prepared = prepare(settings, model_folder=None, log=said.append, task=Task(kind=task))
        assert [line for line in said if "documents begin with <s>" in line and str(beginning) in line]
    (span,) = prepared.train
    tokens, starts = np.load(span.tokens), np.load(span.starts)
    documents = np.split(tokens, starts[1:])
    assert len(documents) == len(TEXTS)
    assert (tokens == tokenizer.bos_token_id).sum() == len(TEXTS)
    for text, ids in zip(TEXTS, documents, strict=True):
        assert ids[0] == tokenizer.bos_token_id
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[1:-1]) == text
    monkeypatch.undo()
    other = prepare(settings.model_copy(update={"cache": str(tmp_path / "other")}), model_folder=None, log=quiet)
    first = np.load(other.train[0].tokens)[: np.load(other.train[0].starts)[1]]
    assert first.tolist() == [*tokenizer(TEXTS[0])["input_ids"], tokenizer.eos_token_id]


def test_documents_that_a_template_has_begun_begin_once(tmp_path, job, beginning):
    """Text of chats, written by a template with its first token, beside text without it."""
    texts, tokenizer = ["<s>user: Hi\n", "user: Ho\n", "<s>"], AutoTokenizer.from_pretrained(beginning)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = str(tmp_path / "texts.jsonl")
    settings = job(source="jsonl", path=path, shuffle=False, held_out=0, tokenizer=str(beginning), seq_len=4)
    (span,) = prepare(settings, model_folder=None, log=quiet).train
    documents = np.split(np.load(span.tokens), np.load(span.starts)[1:])
    expected = [tokenizer(text.removeprefix("<s>"))["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    assert [ids.tolist() for ids in documents] == expected


def test_masked_documents_are_sentences_of_their_tokenizer(tmp_path, job):
    """The tokenizer of BERT has no end-of-text token: a document ends with [SEP]."""
    tokenizer = save_words(tmp_path / "tokenizer", words=" ".join(TEXTS).split())
    assert tokenizer.eos_token_id is None
    path = write_source("jsonl", tmp_path / "corpus")
    settings = job(
        source="jsonl", path=path, shuffle=False, held_out=0, tokenizer=str(tmp_path / "tokenizer"), seq_len=4
    )
    (span,) = prepare(settings, model_folder=None, log=quiet, task=Task(kind="masked")).train
    documents = np.split(np.load(span.tokens), np.load(span.starts)[1:])
    assert [ids.tolist() for ids in documents] == tokenizer(TEXTS)["input_ids"]
    with pytest.raises(DataError, match="no end-of-text token"):
        prepare(settings, model_folder=None, log=quiet)


def test_special_tokens_are_never_hidden(beginning):
    tokenizer = AutoTokenizer.from_pretrained(beginning)
    ids = torch.tensor([*tokenizer("hello world")["input_ids"], tokenizer.eos_token_id] * 3)
    task = Task(kind="masked", mask_fraction=0.99)
    only_special = torch.tensor([tokenizer.bos_token_id, tokenizer.eos_token_id])
    examples = [
        Example({"tokens": tokens}, torch.Generator().manual_seed(seed))
        for seed in range(4)
        for tokens in (ids, only_special)
    ]
    batch = masked(task, tokenizer, 7, 300, len(ids) + 2, examples)
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    for row, targets in zip(batch.inputs["input_ids"][::2], batch.targets[::2], strict=True):
        assert torch.equal(row[: len(ids)][special], ids[special])
        assert (targets[: len(ids)][special] == IGNORED).all()
        assert (targets[: len(ids)] != IGNORED).sum() > (~special).sum() / 2
        assert row[len(ids) :].tolist() == [7, 7]
    assert (batch.targets[1::2] == IGNORED).all()


@pytest.mark.parametrize("source", ["text", "python", "jsonl", "parquet"])
def test_a_byte_order_mark_is_no_text(source, tmp_path, job):
    found = []
    for mark in ("", "\ufeff"):
        folder = tmp_path / f"corpus {len(mark)}"
        folder.mkdir()
        texts = [mark + text for text in TEXTS]
        if source == "jsonl":  # also at the beginning of the file
            lines = "\n".join(json.dumps({"text": text}) for text in texts)
            (folder / "a.jsonl").write_text(mark + lines, encoding="utf-8")
        elif source == "parquet":
            parquet.write_table(arrow.table({"text": texts}), folder / "a.parquet")
        else:
            for i, text in enumerate(texts):
                (folder / f"{i:02d}.txt").write_text(text, encoding="utf-8")
        if source == "python":
            found.append(list(corpus.documents("python", sorted(folder.iterdir()))))
            continue
        prepared = prepare(job(source=source, path=str(folder), shuffle=False), model_folder=None, log=quiet)
        found.append(documents_in(prepared))
    assert found == [TEXTS, TEXTS]


def test_two_launchers_can_build_the_same_folder_at_once(tmp_path):
    folder, both_inside = tmp_path / "cache" / "store", threading.Barrier(2, timeout=10)

    def launch():
        with build_folder(folder, estimate=0) as scratch:
            (scratch / "file").write_text("content")
            both_inside.wait()

    with ThreadPoolExecutor(2) as pool:
        for launched in [pool.submit(launch) for _ in range(2)]:
            launched.result()  # neither fails
    assert [p.name for p in folder.parent.iterdir()] == ["store"]
    assert (folder / "file").read_text() == "content"


def test_identity_depends_on_the_content_and_not_on_the_path(tmp_path, job):
    (span,) = saved_rows(tmp_path / "rows.npy", 50, 16)

    def identity(path: Path) -> str:
        return prepare(job(source="tokens", path=str(path)), model_folder=None, log=quiet).identity

    first = identity(tmp_path / "rows.npy")
    shutil.copy(span.tokens, tmp_path / "copy.npy")
    assert identity(tmp_path / "copy.npy") == first
    status, array = os.stat(span.tokens), np.load(span.tokens)
    array[0, :2] = array[0, 1::-1]  # the same ids, the same size, and the same time
    np.save(span.tokens, array)
    os.utime(span.tokens, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity(tmp_path / "rows.npy") != first


def test_an_unchanged_source_is_read_once(tmp_path, job, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    (span,) = saved_rows(tmp_path / "rows.npy", 50, 16)
    settings = job(source="tokens", path=span.tokens)
    first = prepare(settings, model_folder=None, log=quiet)
    read = []
    digest = digests.digest_file
    monkeypatch.setattr(digests, "digest_file", lambda path: read.append(path) or digest(path))
    assert prepare(settings, model_folder=None, log=quiet) == first
    assert read == []
    (record,) = (tmp_path / "cache" / "sources").iterdir()
    record.write_text(record.read_text().replace(first.digest, "0" * 64))  # a damaged record is created again
    assert prepare(settings, model_folder=None, log=quiet) == first
    assert len(read) == 1
    status = os.stat(span.tokens)
    Path(span.tokens).write_bytes(Path(span.tokens).read_bytes())
    os.utime(span.tokens, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert prepare(settings, model_folder=None, log=quiet) == first
    assert len(read) == 2


def test_the_digest_of_a_recently_changed_file_is_not_cached(tmp_path):
    """Another change with the same timestamp would not be detected."""
    (tmp_path / "a.txt").write_text("text")
    digests.digest_files([tmp_path / "a.txt"], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


TOKENIZE = """
import sys, time
from pathlib import Path
from weft.data.store import build_folder
with build_folder(Path(sys.argv[1]) / ("tokens-" + "0" * 24), estimate=0) as scratch:
    (scratch / "staged").write_bytes(b"tokens")
    print("tokenizing", flush=True)
    time.sleep(600)
"""


def test_scratch_folders_of_killed_launchers_are_removed_and_of_running_ones_kept(tmp_path, job):
    cache = tmp_path / "cache"
    launchers = [start_python(TOKENIZE, cache) for _ in range(2)]
    try:
        for launcher in launchers:
            while launcher.output != "tokenizing\n":
                assert launcher.poll() is None, launcher.communicate()
                time.sleep(0.01)
        assert len(list(cache.glob(".tokens-*"))) == 4  # a folder and a lock each
        assert remove_stale_scratch(cache) == []
        launchers[0].kill()
        said = []
        prepare(job(path=write_source("text", tmp_path / "corpus")), model_folder=None, log=said.append)
        assert [line.startswith("removed a scratch folder of a killed run") for line in said].count(True) == 1
        assert len(list(cache.glob(".tokens-*"))) == 2
    finally:
        for launcher in launchers:
            launcher.kill()
    remove_stale_scratch(cache)
    assert list(cache.glob(".tokens-*")) == []


def test_only_scratch_folders_are_removed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    cache = tmp_path / "cache"
    cache.mkdir()
    name = f".tokens-{'0' * 24}-{'1' * 16}"
    (cache / name).symlink_to(outside)
    (cache / f"{name}.lock").touch()
    for other in (".git", ".tokens-mine"):
        (cache / other).mkdir()
        (cache / f"{other}.lock").touch()
    assert remove_stale_scratch(cache) == []
    assert all(folder.is_dir() for folder in (outside, cache / ".git", cache / ".tokens-mine"))


def test_ranks_load_no_tokenizer_and_no_arrow():
    program = "import sys, weft.data; print(sorted({'transformers', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
