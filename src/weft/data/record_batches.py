"""Micro-batches of tasks other than causal: inputs by the names of the model's arguments, and targets.

A row depends on its position and the seed alone, also where tokens are hidden or noise is added: global batches are independent
of the number of ranks, and a resumed run has the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.data import image_text
from weft.data.audio import features_of
from weft.data.batches import IGNORED
from weft.data.images import pixels_of, scaled
from weft.data.noise import add_noise, make_scheduler
from weft.data.prepared import Prepared
from weft.data.row_costs import image_and_text_cost
from weft.data.rows import Rows, row_seed, shuffled
from weft.data.shards import TokenSpan
from weft.job import Job, Task

LENGTH_MULTIPLE = 8
"""Rows of text are padded to a multiple of it, so that few shapes occur, and ranks can split their tokens."""


@dataclass(frozen=True)
class RecordBatch:
    """Micro-batch of one rank."""

    inputs: dict[str, Tensor]
    """Arguments of the model's forward; rows are the first dim of most."""
    targets: Tensor
    """int64 [rows, tokens], or [rows]: id that the logits at the same place predict; -100 if there is none. Of diffusion 0 for
    each row."""
    predicted: Tensor | None = None
    """Target of diffusion, such as noise - image, float32 [rows, channels, height, width]; None for other tasks."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.targets)

    def to(self, device: torch.device) -> "RecordBatch":
        """The micro-batch on a device; from pinned memory without waiting."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        predicted = None if self.predicted is None else self.predicted.to(device, non_blocking=True)
        return RecordBatch(inputs, self.targets.to(device, non_blocking=True), predicted)


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
        job: job.
        prepared: its prepared data.
        config: configuration of the model.
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
        of_text = partial(sources, tokenizer, padding_of(config, tokenizer), length)
        features = _audio_features(prepared, folder) if "audio" in prepared.fields else of_text
        return partial(seq2seq, features, tokenizer, config, length)
    if job.task.kind == "vlm":
        return partial(vlm, open_processor(prepared))
    if job.task.kind == "diffusion":
        return partial(diffusion, job.task, make_scheduler(job.task), config)
    if "audio" in prepared.fields:
        return partial(media_classes, _audio_features(prepared, folder))
    if "image" in prepared.fields:
        return partial(media_classes, pixels_of(folder, config))
    tokenizer = _tokenizer(folder)
    return partial(text_classes, tokenizer, padding_of(config, tokenizer), job.data.seq_len)


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
        config: configuration of the model.
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


def _ended(tokenizer: Any, text: str, seq_len: int) -> list[int]:
    """Ids of a text, with an end-of-text token, of at most `seq_len` tokens."""
    ids = list(tokenizer(text, truncation=True, max_length=seq_len)["input_ids"])
    end = tokenizer.eos_token_id
    if end is None or ids[-1:] == [end] or len(ids) == seq_len:
        return ids
    return [*ids, end]


def _text_inputs(rows: list[list[int]], padding: int) -> dict[str, Tensor]:
    return {"input_ids": _pad(rows, padding), "attention_mask": _pad([[1] * len(row) for row in rows], 0)}


def sources(tokenizer: Any, padding: int, seq_len: int, records: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Texts to read."""
    return _text_inputs([_ended(tokenizer, record["source"], seq_len) for record in records], padding)


def seq2seq(features: Features, tokenizer: Any, config: Any, seq_len: int, examples: list[Example]) -> RecordBatch:
    """Texts or audio to read, and texts to write: the decoder sees the tokens before each target."""
    targets = [_ended(tokenizer, example.record["target"], seq_len) for example in examples]
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    # The tokenizer of Whisper begins texts with the start token, which no model is to write.
    targets = [row[1:] if row[:1] == [start] else row for row in targets]
    shifted = _pad([[start or 0, *row[:-1]] for row in targets], padding_of(config, tokenizer))
    inputs = features([example.record for example in examples])
    return RecordBatch({**inputs, "decoder_input_ids": shifted}, _pad(targets, IGNORED))


def text_classes(tokenizer: Any, padding: int, seq_len: int, examples: list[Example]) -> RecordBatch:
    """Texts and their classes."""
    rows = [_ended(tokenizer, example.record["text"], seq_len) for example in examples]
    return RecordBatch(_text_inputs(rows, padding), _labels(examples))


def media_classes(features: Features, examples: list[Example]) -> RecordBatch:
    """Images or audio, and their classes."""
    return RecordBatch(features([example.record for example in examples]), _labels(examples))


def _labels(examples: list[Example]) -> Tensor:
    return torch.tensor([example.record["label"] for example in examples])


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
        inputs["class_labels"] = _labels(examples)
    return RecordBatch(inputs, torch.zeros(len(examples), dtype=torch.int64), predicted)
