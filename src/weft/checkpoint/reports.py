"""Reports of the ranks about the files that they have written, for the ranks that write the manifest.

    reports = Reports(store, prefix, rank, world_size)
    reports.describe(table)                      # when what the rank writes has changed
    reports.send(index, file=..., host=...)      # on every rank, from its writing thread
    found, merged = reports.collect(index)       # on a rank that writes a manifest

A report is a few hundred bytes. The table of what a rank writes is sent only when it has changed; the ranks of a pipeline stage
have the names of its tensors in common, which are sent once. A counter tells when all reports are there.
"""

import json
import time
from typing import Any

import numpy as np
import torch.distributed as dist

from weft.checkpoint.layouts import Merged, RankTable, digest_of, merge_tables

POLL_SECONDS = 0.02
TIMEOUT_SECONDS = 1800.0  # for the slowest writer
KEYS_PER_REQUEST = 256


class Reports:
    """Reports of one writer of checkpoints per rank, through a store.

    Args:
        store: store that all ranks share.
        prefix: prefix of its keys, unique to the writers.
        rank, world_size: this rank, and the number of ranks.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, world_size: int):
        self.store, self.prefix, self.rank, self.world_size = store, prefix, rank, world_size
        self.own = self.sent = RankTable("[]", [], np.zeros(0, np.int32), []).dump()
        self.names = "[]"
        self.known: dict[int, tuple[str, RankTable]] = {}
        self.names_of = {digest_of("[]"): "[]"}
        self.merged: Merged | None = None

    def describe(self, table: RankTable) -> None:
        """Set what this rank writes from its next report on."""
        self.own, self.names = table.dump(), table.names

    def send(self, index: int, **report: Any) -> None:
        """Report to the ranks that write a manifest.

        Args:
            index: number of the checkpoint; a rank reports once about each.
            report: values for JSON. With "problem", the checkpoint is given up.

        Raises:
            RuntimeError: the store is gone.
        """
        if self.own != self.sent:
            names = f"{self.prefix}/names/{digest_of(self.names)}"
            if not self.store.check([names]):
                self.store.set(names, self.names)
            self.store.set(f"{self.prefix}/table/{self.rank}", self.own)
            self.sent = self.own
        if self.rank == 0:
            self.store.delete_key(self._counter(index - 1))  # all ranks have ended the checkpoint before
        text = json.dumps({"index": index, "table": digest_of(self.own), **report})
        self.store.set(f"{self.prefix}/{self.rank}", text)
        self.store.add(self._counter(index), 1)

    def collect(self, index: int) -> tuple[list[dict[str, Any]], Merged]:
        """Wait for the reports of all ranks about a checkpoint.

        Returns:
            Reports by rank, and what the ranks write.

        Raises:
            OSError: a rank reports a problem, or does not report in time.
            ValueError: a report is invalid.
        """
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.store.add(self._counter(index), 0) < self.world_size:  # a wait of torch's store would hold the GIL
            if time.monotonic() > deadline:
                raise OSError(f"rank {self._missing(index)} has not written its file within {TIMEOUT_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        reports = [json.loads(text) for text in self._read([str(rank) for rank in range(self.world_size)])]
        problems = [report["problem"] for report in reports if "problem" in report]
        problems += [f"rank {n} reports another checkpoint" for n, each in enumerate(reports) if each["index"] != index]
        if problems:
            raise OSError(problems[0])
        changed = [n for n, report in enumerate(reports) if n not in self.known or report["table"] != self.known[n][0]]
        if changed or self.merged is None:
            self._read_tables(changed, reports)
            self.merged = merge_tables([self.known[rank][1] for rank in range(self.world_size)])
        return reports, self.merged

    def _read_tables(self, ranks: list[int], reports: list[dict[str, Any]]) -> None:
        texts = self._read([f"table/{rank}" for rank in ranks])
        if different := [n for n, text in zip(ranks, texts, strict=True) if digest_of(text) != reports[n]["table"]]:
            raise OSError(f"rank {different[0]} has sent another table than it reports")
        digests = {text: json.loads(text)[0] for text in texts}
        unknown = sorted(set(digests.values()) - self.names_of.keys())
        self.names_of |= zip(unknown, self._read([f"names/{digest}" for digest in unknown]), strict=True)
        for rank, text in zip(ranks, texts, strict=True):
            self.known[rank] = reports[rank]["table"], RankTable.parse(text, self.names_of[digests[text]])

    def _read(self, keys: list[str]) -> list[str]:
        """Values of keys that the ranks have set before their reports."""
        values: list[bytes] = []
        for start in range(0, len(keys), KEYS_PER_REQUEST):
            chosen = [f"{self.prefix}/{key}" for key in keys[start : start + KEYS_PER_REQUEST]]
            if not self.store.check(chosen):  # a read would wait for it
                raise OSError("a rank reports a table that it has not sent")
            values += self.store.multi_get(chosen)
        return [value.decode() for value in values]

    def _missing(self, index: int) -> int:
        """First rank that has not reported about a checkpoint."""
        for rank in range(self.world_size):
            key = f"{self.prefix}/{rank}"
            if not self.store.check([key]) or json.loads(self.store.get(key))["index"] != index:
                return rank
        return 0

    def _counter(self, index: int) -> str:
        return f"{self.prefix}/{index}/count"
