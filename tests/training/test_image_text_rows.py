"""Rows of images and text: borders of prompt and answer, one token that begins a text, tokens of images in texts, prefixes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as token_models
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    Florence2Config,
    LlavaProcessor,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)

from tests.lab.kinds import DECODER, SIZES
from tests.lab.runs import observe
from tests.lab.task_jobs import MODELS, task_job
from tests.training.test_image_sizes import pictures, sizes_job
from weft.checkpoint.model_config import read_config
from weft.data import open_rows, prepare
from weft.errors import DataError, ModelError
from weft.job import Job

COLOURS = ("red", "green", "blue")
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '[' + m['role'] + ']' }}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "{{ '<image>' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
ADDED = {"begin": "<s> $A", "both": "<s> $A </s>", "none": "$A"}
"""Special tokens that a tokenizer adds to a text."""


def tokenizer(added: str) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: a token may hold the space before an answer and its first letters."""
    plain = Tokenizer(token_models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<image>"]
    texts = [f"what colour ? a {colour} square USER ASSISTANT: {colour} one" for colour in COLOURS] * 30
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: dict[str, Any] = {"initial_alphabet": alphabet, "show_progress": False}
    plain.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, **options))
    plain.post_processor = processors.TemplateProcessing(
        single=ADDED[added], pair=f"{ADDED[added]} $B:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names, extra_special_tokens={"image_token": "<image>"})


def save_llava(folder: Path, added: str, template: str | None) -> None:
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    patches: dict[str, Any] = {"patch_size": 8, "num_additional_image_tokens": 1}
    patches["vision_feature_select_strategy"] = "default"
    LlavaProcessor(images, tokenizer(added), **patches, chat_template=template).save_pretrained(folder)


def questions(data: Any) -> Iterator[dict[str, Any]]:
    """Images of one colour with answers of several lengths; as many as the word in data.path says."""
    for index in range(8):
        colour = COLOURS[index % 3]
        answer = " ".join([f"a {colour} square"] * (1 + index % 2))
        prompt = f"what is {data.path} in html ?" if data.path and index == 5 else "what colour ?"
        yield {"image": Image.new("RGB", (32, 32), colour), "prompt": prompt, "answer": answer}


def job_of(folder: Path, model: dict[str, Any], **data: Any) -> Job:
    """Job on the questions above, with the processor in the folder."""
    own = {"source": "tests.training.test_image_text_rows:questions", "tokenizer": str(folder / "own"), **data}
    job = task_job("vlm", folder, data={**own, "shuffle": False, "held_out": 0.0}, train={"steps": 1})
    return Job.parse({**job.model_dump(exclude_none=True), "model": {"config": model}})


LLAVA = {**MODELS["vlm"], "text_config": {**MODELS["vlm"]["text_config"], "vocab_size": 400}}


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_every_token_of_an_answer_has_a_loss_and_a_row_begins_once(
    template: str | None, added: str, tmp_path: Path
) -> None:
    """Borders are those of characters in the text of the row; the first token is that of the template, if it has one."""
    save_llava(tmp_path / "own", added, template)
    job = job_of(tmp_path, LLAVA)
    prepared = prepare(job.data, model_folder=None, log=lambda text: None, task=job.task)
    batch = open_rows(job, prepared, read_config(job.model, "vlm"), held_out=False).collate(range(8), 8)
    plain = AutoProcessor.from_pretrained(tmp_path / "own").tokenizer
    for line, record in enumerate(questions(job.data)):
        asked = f"<s>[user]<image>{record['prompt']}[assistant]\n" if template else f"<image>{record['prompt']} "
        text = asked + record["answer"] + "</s>"
        begin = "" if template or added == "none" else "<s>"
        encoded = plain(begin + text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end - len(begin) for _, end in encoded["offset_mapping"]]
        expected = [id_ for id_, end in zip(encoded["input_ids"], ends, strict=True) if end > len(asked)]
        targets, ids = batch.targets[line], batch.inputs["input_ids"][line]
        places = (targets != -100).nonzero().flatten()
        assert targets[places].tolist() == ids[places + 1].tolist() == expected
        assert plain.decode(expected).lstrip() == record["answer"] + "</s>"
        shown = ids[batch.inputs["attention_mask"][line] == 1]
        assert (shown == 1).sum() == bool(begin or template)
        assert (shown == 2).sum() == 1
        assert (shown == 3).sum() == 16


@pytest.mark.parametrize("token", ["<image>"])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_tokens_of_images_in_texts_are_refused_with_their_line(
    token: str, template: str | None, tmp_path: Path
) -> None:
    save_llava(tmp_path / "own", "begin", template)
    with pytest.raises(DataError, match="the prompt of a record contains <image>") as caught:
        observe(job_of(tmp_path, LLAVA, path=token), 1)
    assert "record 5 of" in str(caught.value.where)
    records = []
    for index, record in enumerate(questions(job_of(tmp_path, LLAVA).data)):
        record["image"].save(tmp_path / f"{index}.png")
        records.append({**record, "image": f"{index}.png", "answer": f"{token} is red" if index == 3 else "red"})
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match="the answer of a record contains <image>") as caught:
        observe(job_of(tmp_path, LLAVA, source="jsonl", path=str(path)), 1)
    assert "records.jsonl, line 4" in str(caught.value.where)
    assert not (tmp_path / "run").exists()


PALIGEMMA: dict[str, Any] = {
    "model_type": "paligemma",
    "vision_config": {"model_type": "siglip_vision_model", **SIZES, "image_size": 32, "patch_size": 8},
    "text_config": {"model_type": "gemma", **DECODER, "vocab_size": 2000, "head_dim": 8, "pad_token_id": 0},
    "image_token_id": 3,
    "projection_dim": 32,
}


def test_answers_of_a_model_with_a_prefix_see_no_token_that_follows(tmp_path: Path) -> None:
    """PaliGemma reads its prompt in both directions: the loss is that of its processor with a suffix, and of its own labels."""
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    PaliGemmaProcessor(images, tokenizer("none")).save_pretrained(tmp_path / "own")
    job = job_of(tmp_path, PALIGEMMA)
    run = observe(job, 2)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(read_config(job.model, "vlm")).train()
    processor = AutoProcessor.from_pretrained(tmp_path / "own")
    rows = list(questions(job.data))[:6]
    total = count = 0.0
    for row in rows:
        inputs = processor(
            text=[f"<image>{row['prompt']}"], images=[[row["image"]]], suffix=[row["answer"]], return_tensors="pt"
        )
        targets = (inputs["labels"] != -100).sum().item()
        total, count = total + model(**inputs).loss.item() * targets, count + targets
        assert model(**{**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])}).loss.item() != (
            pytest.approx(model(**inputs).loss.item(), rel=1e-5)
        )
    assert run.losses == pytest.approx([total / count], rel=1e-5)
    assert json.loads((run.folder / "run.json").read_text())["sample"]


def strips(data: Any) -> Iterator[dict[str, Any]]:
    """Images, of which one is too narrow for the processor of Qwen2-VL."""
    yield from pictures(data)
    yield {"image": Image.new("RGB", (2, 600)), "prompt": "what size ?", "answer": "high"}


def test_an_image_that_the_processor_refuses_is_named(tmp_path: Path) -> None:
    job = sizes_job(tmp_path, data={"source": "tests.training.test_image_text_rows:strips"})
    with pytest.raises(DataError, match="aspect ratio must be smaller than 200") as caught:
        observe(job, 1)
    assert "record 40 of" in str(caught.value.where)
    assert not (tmp_path / "run").exists()


def test_an_encoder_that_would_read_the_answer_is_refused(tmp_path: Path) -> None:
    save_llava(tmp_path / "own", "begin", None)
    vision = {"embed_dim": [8, 16], "depths": [1, 1], "num_heads": [1, 2], "num_groups": [1, 2]}
    vision |= {"patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True]}
    text = {"model_type": "bart", "d_model": 16, "vocab_size": 400, "encoder_layers": 1, "decoder_layers": 1}
    model = Florence2Config(
        vision_config={**vision, "window_size": 4, "projection_dim": 16}, text_config=text
    ).to_dict()
    with pytest.raises(ModelError, match="an encoder-decoder with"):
        observe(job_of(tmp_path, {**model, "architectures": None}), 1)
    assert not (tmp_path / "run").exists()
