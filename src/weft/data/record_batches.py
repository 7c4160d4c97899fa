"""Micro-batches of tasks other than causal: inputs by the names of the model's arguments, and targets.

A row depends on its position and the seed alone, also where tokens are hidden or noise is added: global batches are independent
of the number of ranks, and a resumed run has the same ones.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.anatomy.classes import auto_class
from weft.data import image_text
from weft.data.audio import features_of
from weft.data.batches import IGNORED
from weft.data.images import pixels_of, scaled
from weft.data.labels import MULTI_LABEL, SINGLE_LABEL, Targets, targets_of
from weft.data.noise import add_noise, make_scheduler
from weft.data.prepared import Prepared
from weft.data.row_costs import image_and_text_cost
from weft.data.rows import Rows, row_seed, shuffled
from weft.data.shards import TokenSpan
from weft.data.tokenizer import added_tokens
from weft.job import Job, Task

LENGTH_MULTIPLE = 8
"""Rows of text are padded to a multiple of it, so that few shapes occur, and ranks can split their tokens."""


@dataclass(frozen=True)
class RecordBatch:
    """Micro-batch of one rank."""

    inputs: dict[str, Tensor]
    """Arguments of the model's forward; rows are the first dim of most."""
    targets: Tensor
    """int64 [rows, tokens], or [rows]: id that the logits at the same place predict; -100 if there is none. With `predicted` 0
    for each row."""
    predicted: Tensor | None = None
    """Numbers that the outputs of a row predict, float32: of diffusion, such as noise - image, [rows, channels, height, width];
    of a regression and of several classes [rows, outputs]. None for other tasks."""
    binary: bool = False
    """The loss is the binary cross entropy of `predicted`, not the squared error."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.targets)

    def pinned(self) -> "RecordBatch":
        """The micro-batch in pinned host memory."""
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        predicted = None if self.predicted is None else self.predicted.pin_memory()
        return RecordBatch(inputs, self.targets.pin_memory(), predicted, self.binary)

    def to(self, device: torch.device) -> "RecordBatch":
        """The micro-batch on a device; from pinned memory without waiting."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        predicted = None if self.predicted is None else self.predicted.to(device, non_blocking=True)
        return RecordBatch(inputs, self.targets.to(device, non_blocking=True), predicted, self.binary)


@dataclass(frozen=True)
class Example:
    """Record with the random numbers of its position."""

    record: dict[str, Any]
    generator: torch.Generator


Collate = Callable[[list[Example]], RecordBatch]
Features = Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]
"""Arguments of an encoder from records."""


class TaskRows:
    """Rows of a task, by global sample position, as `weft.data.rows.Rows`.

    Args:
        read: record by its index.
        count: number of records.
        collate: micro-batch from records.
        shuffle: shuffle the rows of each epoch; otherwise rows come in their order.
        seed: seed of the order, of hidden tokens and of noise.
        cost: cost of a record by its index; None: all rows cost the same.
    """

    def __init__(
        self,
        read: Callable[[int], dict[str, Any]],
        count: int,
        collate: Collate,
        shuffle: bool,
        seed: int,
        cost: Callable[[int], float] | None = None,
    ):
        self.read, self.count, self.shuffle, self.seed, self._collate = read, count, shuffle, seed, collate
        self._cost = cost

    def __len__(self) -> int:
        """Number of rows per epoch."""
        return self.count

    def example(self, position: int) -> Example:
        """Record at a global sample position, for any position >= 0; the epoch is `position // len(rows)`."""
        return Example(self.read(self._index(position)), torch.Generator().manual_seed(row_seed(self.seed, position)))

    def costs(self, positions: Sequence[int]) -> list[float] | None:
        """Costs of the rows at global sample positions; None if all rows cost the same."""
        return None if self._cost is None else [self._cost(self._index(position)) for position in positions]

    def _index(self, position: int) -> int:
        """Index of the record at a global sample position."""
        epoch, index = divmod(position, self.count)
        return shuffled(index, self.count, self.seed, epoch) if self.shuffle else index

    def collate(self, positions: Sequence[int], num_rows: int) -> RecordBatch:
        """Micro-batch of rows; rows beyond the given positions are copies of the first one without targets."""
        present = list(positions) or [0]
        batch = self._collate(
            [self.example(position) for position in present + present[:1] * (num_rows - len(present))]
        )
        batch.targets[len(positions) :] = IGNORED
        return batch

    def collate_records(self, records: Sequence[dict[str, Any]]) -> RecordBatch:
        """Micro-batch of any records, for a trial."""
        return self._collate([Example(record, torch.Generator()) for record in records])


def open_rows(job: Job, prepared: Prepared, config: Any, *, held_out: bool) -> TaskRows:
    """Rows of a split for a task other than causal.

    Args:
        held_out: True for the held-out split.
    """
    spans = prepared.held_out if held_out else prepared.train
    seed, shuffle = (0, False) if held_out else (job.train.seed, job.data.shuffle)
    if job.task.kind == "masked":
        return _masked_rows(job, prepared, config, spans, shuffle, seed)
    collate = _collate_of(job, prepared, config)
    if not spans:
        return TaskRows(lambda index: {}, 0, collate, shuffle, seed)
    (span,), (last,) = spans, (prepared.held_out or prepared.train)[-1:]
    records = open_records(span.tokens)

    def stored(index: int) -> int:  # a file may be sorted by labels: both splits are spread over it
        index += span.first
        return shuffled(index, last.last, 0, 0) if job.data.shuffle else index

    has_costs = job.task.kind == "vlm" and not held_out
    cost = None
    if has_costs:
        processor = open_processor(prepared)
        cost = image_and_text_cost(processor, config, records, partial(image_text.text_of, processor))
    return TaskRows(
        lambda index: records[stored(index)],
        span.last - span.first,
        collate,
        shuffle,
        seed,
        None if cost is None else lambda index: cost(stored(index)),
    )


def open_records(folder: str) -> Any:
    """Stored records of a folder, as a dataset."""
    from datasets import load_from_disk

    return load_from_disk(folder)


def _collate_of(job: Job, prepared: Prepared, config: Any) -> Collate:
    folder = Path(prepared.tokenizer) if prepared.tokenizer else None
    if job.task.kind == "seq2seq":
        tokenizer, length = _tokenizer(folder), job.data.seq_len
        features: Features = partial(text_inputs, "source", tokenizer, padding_of(config, tokenizer), length)
        start = None
        if "audio" in prepared.fields:
            # The tokenizer of Whisper begins texts with the start token, which no model is to write.
            features, start = _audio_features(prepared, folder), config.decoder_start_token_id
        shift = partial(shift_right, _with_padding(config, tokenizer))
        return partial(seq2seq, features, TargetIds(tokenizer, length, start), shift)
    if job.task.kind == "vlm":
        return partial(vlm, open_processor(prepared))
    if job.task.kind == "diffusion":
        return partial(diffusion, job.task, make_scheduler(job.task), config)
    assert prepared.labels is not None  # of a classifier
    if "audio" in prepared.fields:
        features = _audio_features(prepared, folder)
    elif "image" in prepared.fields:
        features = pixels_of(folder, config)
    else:
        tokenizer = _tokenizer(folder)
        features = partial(text_inputs, "text", tokenizer, padding_of(config, tokenizer), job.data.seq_len)
    return partial(labelled, features, targets_of(prepared.labels, job.model, config))


def _audio_features(prepared: Prepared, folder: Path | None) -> Features:
    return features_of(folder, open_records(prepared.train[0].tokens))


def open_processor(prepared: Prepared) -> Any:
    """Processor of images and text."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(prepared.tokenizer, local_files_only=True)


def _tokenizer(folder: Path | None) -> Any:
    from transformers import AutoTokenizer

    assert folder is not None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def padding_of(config: Any, tokenizer: Any) -> int:
    """Id with which texts are padded: that of the model, which may find the end of a row by it, else that of the tokenizer.

    Args:
        tokenizer: tokenizer of the texts.

    Returns:
        -1 if neither has one, which `check_model` refuses.
    """
    known = getattr(config.get_text_config(), "pad_token_id", None), tokenizer.pad_token_id
    return next((id_ for id_ in known if id_ is not None), -1)


# Masked words


def _masked_rows(
    job: Job, prepared: Prepared, config: Any, spans: Sequence[TokenSpan], shuffle: bool, seed: int
) -> TaskRows:
    """Rows of seq_len tokens across documents (FULL-SENTENCES of RoBERTa, Liu et al., 2019), or without packing of one."""
    rows = Rows(spans, seq_len=job.data.seq_len, packing=job.data.packing, shuffle=False, seed=0)
    tokenizer = _tokenizer(Path(str(prepared.tokenizer)))
    padding = padding_of(config, tokenizer)
    collate = partial(masked, job.task, tokenizer, padding, prepared.vocab_size, job.data.seq_len)
    return TaskRows(lambda index: {"tokens": rows[index].tokens}, len(rows), collate, shuffle, seed)


def masked(
    task: Task, tokenizer: Any, padding: int, vocab_size: int, seq_len: int, examples: list[Example]
) -> RecordBatch:
    """Hide tokens of rows (Devlin et al., BERT, 2018), but no special tokens."""
    input_ids = torch.full((len(examples), seq_len), padding)
    attention_mask, targets = torch.zeros_like(input_ids), torch.full_like(input_ids, IGNORED)
    mask_id, special = tokenizer.mask_token_id, torch.tensor(tokenizer.all_special_ids)
    for line, example in enumerate(examples):
        tokens = example.record["tokens"][:seq_len].to(torch.int64)
        chance, fate = torch.rand(2, len(tokens), generator=example.generator)
        replacement = torch.randint(vocab_size, (len(tokens),), generator=example.generator)
        chance[torch.isin(tokens, special)] = 1
        chosen = chance < task.mask_fraction
        chosen[int(chance.argmin())] = bool(chance.min() < 1)  # each row has a target, if it has a word
        hidden = torch.where(fate < 0.8, mask_id, torch.where(fate < 0.9, replacement, tokens))
        input_ids[line, : len(tokens)] = torch.where(chosen, hidden, tokens)
        targets[line, : len(tokens)] = torch.where(chosen, tokens, IGNORED)
        attention_mask[line, : len(tokens)] = 1
    return RecordBatch({"input_ids": input_ids, "attention_mask": attention_mask}, targets)


# Text


def _pad(rows: list[list[int]], value: int) -> Tensor:
    length = -(-max(map(len, rows)) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def text_inputs(
    field: str, tokenizer: Any, padding: int, seq_len: int, records: Sequence[dict[str, Any]]
) -> dict[str, Tensor]:
    """Texts to read, as the tokenizer makes them, so that a pipeline reads the same.

    Args:
        field: field of the records with the text.
        tokenizer: tokenizer of the texts.
        padding: id with which rows are padded.
        seq_len: maximum tokens of a row.
        records: records of a micro-batch.
    """
    texts = [record[field] for record in records]
    rows = tokenizer(texts, truncation=True, max_length=seq_len)["input_ids"]
    rows = [row or [padding] for row in rows]  # a row has a token
    return {"input_ids": _pad(rows, padding), "attention_mask": _pad([[1] * len(row) for row in rows], 0)}


class TargetIds:
    """Ids of texts to write, as the tokenizer makes them of targets; an end-of-text token follows where it adds none.

    Args:
        tokenizer: tokenizer of the texts.
        seq_len: maximum tokens of a row.
        start: token that is left out where a text begins with it; None: no token.
    """

    def __init__(self, tokenizer: Any, seq_len: int, start: int | None = None):
        self.tokenizer, self.seq_len, self.start = tokenizer, seq_len, start
        self.ends = bool(added_tokens(tokenizer, target=True)[1]) or tokenizer.eos_token_id is None

    def __call__(self, text: str) -> list[int]:
        """Ids of a text, at most `seq_len`."""
        ids = list(self.tokenizer(text_target=text, truncation=True, max_length=self.seq_len)["input_ids"])
        if not self.ends and len(ids) < self.seq_len and ids[-1:] != [self.tokenizer.eos_token_id]:
            ids.append(self.tokenizer.eos_token_id)
        return ids[1:] if self.start is not None and ids[:1] == [self.start] else ids


def _with_padding(config: Any, tokenizer: Any) -> Any:
    """Model without modules, of which `shift_right` needs the class and the configuration."""
    kind = auto_class("seq2seq", config)._model_mapping[type(config)]
    own = copy.deepcopy(config)
    own.pad_token_id = padding_of(config, tokenizer)
    if own.decoder_start_token_id is None:
        own.decoder_start_token_id = config.bos_token_id or 0
    shell = object.__new__(kind)
    vars(shell)["config"] = own
    return shell


def shift_right(model: Any, labels: Tensor) -> Tensor:
    """Inputs of a decoder for its labels: by the rule of the model, if it has one (mBART begins with the last token).

    Args:
        model: encoder-decoder.
        labels: int64 [rows, tokens], padded with -100.
    """
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        shifted: Tensor = model.prepare_decoder_input_ids_from_labels(labels)
        return shifted
    start = labels.new_full((len(labels), 1), model.config.decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == IGNORED, model.config.pad_token_id or 0)


def seq2seq(
    features: Features, ids: TargetIds, shift: Callable[[Tensor], Tensor], examples: list[Example]
) -> RecordBatch:
    """Texts or audio to read, and texts to write: the decoder sees the tokens before each target."""
    targets = _pad([ids(example.record["target"]) for example in examples], IGNORED)
    inputs = features([example.record for example in examples])
    return RecordBatch({**inputs, "decoder_input_ids": shift(targets)}, targets)


# Labels


def labelled(features: Features, rule: Targets, examples: list[Example]) -> RecordBatch:
    """Texts, images or audio, and their labels."""
    inputs = features([example.record for example in examples])
    labels = [example.record["label"] for example in examples]
    if rule.problem == SINGLE_LABEL:
        return RecordBatch(inputs, torch.tensor([rule.ids[label] if rule.ids else int(label) for label in labels]))
    predicted = torch.zeros(len(labels), rule.outputs)
    for line, label in enumerate(labels):
        if rule.ids:
            predicted[line, [rule.ids[index] for index in label]] = 1
        else:
            predicted[line] = torch.tensor(label, dtype=predicted.dtype)
    zeros = torch.zeros(len(labels), dtype=torch.int64)
    return RecordBatch(inputs, zeros, predicted, binary=rule.problem == MULTI_LABEL)


# Images


def vlm(processor: Any, examples: list[Example]) -> RecordBatch:
    """Images and prompts, and a loss on the answers."""
    return RecordBatch(*image_text.rows_of(processor, [example.record for example in examples], LENGTH_MULTIPLE))


# Diffusion


def diffusion(task: Task, scheduler: Any, config: Any, examples: list[Example]) -> RecordBatch:
    """Noisy images, and what the model predicts of them."""
    noised = []
    for example in examples:
        image = scaled(example.record["image"], config.sample_size, config.in_channels)
        noised.append(add_noise(task, scheduler, image, example.generator))
    noisy, predicted, timesteps = (torch.stack(parts) for parts in zip(*noised, strict=True))
    inputs = {"hidden_states": noisy, "timestep": timesteps}
    if "label" in examples[0].record:
        inputs["class_labels"] = torch.tensor([int(example.record["label"]) for example in examples])
    return RecordBatch(inputs, torch.zeros(len(examples), dtype=torch.int64), predicted)
