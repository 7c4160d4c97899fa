"""Encoder-decoders: targets as the tokenizer writes targets, inputs of the decoder, languages, generation settings, scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.lab.kinds import NO_DROPOUT, SIZES
from tests.lab.runs import observe
from tests.lab.small_models import save_words
from tests.lab.task_jobs import WORDS, task_job
from weft.checkpoint.convert import to_huggingface
from weft.errors import DataError, JobError
from weft.job import Job
from weft.observe.report import write_report

RECORDS = [{"source": "red blue", "target": "two one"}, {"source": "one", "target": "green two red blue"}] * 8
BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0
    ),
    "d_model": 32,
    "max_position_embeddings": 64,
    "init_std": 0.3,
}
ROLES = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz"]


def save_nllb(folder: Path) -> None:
    vocabulary = {piece: id_ for id_, piece in enumerate(dict.fromkeys(PIECES))}
    tokenizer = NllbTokenizer(vocab=vocabulary, merges=[], src_lang="eng_Latn")
    tokenizer.save_pretrained(folder)
    config = M2M100Config(vocab_size=len(tokenizer), **BART)
    M2M100ForConditionalGeneration(config).save_pretrained(folder)
    GenerationConfig.from_model_config(config).from_dict(
        {**json.loads((folder / "generation_config.json").read_text()), "max_length": 99}
    ).save_pretrained(folder)


def save_mbart(folder: Path, kind: Any = MBartTokenizer) -> None:
    tokenizer = kind(vocab=[(piece, 0.0) for piece in dict.fromkeys(PIECES)], src_lang="en_XX", tgt_lang="ro_RO")
    tokenizer.save_pretrained(folder)
    config = MBartConfig(
        vocab_size=len(tokenizer), decoder_start_token_id=2 if kind is MBart50Tokenizer else None, **BART
    )
    MBartForConditionalGeneration(config).save_pretrained(folder)


def save_mbart50(folder: Path) -> None:
    save_mbart(folder, MBart50Tokenizer)


def save_bart(folder: Path) -> None:
    """Targets begin with <s>, and the decoder with </s>."""
    tokenizer = save_words(folder, "<s> $A </s>", ROLES)
    config = BartConfig(vocab_size=len(tokenizer), pad_token_id=1, eos_token_id=2, forced_eos_token_id=None, **BART)
    BartForConditionalGeneration(config).save_pretrained(folder)


def save_t5(folder: Path) -> None:
    tokenizer = save_words(folder, "$A </s>", {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"})
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def save_bert2bert(folder: Path) -> None:
    """The tokenizer has no end-of-text token; targets begin with [CLS], as the decoder does."""
    tokenizer = save_words(folder)
    part = BertConfig(vocab_size=len(tokenizer), **SIZES, **NO_DROPOUT, initializer_range=0.3)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(part, part)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 3
    EncoderDecoderModel(config=config).save_pretrained(folder)


SAVED = {
    "nllb from another language": (save_nllb, {"source_lang": "deu_Latn", "target_lang": "fra_Latn"}),
    "nllb": (save_nllb, {"target_lang": "fra_Latn"}),
    "mbart50": (save_mbart50, {}),
    "mbart": (save_mbart, {"target_lang": "de_DE"}),
    "bart": (save_bart, {}),
    "t5": (save_t5, {}),
    "bert2bert": (save_bert2bert, {}),
}


def translation_job(folder: Path, **tables: Any) -> Job:
    """Job on the records, in their order."""
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    found: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "config": None},
        "data": {"source": "jsonl", "path": str(path), "shuffle": False, "seq_len": 32},
        "train": {"steps": 1},
    }
    return task_job("seq2seq", folder, **{key: found.get(key, {}) | tables.get(key, {}) for key in {*found, *tables}})


@pytest.mark.effect("task.source_lang", "loss: that of sources with the code of this language")
@pytest.mark.effect("task.target_lang", "loss, and first token that the export writes: code of this language")
@pytest.mark.parametrize("name", SAVED)
def test_targets_and_inputs_of_the_decoder_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    """The model shifts the labels of its tokenizer by itself; what the export writes begins in the target language."""
    save, languages = SAVED[name]
    torch.manual_seed(0)
    save(tmp_path / "model")
    job = translation_job(tmp_path, task=languages, checkpoint={"every": 1})
    keys = {f"{key.replace('source', 'src').replace('target', 'tgt')}": value for key, value in languages.items()}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", **keys)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    rows = RECORDS[: job.train.global_batch_size]
    source = tokenizer([row["source"] for row in rows], padding=True, return_tensors="pt")
    labels = tokenizer(text_target=[row["target"] for row in rows], padding=True, return_tensors="pt")["input_ids"]
    inputs = {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"]}
    loss = model(**inputs, labels=labels.masked_fill(labels == tokenizer.pad_token_id, -100)).loss.item()
    run = observe(job, 2)
    assert run.losses[0] == pytest.approx(loss, rel=1e-5)
    to_huggingface(run.folder / "step-00000001", tmp_path / "exported")
    for folder in (run.folder / "export", tmp_path / "exported"):
        settings = GenerationConfig.from_pretrained(folder)
        read = AutoTokenizer.from_pretrained(folder)
        assert read(text_target="two")["input_ids"] == tokenizer(text_target="two")["input_ids"]
        assert read("two")["input_ids"] == tokenizer("two")["input_ids"]
        if "nllb" in name:
            assert settings.max_length == 99
        if hasattr(tokenizer, "tgt_lang"):
            exported = AutoModelForSeq2SeqLM.from_pretrained(folder)
            written = exported.generate(**read("red", return_tensors="pt"), max_new_tokens=3)[0]
            assert tokenizer.convert_tokens_to_ids(languages.get("target_lang", "ro_RO")) in written[:2]


@pytest.mark.parametrize(
    ("save", "task", "problem"),
    [
        (save_nllb, {}, "no target language"),
        (save_nllb, {"target_lang": "French"}, "does not know a language"),
        (save_mbart, {"source_lang": "xx_XX"}, "does not know a language"),
        (save_t5, {"target_lang": "fra_Latn"}, "has no languages"),
    ],
)
def test_languages_that_a_tokenizer_lacks_are_refused(
    save: Any, task: dict[str, str], problem: str, tmp_path: Path
) -> None:
    save(tmp_path / "model")
    with pytest.raises((DataError, JobError), match=problem):
        observe(translation_job(tmp_path, task=task), 2)
    assert not (tmp_path / "run").exists()


def plain_answers(folder: Path, records: list[dict[str, str]], longest: int) -> list[str]:
    """What plain Transformers writes by an export, the most likely token each time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    found = []
    for record in records:
        batch = tokenizer(record["source"], return_tensors="pt")
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        ids = model.generate(**inputs, max_new_tokens=longest, do_sample=False, num_beams=1)[0]
        found.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
    return found


def test_accuracy_is_that_of_plain_generation(tmp_path: Path) -> None:
    """One answer, which is learned by heart; it begins with a special token, as targets of BART do."""
    save_bart(tmp_path / "model")
    job = translation_job(
        tmp_path,
        data={"held_out": 0.25},
        train={"steps": 30, "global_batch_size": 4, "micro_batch_size": 2},
        optimizer={"lr": 1e-2},
    )
    (tmp_path / "records.jsonl").write_text("\n".join(json.dumps(row | {"target": "two one"}) for row in RECORDS))
    run = observe(job, 2)
    facts = json.loads((run.folder / "run.json").read_text())
    assert plain_answers(run.folder / "export", RECORDS[-4:], 9) == ["two one"] * 4
    assert facts["accuracy"] == 1.0
    assert facts["metrics"] == pytest.approx({"chrf": 100, "bleu": facts["metrics"]["bleu"]})
    assert "chrf" in write_report(run.folder).read_text()


@pytest.mark.effect(
    "task.max_new_tokens", "words of an answer in run.json: two, instead of those of the longest right one"
)
@pytest.mark.parametrize("key", [2, None])
def test_answers_have_the_length_of_the_longest_right_one_or_of_the_key(key: int | None, tmp_path: Path) -> None:
    save_t5(tmp_path / "model")
    job = translation_job(
        tmp_path,
        task={"max_new_tokens": key} if key else {},
        data={"seq_len": 80},
        train={"steps": 10},
        optimizer={"lr": 1e-2},
    )
    records = [row | {"target": " ".join(["one"] * (70 - index))} for index, row in enumerate(RECORDS)]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    run = observe(job, 1)
    sample = json.loads((run.folder / "run.json").read_text())["sample"]
    answers = [line.partition(":")[2].strip() for line in sample.splitlines() if "answer:" in line]
    held_out = records[-len(answers) :]
    longest = key or len(held_out[0]["target"].split()) + 1
    assert answers == plain_answers(run.folder / "export", held_out, longest)
    assert max(len(answer.split()) for answer in answers) >= min(longest - 1, 64)


def test_a_new_model_ends_its_answers_with_the_token_of_its_tokenizer(tmp_path: Path) -> None:
    """Its configuration has other ids; a tokenizer is trained on the records."""
    run = observe(task_job("seq2seq", tmp_path, train={"steps": 1}), 1)
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "export")
    assert tokenizer("red")["input_ids"][-1] == tokenizer.eos_token_id
    assert GenerationConfig.from_pretrained(run.folder / "export").eos_token_id == tokenizer.eos_token_id
