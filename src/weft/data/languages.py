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
        cache: folder for the tokenizer.

    Raises:
        JobError: a language is missing or unknown, or the tokenizer has no languages.
    """
    keys = {"src_lang": task.source_lang, "tgt_lang": task.target_lang}
    given = {name: code for name, code in keys.items() if code is not None}
    tokenizer: Any = tok.load_tokenizer(folder, needs_end=False)
    name, problem, fix = type(tokenizer).__name__, "", ""
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        if not given:
            return folder
        problem = f"{name} has no languages"
        fix = "remove task.source_lang and task.target_lang; other models read a language as words of the source"
    elif (tokenizer := _load(folder, given)) is None:
        problem = f"{name} does not know a language of {given or 'its configuration'}"
        fix = "write the codes of the tokenizer, such as eng_Latn for NLLB, en_XX for mBART, and en for M2M100"
    elif tokenizer.tgt_lang is None:
        problem = f"{name} has no target language"
        fix = f"set task.target_lang, and task.source_lang, which is {tokenizer.src_lang!r} otherwise"
    if problem:
        rule = "tokenizers such as those of NLLB, mBART and M2M100 write the code of its language into each text"
        raise JobError(problem, where=f"tokenizer {folder}", rule=rule, fix=fix)
    if not given:
        return folder
    made = cache / store.cache_key("tokenizer", tok.digest_tokenizer(folder), given)
    if not made.is_dir():
        with store.build_folder(made, estimate=0) as scratch:
            tokenizer.save_pretrained(scratch)
    return made


def _load(folder: Path, languages: dict[str, str]) -> Any:
    """Tokenizer with some languages; None if it does not know one."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, **languages)
        added = [tok.added_tokens(tokenizer, target=target) for target in (False, tokenizer.tgt_lang is not None)]
    except (KeyError, TypeError, ValueError):  # of tokenizers that look the language up; others add an unknown token
        return None
    return None if any(tokenizer.unk_token_id in ids for parts in added for ids in parts) else tokenizer


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
