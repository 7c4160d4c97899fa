"""TensorBoard event files of a run."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.files import make_folder


class TensorBoardWriter:
    """Writer of TensorBoard event files. Uses tensorboardX without its thread, which dies silently on a full disk."""

    def __init__(self, folder: Path, log: Callable[[str], None]):
        self.folder, self.log, self.has_warned = folder, log, False
        self.writer: Any = None

    def write(self, values: Mapping[str, object], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event  # imported here because only rank 0 needs it
        from tensorboardX.summary import scalar

        try:
            if self.writer is None:
                self._open()
            for name, value in values.items():
                # tensorboardX warns of non-finite values; metrics.jsonl keeps them.
                if isinstance(value, int | float) and math.isfinite(value):
                    self.writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            self.writer.flush()
        except OSError as error:
            if not self.has_warned:
                self.log(
                    f"{self.folder} cannot be written: {error.strerror}; training continues, its curves have a gap"
                )
            self.has_warned = True
            self.close()

    def _open(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        make_folder(self.folder)
        suffix = f".{sum(1 for _ in self.folder.iterdir())}"  # time stamps in file names may collide within a second
        self.writer = EventsWriter(str(self.folder / "events"), suffix)

    def close(self) -> None:
        if self.writer is not None:
            with suppress(OSError):  # from flushing its buffer
                self.writer.close()
            self.writer = None
