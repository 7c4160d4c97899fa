"""Images and audio of records while they are prepared: damaged files, with their line; files that are left out; scales."""

import io
import json
import struct
import sys
import wave
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from datasets import Dataset, load_from_disk
from PIL import Image

from tests.lab.tones import write_tones
from weft.data import Prepared, prepare
from weft.data.audio import audio_size, read_samples
from weft.data.images import in_mode
from weft.errors import DataError
from weft.job import Data, Task

RATE = 16000
TONE = (0.4 * np.sin(np.arange(4000) / 7)).astype(np.float32)


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def sound(format: str = "WAV", subtype: str | None = None, samples: np.ndarray = TONE, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def prepared(folder: Path, records: list[dict[str, Any]], **keys: Any) -> tuple[Prepared, list[str]]:
    """Prepare records of a classifier in JSON lines; return what ranks get, and the lines that are printed."""
    lines: list[str] = []
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = Data(**{"source": "jsonl", "path": str(path), "held_out": 0.0, "cache": str(folder / "cache"), **keys})
    return prepare(data, model_folder=None, log=lines.append, task=Task(kind="classification")), lines


def with_bad_file(folder: Path, field: str, bad: bytes | None) -> list[dict[str, Any]]:
    """Eight records of which that on line 6 has a bad file; None: no file."""
    good = png() if field == "image" else write_tones(["low"])
    for index in range(8):
        if index != 5:
            (folder / f"{index}.bin").write_bytes(good)
        elif bad is not None:
            (folder / "5.bin").write_bytes(bad)
    return [{field: f"{index}.bin", "label": index % 2} for index in range(8)]


def huge() -> bytes:
    """PNG whose header says 30,000 times 30,000 pixels."""
    whole = bytearray(png())
    whole[16:24] = struct.pack(">II", 30000, 30000)
    whole[29:33] = struct.pack(">I", zlib.crc32(bytes(whole[12:29])))
    return bytes(whole)


def of_floats() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ones((4, 4), np.float32)).save(file, "TIFF")
    return file.getvalue()


def not_finite() -> bytes:
    return sound(subtype="FLOAT", samples=np.array([0.0, np.nan, 0.5], np.float32))


BAD: dict[str, tuple[str, Callable[[], bytes] | None]] = {
    "a missing image": ("image", None),
    "an empty image": ("image", lambda: b""),
    "an image of other bytes": ("image", lambda: b"<html>not found</html>"),
    "an image without its end": ("image", lambda: png()[:-300]),
    "a huge image": ("image", huge),
    "an image of floats": ("image", of_floats),
    "a missing sound": ("audio", None),
    "an empty sound": ("audio", lambda: b""),
    "a WAV file shorter than its header": ("audio", lambda: write_tones(["low"])[:-1000]),
    "a float WAV file shorter than its header": ("audio", lambda: sound(subtype="FLOAT")[:-1000]),
    "a WAV file without samples": ("audio", lambda: sound(samples=TONE[:0])),
    "a WAV file that is not finite": ("audio", not_finite),
    "a FLAC file without its end": ("audio", lambda: sound("FLAC")[:-2000]),
    "an unknown format": ("audio", lambda: b"no sound of any kind, but long enough for a header"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_line_or_left_out(name: str, tmp_path: Path) -> None:
    field, make = BAD[name]
    records = with_bad_file(tmp_path, field, make and make())
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, records)
    assert f"the {field} of 1 of 8 records cannot be read" in str(caught.value)
    assert str(tmp_path / "5.bin") in str(caught.value)
    assert "records.jsonl, line 6" in str(caught.value.where)
    for _ in range(2):  # the second time from the cache
        found, lines = prepared(tmp_path, records, bad_files="skip")
        stored = load_from_disk(found.train[0].tokens)
        assert len(stored) == found.train[0].last == 7
        assert [line for line in lines if "left out" in line and "5.bin" in line and "line 6" in line]
    with pytest.raises(DataError, match="of 1 of 1 records cannot be read"):
        prepared(tmp_path, records[5:6], bad_files="skip")


@pytest.mark.parametrize("source", ["parquet", "datasets"])
def test_records_of_tables_are_named_by_their_number(source: str, tmp_path: Path) -> None:
    contents = [{"bytes": png()[: -300 if index == 5 else None], "path": None} for index in range(8)]
    table = Dataset.from_list([{"image": one, "label": index % 2} for index, one in enumerate(contents)])
    path = tmp_path / "table.parquet" if source == "parquet" else tmp_path / "table"
    table.to_parquet(path) if source == "parquet" else table.save_to_disk(str(path))
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, [], source=source, path=str(path))
    assert "record 5 of data.path" in str(caught.value.where)


def test_a_record_without_a_value_is_named(tmp_path: Path) -> None:
    records = [{"text": "one", "label": 0}, {"text": None, "label": 1}]
    with pytest.raises(DataError, match="1 records have no text") as caught:
        prepared(tmp_path, records)
    assert "line 2" in str(caught.value.where)


@pytest.mark.parametrize("mode", ["PNG", "TIFF", "PPM"])
def test_16_bits_are_scaled_to_8(mode: str) -> None:
    """Whichever mode Pillow has for the file, and for each number of channels."""
    values = np.random.default_rng(0).integers(0, 65536, (8, 8), dtype=np.uint16)
    file = io.BytesIO()
    Image.fromarray(values).save(file, mode)
    expected = np.round(values / 65535 * 255).astype(np.uint8)
    for channels in (1, 3):
        found = np.asarray(in_mode(Image.open(io.BytesIO(file.getvalue())), channels)).reshape(8, 8, channels)
        assert (found == expected[..., None]).all()


FORMATS = [
    *[("WAV", subtype) for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")],
    *[("WAVEX", "PCM_16"), ("WAVEX", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")],
]


@pytest.mark.parametrize(("format", "subtype"), FORMATS)
def test_every_format_has_its_samples(format: str, subtype: str) -> None:
    contents = sound(format, subtype)
    assert audio_size({"bytes": contents, "path": None}) == (RATE, len(TONE))
    found = read_samples({"bytes": contents, "path": None})
    error = np.sqrt(np.mean((found - TONE) ** 2))
    assert error < {"PCM_U8": 0.01, "VORBIS": 0.05, "MPEG_LAYER_III": 0.05}.get(subtype, 1e-4)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT"])
def test_wav_files_are_the_same_without_soundfile(subtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"bytes": sound(subtype=subtype, samples=np.stack([TONE, -0.5 * TONE], 1)), "path": None}
    expected = read_samples(value)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert np.array_equal(read_samples(value), expected)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate: int) -> None:
    samples = np.sin(2 * np.pi * 300 * np.arange(rate // 2) / rate).astype(np.float32)
    found = read_samples({"array": samples, "sampling_rate": rate}, RATE)
    assert np.array_equal(found, soxr.resample(samples, rate, RATE))
    wanted = np.sin(2 * np.pi * 300 * np.arange(RATE // 2) / RATE)
    assert len(found) == len(wanted)
    assert abs(found - wanted)[500:-500].max() < 1e-3


def test_a_file_written_into_a_pipe_is_read_to_its_end() -> None:
    """Its header has the largest size."""
    contents = bytearray(write_tones(["low"]))
    place = contents.index(b"data") + 4
    contents[place : place + 4] = b"\xff" * 4
    with wave.open(io.BytesIO(write_tones(["low"]))) as whole:
        count = whole.getnframes()
    assert audio_size({"bytes": bytes(contents), "path": None}) == (RATE, count)


def test_arrays_of_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="array of int16"):
        audio_size({"array": np.array([1, 200, -300], np.int16), "sampling_rate": RATE})
