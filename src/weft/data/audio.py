"""Audio of records: files that libsndfile decodes and arrays, and their features by the feature extractor of Transformers."""

import inspect
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from weft.errors import DataError
from weft.own_code import import_extra

SHOWN = 200  # characters of an error message of the library that are shown
UNKNOWN_SIZE = 2**32 - 1
"""Bytes of samples in the header of a WAV file that was written into a pipe."""
EXTRA = ("tasks", "task.kind", "audio is read by libsndfile and resampled by soxr")


def audio_size(value: dict[str, Any]) -> tuple[int, int]:
    """Sampling rate and number of samples of a file or an array, all of which is decoded.

    Args:
        value: contents or path of a file, or an array with its sampling rate.

    Raises:
        Exception: libsndfile cannot read the file, in any of its types; or it is shorter than its header says, or has no
            samples, or some that are no finite number (ValueError).
        JobError: soundfile is not installed.
    """
    samples, rate = _decode(value)
    if not samples.size:
        raise ValueError("it has no samples")
    if not np.isfinite(samples).all():
        raise ValueError("it has samples that are no finite number")
    return rate, len(samples)


def _decode(value: dict[str, Any]) -> tuple[np.ndarray, int]:
    """Samples, float32 [samples, channels], and their rate."""
    if "array" in value:
        samples = np.asarray(value["array"])
        if samples.ndim != 1:
            raise ValueError(f"it is an array of {samples.ndim} dims, and audio has one")
        if samples.size and not np.issubdtype(samples.dtype, np.floating):
            raise ValueError(f"it is an array of {samples.dtype}, and samples are floating-point numbers from -1 to 1")
        if value["sampling_rate"] < 1:
            raise ValueError(f"it has sampling_rate = {value['sampling_rate']}")
        return samples.astype(np.float32)[:, None], int(value["sampling_rate"])
    contents = value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    _check_length(contents)
    try:
        import soundfile
    except (ImportError, OSError):  # an installation from before it was part of the extra, or without libsndfile
        return _decode_wav(contents)
    with soundfile.SoundFile(io.BytesIO(contents)) as sound:
        samples = sound.read(dtype="float32", always_2d=True)
        if len(samples) < sound.frames:
            raise ValueError(f"it has {len(samples)} samples, and its header says {sound.frames}")
        return samples, sound.samplerate


def _check_length(contents: bytes) -> None:
    """Refuse a WAV file that is shorter than its header says, which libsndfile takes as it is."""
    begin = 12
    while contents[:4] == b"RIFF" and begin + 8 <= len(contents):
        size, begin = int.from_bytes(contents[begin + 4 : begin + 8], "little"), begin + 8
        if contents[begin - 8 : begin - 4] == b"data":
            if UNKNOWN_SIZE != size > len(contents) - begin:
                raise ValueError(f"it has {len(contents) - begin} bytes of samples, and its header says {size}")
            return
        begin += size + size % 2


def _decode_wav(contents: bytes) -> tuple[np.ndarray, int]:
    if contents[:4] != b"RIFF":
        import_extra("soundfile", *EXTRA)
    rate, samples = import_extra("scipy.io.wavfile", *EXTRA).read(io.BytesIO(contents))
    if samples.dtype == np.uint8:  # unsigned, unlike all other widths
        samples = (samples.astype(np.float32) - 128) / 128
    elif samples.dtype.kind == "i":
        samples = samples / -float(np.iinfo(samples.dtype).min)
    return samples.astype(np.float32).reshape(len(samples), -1), rate


def read_samples(value: dict[str, Any], rate: int | None = None) -> np.ndarray:
    """Samples of a record in [-1, 1], float32 [samples]: the mean of the channels, resampled by soxr.

    Args:
        value: contents or path of a file, or an array with its sampling rate.
        rate: sampling rate of the result; None: that of the record.
    """
    samples, own = _decode(value)
    mono = samples.mean(1, dtype=np.float64).astype(np.float32)
    if rate is None or rate == own:
        return mono
    count = int(_resampled(len(mono), own, rate))
    resampled = import_extra("soxr", *EXTRA).resample(mono, own, rate)[:count]
    return np.pad(resampled, (0, count - len(resampled)))


def _resampled(lengths: Any, own: Any, rate: int) -> Any:
    """Number of samples at another sampling rate, rounded as soxr does."""
    return (2 * lengths * rate + own) // (2 * own)


def _lengths(records: Any, rate: int) -> np.ndarray:
    """Number of samples of each stored record at a sampling rate."""
    own, lengths = (records.data.column(name).to_numpy() for name in ("sampling_rate", "samples"))
    if (own != rate).any():
        import_extra("soxr", *EXTRA)
    return np.asarray(_resampled(lengths, own, rate))


def check_audio(records: Any, folder: Path | None, config: Any, place: Callable[[int], str]) -> None:
    """Check that the audio of all records is neither longer nor shorter than a model reads.

    Args:
        records: stored records.
        folder: folder with the preprocessor_config.json.
        place: location of a record by its index.

    Raises:
        DataError: there is no feature extractor, or a record is too long or too short.
        JobError: records have another sampling rate, and soxr is not installed.
    """
    extractor = _open_extractor(folder)
    rate, shortest = extractor.sampling_rate, _window(extractor, config)
    lengths, limit = _lengths(records, rate), getattr(extractor, "n_samples", None)
    if limit is not None and (lengths > limit).any():  # of Whisper, which pads to 30 s and cuts what is longer
        raise DataError(
            f"{(lengths > limit).sum()} records are longer than {limit / rate:g} s, the longest {lengths.max() / rate:.1f} s",
            where=place(int(lengths.argmax())),
            rule="the feature extractor cuts audio at this length, and targets would contain words without audio",
            fix="divide these records, or leave them out",
        )
    if (lengths < shortest).any():
        raise DataError(
            f"{(lengths < shortest).sum()} records have fewer than {shortest} samples, the shortest {lengths.min()}",
            where=place(int(lengths.argmin())),
            rule=f"the first window of the model is {shortest} samples at {rate} Hz",
            fix="leave these records out",
        )


def _window(extractor: Any, config: Any) -> int:
    """Samples of which a model makes its first feature: by the convolutions of wav2vec2, or a window of the spectrogram."""
    samples = 1
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    if isinstance(kernels, list | tuple) and isinstance(strides, list | tuple):
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=False):
            samples = (samples - 1) * stride + kernel
    return max(samples, getattr(extractor, "n_fft", None) or 1)


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


def features_of(folder: Path | None, records: Any = None) -> Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]:
    """Function that makes arguments of a model, such as input_features, of records with `audio`.

    Padding is that of the extractor: of Whisper to 30 s, of others to the longest of the micro-batch. A model without an
    attention mask hears the padding, so its audio is padded to the longest of all records.

    Args:
        folder: folder with the preprocessor_config.json.
        records: all stored records; None: unknown.
    """
    extractor = _open_extractor(folder)
    rate = extractor.sampling_rate
    known = inspect.signature(type(extractor).__call__).parameters.get("padding")
    padding: dict[str, Any] = {} if known is None else {"padding": known.default or True}
    if padding.get("padding") is True and not getattr(extractor, "return_attention_mask", True) and records is not None:
        padding = {"padding": "max_length", "max_length": int(_lengths(records, rate).max())}

    def features(records: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        samples = [read_samples(record["audio"], rate) for record in records]
        return dict(extractor(samples, sampling_rate=rate, return_tensors="pt", **padding))

    return features
