"""Files of records, decoded once before they are stored, so that no rank meets a damaged image or sound."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from weft.data.audio import audio_size
from weft.data.images import image_size
from weft.errors import DataError, WeftError
from weft.job import Data

WHERE = "_where"
"""Column of stored records with their location: the line of a file, or the number of the record."""
MEASURES = {"image": (image_size, ("height", "width")), "audio": (audio_size, ("sampling_rate", "samples"))}
"""Fields that contain files: function that decodes one, and the columns of its results."""
RULES = {
    "image": "an image is a whole file that Pillow reads, with values of 8 or 16 bits, at a path relative to the records",
    "audio": "audio is a whole file that libsndfile reads, such as WAV, FLAC or MP3, at a path relative to the records "
    "(ffmpeg converts others), or a dictionary with array and sampling_rate",
}
LEFT_OUT = "left_out.txt"
"""File of stored records with a line about those that are left out."""
BATCH = 1024
THREADS = 8  # each may hold the pixels or samples of a long file
SHOWN = 300  # characters of an error message of the library that are shown


def source_of(data: Data) -> str:
    """Source of records, for messages."""
    return f"data.path = {data.path}" if data.path else f"data.source = {data.source}"


def place_of(records: Any, index: int, data: Data) -> str:
    """Location of a stored record, for messages."""
    return f"{records.data.column(WHERE)[index]} of {source_of(data)}"


def decode_files(records: Any, data: Data) -> tuple[Any, str]:
    """Decode the images or the audio of all records, and add columns with their sizes.

    Args:
        records: dataset with the column `WHERE`, and maybe a column `image` or `audio`: paths or contents of files, or arrays.

    Returns:
        The records that can be read, and a line about the others; "" if there are none.

    Raises:
        DataError: with data.bad_files = "refuse", a file is missing, empty, damaged, too large, or of an unknown format; with
            "skip", all of them are.
        JobError: a library that reads files is not installed.
    """
    name = next((field for field in MEASURES if field in records.column_names), None)
    if name is None:
        return records, ""
    records, raw = _as_files(records, name, data)
    found: list[tuple[int, int] | str] = []
    with ThreadPoolExecutor(THREADS) as pool:  # decoders release the interpreter
        for begin in range(0, len(raw), BATCH):
            found += pool.map(partial(_measure, raw, name), range(begin, min(begin + BATCH, len(raw))))
    good = [index for index, size in enumerate(found) if not isinstance(size, str)]
    note = ""
    if bad := [index for index, size in enumerate(found) if isinstance(size, str)]:
        note = f"the {name} of {len(bad)} of {len(found)} records cannot be read, the first: {found[bad[0]]}"
        if data.bad_files == "refuse" or not good:
            raise DataError(
                note,
                where=place_of(records, bad[0], data),
                rule=RULES[name],
                fix='correct the file, or leave the record out; data.bad_files = "skip" leaves out all such records',
            )
        note = f"left out: {note} ({place_of(records, bad[0], data)})"
        records = records.select(good).flatten_indices()
    for column, values in zip(MEASURES[name][1], zip(*(found[index] for index in good), strict=True), strict=False):
        records = records.add_column(column, list(values))
    return records, note


def _as_files(records: Any, name: str, data: Data) -> tuple[Any, Any]:
    """Records with the type of column that is stored, and a column of files that are not decoded."""
    import datasets

    kind = records.features[name]
    if name == "audio" and isinstance(kind, dict) and {"array", "sampling_rate"} <= set(kind):
        return records, records.select_columns([name])
    undecoded = datasets.Image(decode=False) if name == "image" else datasets.Audio(decode=False)
    try:
        if name == "image":
            records = records.cast_column(name, datasets.Image())
        raw = records.cast_column(name, undecoded)
    except Exception as error:  # the library raises many types of exceptions
        raise DataError(
            f"{name} is of the type {kind}: {' '.join(str(error).split())[:SHOWN]}",
            where=source_of(data),
            rule=RULES[name],
            fix=f"write paths or contents of files into the field {name}",
        ) from None
    return records if name == "image" else raw, raw.select_columns([name])


def _measure(raw: Any, name: str, index: int) -> tuple[int, int] | str:
    """Sizes of the file of a record, or why it cannot be read."""
    value = raw[index][name]
    try:
        return MEASURES[name][0](value)
    except WeftError:
        raise
    except Exception as error:  # decoders raise many types of exceptions
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN]
        return f"{value.get('path') or f'its {name}'}: {problem}"
