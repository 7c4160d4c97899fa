"""Languages of encoder-decoders: tokenizers such as those of NLLB and mBART write the code of a language into each text."""

from pathlib import Path
from typing import Any

from weft.data import store
from weft.data import tokenizer as tok
from weft.errors import DataError, JobError
from weft.job import Task


def in_languages(folder: Path, task: Task, cache: Path) -> Path:
    """Folder of a tokenizer with the languages of a task, in the cache; the same folder if it has them already.

    Ranks, the sample and the export read this folder, so that all of them write the same codes.

    Args:
        folder: folder with a tokenizer.
        task: task table of the job.
        cache: folder for the tokenizer.

    Raises:
        JobError: a language is missing or unknown, or the tokenizer has no languages.
    """
    keys = {"src_lang": task.source_lang, "tgt_lang": task.target_lang}
    given = {name: value for name, value in keys.items() if value is not None}
    tokenizer: Any = tok.load_tokenizer(folder, needs_end=False)
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        if given:
            raise JobError(
                f"task.source_lang = {task.source_lang!r}, task.target_lang = {task.target_lang!r}",
                where=f"tokenizer {folder}",
                rule=f"{type(tokenizer).__name__} has no languages; those of NLLB, mBART and M2M100 have",
                fix="remove the keys; other models read a language as words, such as a prefix of the source",
            )
        return folder
    if given:
        made = cache / store.cache_key("tokenizer", tok.digest_tokenizer(folder), given)
        if not made.is_dir():
            with store.build_folder(made, estimate=0) as scratch:
                _load(folder, given).save_pretrained(scratch)
        folder = made
    tokenizer = _load(folder, given)
    if tokenizer.tgt_lang is None:
        raise JobError(
            "the tokenizer has no target language",
            where=f"tokenizer {folder}",
            rule=f"targets of {type(tokenizer).__name__} have the code of their language",
            fix=f"set task.target_lang, and task.source_lang, which is {tokenizer.src_lang!r} otherwise",
        )
    return folder


def _load(folder: Path, languages: dict[str, str]) -> Any:
    """Tokenizer with some languages.

    Raises:
        JobError: it does not know a language.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, **languages)
        known = all(
            tokenizer.unk_token_id not in ids
            for target in (False, tokenizer.tgt_lang is not None)
            for ids in tok.added_tokens(tokenizer, target=target)
        )
    except (KeyError, TypeError, ValueError):  # of tokenizers that look the language up
        known = False
    if not known:
        raise JobError(
            f"the tokenizer does not know a language of {languages or 'its configuration'}",
            where=f"task.source_lang, task.target_lang; tokenizer {folder}",
            rule="languages are those of the tokenizer, such as eng_Latn for NLLB, en_XX for mBART, and en for M2M100",
            fix="write the code as the page of the model does",
        )
    return tokenizer


def generation_settings(folder: Path, is_new: bool) -> dict[str, int]:
    """Settings of generation that the tokenizer of an encoder-decoder decides: the code of the language, or the last token.

    Args:
        folder: folder with the tokenizer.
        is_new: the model is newly initialized: its answers end with the last token of the tokenizer.

    Raises:
        DataError: no token ends a target.
    """
    tokenizer: Any = tok.load_tokenizer(folder, needs_end=False)
    leading, trailing = tok.added_tokens(tokenizer, target=True)
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(trailing), None)
    if end is None:
        raise DataError(
            f"the tokenizer in {folder} has no end-of-text token",
            where="data.tokenizer",
            rule="a target ends with a token, after which the model writes no more",
            fix="set eos_token in its tokenizer_config.json",
        )
    found = {"eos_token_id": int(end)} if is_new else {}
    if getattr(tokenizer, "tgt_lang", None) is not None and hasattr(tokenizer, "src_lang"):
        if leading:
            found["forced_bos_token_id"] = leading[0]
        elif trailing and trailing[-1] != end:  # mBART: the decoder begins with the code
            found["decoder_start_token_id"] = trailing[-1]
    return found
