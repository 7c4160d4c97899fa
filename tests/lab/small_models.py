"""Small models with tokenizers of whole words, saved as folders, of which plain Transformers is easy to call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from tests.lab.kinds import NO_DROPOUT, SIZES
from tests.lab.task_jobs import WORDS

BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
"""Special tokens of BERT, whose tokenizer has no end-of-text token."""


def save_words(
    folder: Path, template: str = "[CLS] $A [SEP]", roles: dict[str, str] | None = None, words: Sequence[str] = WORDS
) -> Any:
    """Save a tokenizer whose tokens are words; special tokens have the first ids.

    Args:
        folder: folder to write.
        template: tokens around each text.
        roles: special tokens by their roles; None: those of BERT.
        words: words that it knows.
    """
    roles = roles or BERT
    vocabulary = {word: id_ for id_, word in enumerate(dict.fromkeys([*roles.values(), *words]))}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token=roles["unk_token"]))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [(token, vocabulary[token]) for token in template.split() if token != "$A"]
    own.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, **roles)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_classifier(folder: Path, **settings: Any) -> tuple[Any, Any]:
    """Save a BERT with a classifier whose outputs differ much between texts; return tokenizer and model."""
    tokenizer = save_words(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=32, pad_token_id=0, **SIZES, **NO_DROPOUT, **settings
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    model.save_pretrained(folder)
    return tokenizer, model
