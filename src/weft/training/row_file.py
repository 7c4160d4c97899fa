"""File of rows of a run, which must not change while ranks read it."""

from pathlib import Path

from weft.comm.objects import run_together
from weft.data.prepare import check_rows
from weft.training.session import Session


class RowFile:
    """File of rows of a job with source "tokens"; of other sources, ranks read the cache."""

    def __init__(self, session: Session):
        self.session = session
        self.known: tuple[int, ...] = ()
        """Identity and times of the file when its content was last compared."""

    def check(self) -> None:
        """Refuse a file that was rewritten since the run was prepared. Collective; reads a file only if it was written.

        Raises:
            DataError: the file has changed.
        """
        if self.session.job.data.source == "tokens":
            run_together(self._compare if self.session.rank == 0 else lambda: None)

    def _compare(self) -> None:
        data = self.session.job.data
        status = Path(data.path or "").expanduser().stat()
        state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        if state != self.known:
            check_rows(data, self.session.prepared.digest)
            self.known = state
