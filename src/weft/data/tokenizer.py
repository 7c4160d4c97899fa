"""Tokenizer: loaded from a folder or trained on the corpus, and applied in batches of bounded size.

Transformers and tokenizers are imported inside the functions, because ranks import this package without needing them.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import DataError
from weft.inputs import check_tokenizer_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
FILES = (
    *(
        "tokenizer*",
        "*vocab*",
        "merges.txt",
        "*.model",
        "*.spm",
        "*.codes",
        "*.tokenizer",
        "dict.txt",
        "byte_maps.json",
    ),
    *("special_tokens_map.json", "added_tokens.json", "emoji.json", "normalizer.json", "word_*.json"),
)
TRAIN_CHARACTERS = 2**28  # limits the training time on a large corpus; merges converge long before
PIECE_CHARACTERS = 2**17
BATCH_CHARACTERS = 2**22
SHOWN = 200  # characters of an error message of the library that are shown


def has_tokenizer(folder: Path | None) -> bool:
    """True if a model folder has a tokenizer."""
    return folder is not None and any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json"))


def load_tokenizer(folder: Path, key: str = "data.tokenizer", *, needs_end: bool = True) -> "PreTrainedTokenizerBase":
    """Load a Hugging Face tokenizer from local files, without running code from the folder.

    Args:
        folder: folder with the files.
        key: key that names the folder.
        needs_end: refuse a tokenizer without an end-of-text token, such as that of BERT.

    Raises:
        DataError: the folder does not exist or has no tokenizer, or the tokenizer has no end-of-text token.
    """
    from transformers import AutoTokenizer

    check_tokenizer_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many types of exceptions
        what = f"cannot load a tokenizer from {folder}: {' '.join(str(error).split())[:SHOWN]}"
        rule = f"{key} is a folder with a tokenizer.json of Transformers"
        fix = "name such a folder" + ', or set data.tokenizer to "train"' * (key == "data.tokenizer")
        raise DataError(what, where=key, rule=rule, fix=fix) from error
    if needs_end and tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {folder} has no end-of-text token",
            where=key,
            rule="each document ends with the tokenizer's eos_token",
            fix="set eos_token in its tokenizer_config.json",
        )
    return tokenizer


def check_same_tokens(folder: Path, own: Path, key: str, *, may_add: bool = False) -> int:
    """Refuse a model that takes the ids of a run for other tokens.

    Args:
        folder: folder of a model with a tokenizer.
        own: folder with the tokenizer of the run.
        key: key of the job that names `folder`.
        may_add: the tokenizer of the run may have further tokens, which the model learns.

    Returns:
        Number of ids of the tokenizer of the run. The other one may have more.

    Raises:
        DataError: a token has another id in `folder`; or a tokenizer cannot be loaded.
    """
    tokens = load_tokenizer(own, needs_end=False).get_vocab()
    others = load_tokenizer(folder, key, needs_end=False).get_vocab()
    known = {token: id_ for token, id_ in tokens.items() if not may_add or token in others}
    different = sorted((id_, token) for token, id_ in known.items() if others.get(token) != id_)
    if different:
        id_, token = different[0]
        raise DataError(
            f"{len(different)} tokens of {own} have other ids in {folder}, or none; the first is {token!r}: {id_} and "
            f"{others.get(token, 'none')}",
            where=f"{key} = {str(folder)!r}",
            rule="both models read the same ids, so that their tokenizers have the same tokens",
            fix="choose a model with the same tokenizer",
        )
    return max(tokens.values()) + 1


def digest_tokenizer(folder: Path) -> str:
    """Digest of the names and contents of a folder's tokenizer files."""
    files = sorted({path for pattern in FILES for path in folder.glob(pattern) if path.is_file()})
    lines = [f"{path.name} {hashlib.blake2b(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.blake2b("\n".join(lines).encode()).hexdigest()


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, folder: Path, mask: bool = False, ends: bool = False
) -> None:
    """Train a byte-level BPE tokenizer and save it as a Hugging Face folder. The result is deterministic.

    Args:
        texts: documents; only the first 2**28 characters are used.
        vocab_size: number of entries: the end-of-text token (id 0), 256 bytes, and merges. A small corpus may give fewer.
        folder: existing folder.
        mask: add the token that hides another one, id 1, for task.kind = "masked".
        ends: each text ends with the end-of-text token, as texts of encoder-decoders do.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *([MASK] if mask else [])],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_head(texts, TRAIN_CHARACTERS), trainer)
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
        )
    special = {"mask_token": MASK} if mask else {}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, **special).save_pretrained(folder)


def added_tokens(tokenizer: "PreTrainedTokenizerBase", *, target: bool = False) -> tuple[list[int], list[int]]:
    """Ids that a tokenizer puts before and after every text, such as BOS, or [CLS] and [SEP]; empty for many.

    Args:
        target: of texts to write, not of texts to read.
    """
    name = "text_target" if target else "text"
    whole, inner = (tokenizer(**{name: "a"}, add_special_tokens=added)["input_ids"] for added in (True, False))
    begin = max(at for at in range(len(whole) - len(inner) + 1) if whole[at : at + len(inner)] == inner)
    return whole[:begin], whole[begin + len(inner) :]


def encode(
    tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str], ending: Sequence[int]
) -> Iterator[tuple[list[int], int | None]]:
    """Token ids of each document, in one or more parts. The first part begins as the tokenizer begins a text.

    A document longer than 2**17 characters is encoded in pieces, cut at line ends where possible, so that memory use and
    parallelism do not depend on the lengths of documents.

    Yields:
        (ids, digest) of each piece. The last piece of a document has the document's 64-bit content digest, and its ids end
        with `ending`; the digest of all other pieces is None.
    """
    leading, begins = added_tokens(tokenizer)[0], True
    for batch in _batches(_pieces(texts)):
        pieces = [text for text, _ in batch]
        encoded = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for ids, (_, digest) in zip(encoded, batch, strict=True):
            if begins and ids[: len(leading)] != leading:  # a template may have written them
                ids = [*leading, *ids]
            begins = digest is not None
            yield (ids if digest is None else [*ids, *ending]), digest


def _pieces(texts: Iterable[str]) -> Iterator[tuple[str, int | None]]:
    for text in texts:
        digest = int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())
        begin = 0
        while len(text) - begin > PIECE_CHARACTERS:
            end = text.rfind("\n", begin, begin + PIECE_CHARACTERS) + 1 or begin + PIECE_CHARACTERS
            yield text[begin:end], None
            begin = end
        yield text[begin:], digest


def _batches(pieces: Iterable[tuple[str, int | None]]) -> Iterator[list[tuple[str, int | None]]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _head(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
