"""Audio: features and targets as in the recipe of Transformers, files and arrays, a run that learns, bad input."""

import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from datasets import Dataset, load_from_disk
from transformers import (
    AutoTokenizer,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tests.lab import tones
from tests.lab.runs import train_in_the_pool
from tests.lab.task_jobs import MODELS, task_job
from tests.training.test_record_tasks import losses_of
from weft.checkpoint.model_config import read_config
from weft.data import RecordBatch, open_rows, prepare
from weft.data.audio import read_samples
from weft.errors import DataError, JobError, ModelError
from weft.job import Job
from weft.observe.report import write_report
from weft.planner.dryrun.assumed import assumed_row


def first_rows(job: Job, count: int) -> tuple[RecordBatch, list[dict[str, Any]]]:
    """First training rows of a job, and their records."""
    prepared = prepare(job.data, model_folder=None, log=lambda text: None, task=job.task)
    rows = open_rows(job, prepared, read_config(job.model, job.task.kind), held_out=False)
    return rows.collate(range(count), count), [rows.example(index).record for index in range(count)]


def test_features_and_targets_are_those_of_transformers(tmp_path: Path) -> None:
    """The encoder reads what the feature extractor makes of the samples; the loss is on the text and its end."""
    job = task_job("audio seq2seq", tmp_path)
    batch, records = first_rows(job, 4)
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path / "processor")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "processor")
    assert batch.inputs["input_features"].shape == (4, 8, 100)
    for index, record in enumerate(records):
        with wave.open(io.BytesIO(record["audio"]["bytes"])) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2") / 32768
        features = extractor(samples.astype(np.float32), sampling_rate=tones.RATE, return_tensors="pt").input_features
        torch.testing.assert_close(batch.inputs["input_features"][index], features[0])
        start, *expected = tokenizer(record["target"])["input_ids"]
        targets = batch.targets[index]
        assert targets[targets != -100].tolist() == expected
        assert batch.inputs["decoder_input_ids"][index, : len(expected)].tolist() == [start, *expected[:-1]]


def of_arrays(data: Any) -> Iterator[dict[str, Any]]:
    """The same records with arrays instead of files."""
    for record in tones.records(data):
        samples = read_samples(record["audio"])
        yield {**record, "label": 0, "audio": {"array": samples, "sampling_rate": tones.RATE}}


@pytest.mark.must("format: sounds")
def test_files_parquet_and_arrays_are_the_same_records(tmp_path: Path) -> None:
    records = list(tones.records(None))
    (tmp_path / "sounds").mkdir()
    lines = []
    for index, record in enumerate(records):
        (tmp_path / "sounds" / f"{index}.wav").write_bytes(record["audio"]["bytes"])
        lines.append(json.dumps({"sound": f"sounds/{index}.wav", "target": record["target"]}))
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    Dataset.from_list(records).to_parquet(tmp_path / "records.parquet")
    Dataset.from_list(records).save_to_disk(str(tmp_path / "folder"))
    named = {"source": "jsonl", "path": str(tmp_path / "records.jsonl")}
    sources: list[dict[str, Any]] = [
        {},
        {"data": {"source": "tests.training.test_audio_tasks:of_arrays"}},
        {"data": {"source": "parquet", "path": str(tmp_path / "records.parquet")}},
        {"data": {"source": "datasets", "path": str(tmp_path / "folder")}},
        {"data": named, "task": {"fields": {"audio": "sound"}}},
    ]
    found = [first_rows(task_job("audio seq2seq", tmp_path, **tables), 4)[0] for tables in sources]
    for other in found[1:]:
        for name, value in found[0].inputs.items():
            torch.testing.assert_close(other.inputs[name], value)
        assert torch.equal(other.targets, found[0].targets)
    for file in (tmp_path / "sounds").glob("*.wav"):
        file.unlink()  # the cache has the contents
    stored = next(folder for folder in (tmp_path / "cache").iterdir() if "sampling_rate" in str(list_columns(folder)))
    assert load_from_disk(str(stored))[0]["audio"]


def list_columns(folder: Path) -> list[str]:
    """Columns of stored records; none of other folders."""
    return load_from_disk(str(folder)).column_names if (folder / "state.json").exists() else []


def telephone(data: Any) -> Iterator[dict[str, Any]]:
    """The same tones at the sampling rate of a telephone, in FLAC."""
    for record in tones.records(data):
        file = io.BytesIO()
        soundfile.write(file, soxr.resample(read_samples(record["audio"]), tones.RATE, 8000), 8000, format="FLAC")
        yield {**record, "audio": {"bytes": file.getvalue(), "path": "sound.flac"}}


def test_audio_of_another_rate_is_resampled_for_the_feature_extractor(tmp_path: Path) -> None:
    batch, records = first_rows(task_job("audio seq2seq", tmp_path, **_from("telephone")), 4)
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path / "processor")
    for index, record in enumerate(records):
        samples, rate = soundfile.read(io.BytesIO(record["audio"]["bytes"]), dtype="float32")
        assert rate == 8000
        resampled = soxr.resample(samples, rate, tones.RATE)
        features = extractor(resampled, sampling_rate=tones.RATE, return_tensors="pt").input_features
        torch.testing.assert_close(batch.inputs["input_features"][index], features[0])


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_all_widths(width: int) -> None:
    """Two channels are averaged; 8 bits are unsigned."""
    file, wanted = io.BytesIO(), [0.5, -0.25, 0.0]
    with wave.open(file, "wb") as sound:
        sound.setparams((2, width, tones.RATE, 0, "NONE", ""))
        for value in wanted:
            for channel in (value + 0.125, value - 0.125):
                number = round(channel * 2 ** (8 * width - 1)) + (128 if width == 1 else 0)
                sound.writeframesraw(number.to_bytes(width, "little", signed=width > 1))
    assert read_samples({"bytes": file.getvalue(), "path": None}).tolist() == wanted


@pytest.mark.slow("150 steps, after which the model is right")
def test_whisper_learns_tones(tmp_path: Path) -> None:
    """The export is loaded by plain Transformers, which writes the names of held-out tones; the report says how to use it."""
    job = task_job(
        "audio seq2seq",
        tmp_path,
        data={"source": "tests.lab.tones:many_records"},
        train={"steps": 150, "global_batch_size": 16, "micro_batch_size": 8},
        optimizer={"lr": 3e-3, "clip_norm": 1.0, "eps": 1e-8},
    )
    out, _ = train_in_the_pool(job, 2)
    assert losses_of(out)[-1] < 0.1
    facts = json.loads((out / "run.json").read_text())
    assert facts["accuracy"] >= 0.9
    assert "automatic-speech-recognition" in write_report(out).read_text()
    model = WhisperForConditionalGeneration.from_pretrained(out / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "export")
    extractor = WhisperFeatureExtractor.from_pretrained(out / "export")
    samples = read_samples({"bytes": tones.write_tones(["high", "low"]), "path": None})
    features = extractor(samples, sampling_rate=tones.RATE, return_tensors="pt").input_features
    written = tokenizer.decode(model.generate(features, max_new_tokens=6)[0], skip_special_tokens=True)
    assert written.strip() == "high low"


@pytest.mark.parametrize("name", ["audio seq2seq", "audio classification"])
def test_dry_run_has_features_of_half_a_minute(name: str, tmp_path: Path) -> None:
    from weft.adapters.model import build_model

    job = task_job(name, tmp_path)
    row = assumed_row(job, build_model(job, torch.float32))
    assert row is not None
    assert row.inputs["input_features"].shape == (1, 8, 100)
    job = task_job(name, tmp_path, data={"tokenizer": "train"})
    with pytest.raises(JobError, match="without a processor"):
        assumed_row(job, build_model(job, torch.float32))


def long_records(data: Any) -> Iterator[dict[str, Any]]:
    """A record longer than the second to which the feature extractor pads."""
    yield from tones.records(data)
    yield {"audio": {"bytes": tones.write_tones(["low"] * 5), "path": None}, "target": "low " * 5}


def short_records(data: Any) -> Iterator[dict[str, Any]]:
    """Tones, and as the last record so many samples as data.path says."""
    yield from of_arrays(data)
    yield {"audio": {"array": [0.25] * int(data.path), "sampling_rate": tones.RATE}, "target": "low", "label": 0}


def damaged_records(data: Any) -> Iterator[dict[str, Any]]:
    """A record of which the file is no MP3 file."""
    yield from tones.records(data)
    yield {"audio": {"bytes": b"ID3 of an MP3 file", "path": "song.mp3"}, "target": "low"}


def channels_of_arrays(data: Any) -> Iterator[dict[str, Any]]:
    """An array with two channels."""
    for _ in range(4):
        yield {"audio": {"array": [[0.0, 0.1], [0.0, 0.1]], "sampling_rate": tones.RATE}, "target": "low"}


def _from(function: str) -> dict[str, Any]:
    return {"data": {"source": f"tests.training.test_audio_tasks:{function}"}}


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        (_from("long_records"), "1 records are longer than 1 s, the longest 1.2 s"),
        (_from("long_records"), "record 40 of data.source"),
        (_from("damaged_records"), "the audio of 1 of 41 records cannot be read, the first: song.mp3"),
        (_from("channels_of_arrays"), "an array of 2 dims"),
        ({"model": {"config": {**tones.WHISPER, "num_mel_bins": 16}}}, "refuses a row of input_features [1, 8, 100]"),
        ({"data": {"source": "tests.lab.tones:single_tones"}}, "records of task.kind"),
        ({"data": {"tokenizer": "train"}}, "feature extractor"),
        ({"data": {"source": "tests.lab.task_jobs:reversed_words"}}, "whisper reads audio"),
        ({"model": {"config": {**MODELS["seq2seq"], "vocab_size": 300}}}, "t5 reads source"),
        ({"model": {"config": {**tones.WHISPER, "apply_spec_augment": True}}}, "apply_spec_augment"),
        ({"data": {"seq_len": 32}}, "longer than the model's 16 positions"),
    ],
)
def test_bad_audio_is_refused(tables: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, JobError, ModelError)) as caught:
        train_in_the_pool(task_job("audio seq2seq", tmp_path, **tables), 2)
    assert problem in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "window"), [("audio seq2seq", 400), ("audio classification", 1056)])
def test_audio_shorter_than_a_window_is_refused(name: str, window: int, tmp_path: Path) -> None:
    """A window of the spectrogram of Whisper, and of the convolutions of wav2vec2: of 64 + 31 * 32 samples."""
    model, own = MODELS[name], tmp_path / "processor"
    if name == "audio classification":
        model = {**tones.WAV2VEC2, "conv_kernel": [64, 16, 3], "conv_stride": [32, 8, 2], "conv_dim": [16] * 3}
        model |= {"num_feat_extract_layers": 3}
        own = tmp_path / "own"
        Wav2Vec2FeatureExtractor(sampling_rate=tones.RATE).save_pretrained(own)
    for samples in (window - 1, window):
        data = {"source": "tests.training.test_audio_tasks:short_records", "path": str(samples), "tokenizer": str(own)}
        job = task_job(name, tmp_path, model={"config": model}, data=data, train={"steps": 1})
        if samples == window:
            train_in_the_pool(job, 1)
            return
        with pytest.raises(DataError, match=f"fewer than {window} samples, the shortest {samples}") as caught:
            train_in_the_pool(job, 1)
        assert "record 40 of" in str(caught.value.where)
