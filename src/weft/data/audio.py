"""Audio of records: WAV files and arrays, and their features by the feature extractor of Transformers."""

import inspect
import io
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from weft.errors import DataError

SHOWN = 200  # characters of an error message of the library that are shown


def store_rates(records: Any, where: str) -> Any:
    """Add columns with the sampling rate and the number of samples of each record, read from the headers of files.

    Args:
        records: dataset with a column `audio`: paths of files, contents of files, or dictionaries with array and sampling_rate.
        where: source, for messages.

    Raises:
        DataError: a file is missing or is no PCM WAV file.
    """
    import datasets

    kind = records.features["audio"]
    if not (isinstance(kind, dict) and {"array", "sampling_rate"} <= set(kind)):
        try:
            records = records.cast_column("audio", datasets.Audio(decode=False))
        except Exception as error:  # the library raises many types of exceptions
            raise _unreadable(f"audio is of the type {kind}: {' '.join(str(error).split())[:SHOWN]}", where) from None
    sizes: list[tuple[int, int]] = []
    for index, value in enumerate(records["audio"]):
        try:
            sizes.append(_size(value))
        except (EOFError, OSError, ValueError, wave.Error) as error:
            name = value.get("path") or "its contents"
            raise _unreadable(f"the audio of record {index} cannot be read: {name}: {error}", where) from None
    rates, lengths = zip(*sizes, strict=True) if sizes else ((), ())
    return records.add_column("sampling_rate", list(rates)).add_column("samples", list(lengths))


def _unreadable(problem: str, where: str) -> DataError:
    return DataError(
        problem,
        where=where,
        rule="audio is a PCM WAV file, or a dictionary with array and sampling_rate",
        fix="convert other files, for example by: ffmpeg -i sound.mp3 -ac 1 -ar 16000 sound.wav",
    )


def _open(value: dict[str, Any]) -> wave.Wave_read:
    contents = value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    return wave.open(io.BytesIO(contents))


def _size(value: dict[str, Any]) -> tuple[int, int]:
    """Sampling rate and number of samples."""
    if "array" in value:
        if np.ndim(value["array"]) != 1:
            raise ValueError(f"an array of {np.ndim(value['array'])} dims, and audio has one")
        return int(value["sampling_rate"]), len(value["array"])
    with _open(value) as sound:
        return sound.getframerate(), sound.getnframes()


def read_samples(value: dict[str, Any]) -> np.ndarray:
    """Samples of a record in [-1, 1], float32 [samples]: the mean of the channels.

    Args:
        value: contents of a WAV file, or an array with its sampling rate.
    """
    if "array" in value:
        return np.asarray(value["array"], np.float32)
    with _open(value) as sound:
        width, channels = sound.getsampwidth(), sound.getnchannels()
        raw = np.frombuffer(sound.readframes(sound.getnframes()), np.uint8).reshape(-1, width)
    if width == 1:  # unsigned, unlike all other widths
        samples = (raw[:, 0].astype(np.float64) - 128) / 128
    else:
        high = np.zeros((len(raw), 4), np.uint8)
        high[:, 4 - width :] = raw
        samples = high.view("<i4")[:, 0] / 2**31
    return samples.reshape(-1, channels).mean(1).astype(np.float32)


def check_audio(records: Any, folder: Path | None) -> None:
    """Check that a feature extractor reads the sampling rates and the lengths of all records.

    Args:
        records: stored records.
        folder: folder with the preprocessor_config.json.

    Raises:
        DataError: there is no feature extractor, or it reads another sampling rate, or shorter audio.
    """
    extractor = _open_extractor(folder)
    where, rate = f"preprocessor_config.json of {folder}", extractor.sampling_rate
    rates, lengths = (records.data.column(name).to_numpy() for name in ("sampling_rate", "samples"))
    if (others := rates != rate).any():
        raise DataError(
            f"{others.sum()} records have a sampling rate of {rates[others][0]} Hz, the feature extractor reads {rate} Hz",
            where=where,
            rule="audio is not resampled: all records have the sampling rate of the feature extractor",
            fix=f"convert the files, for example by: ffmpeg -i sound.wav -ac 1 -ar {rate} new.wav",
        )
    limit = getattr(extractor, "n_samples", None)  # of Whisper, which pads to 30 s and cuts what is longer
    if limit is not None and (lengths > limit).any():
        raise DataError(
            f"{(lengths > limit).sum()} records are longer than {limit / rate:g} s, the longest {lengths.max() / rate:.1f} s",
            where=where,
            rule="the feature extractor cuts audio at this length, and targets would contain words without audio",
            fix="divide these records, or leave them out",
        )


def _open_extractor(folder: Path | None) -> Any:
    from transformers import AutoFeatureExtractor

    problem = "there is no feature extractor"
    if folder is not None:
        try:
            return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library raises many types of exceptions
            problem = f"cannot load a feature extractor from {folder}: {' '.join(str(error).split())[:SHOWN]}"
    raise DataError(
        problem,
        where="data.tokenizer",
        rule="a model of audio reads features of the preprocessor_config.json of data.tokenizer or model.path",
        fix="set data.tokenizer to a folder with the preprocessor_config.json, and the tokenizer, of the model",
    )


def features_of(
    folder: Path | None, longest: int | None = None
) -> Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]:
    """Function that makes arguments of a model, such as input_features, of records with `audio`.

    Padding is that of the extractor: of Whisper to 30 s, of others to the longest of the micro-batch. A model without an
    attention mask hears the padding, so its audio is padded to the longest of all records.

    Args:
        folder: folder with the preprocessor_config.json.
        longest: samples of the longest record; None: unknown.
    """
    extractor = _open_extractor(folder)
    known = inspect.signature(type(extractor).__call__).parameters.get("padding")
    padding: dict[str, Any] = {} if known is None else {"padding": known.default or True}
    if padding.get("padding") is True and not getattr(extractor, "return_attention_mask", True) and longest:
        padding = {"padding": "max_length", "max_length": longest}

    def features(records: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        samples = [read_samples(record["audio"]) for record in records]
        return dict(extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt", **padding))

    return features
