"""Figures by number of ranks, for `scale.py`."""

import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any


class Figures:
    """Figures of a part by number of ranks."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, float]] = {}

    def add(self, name: str, ranks: int, value: float) -> None:
        """Record a figure."""
        self.rows.setdefault(name, {})[ranks] = value

    def time(self, name: str, ranks: int, call: Callable[[], Any], memory: bool = False) -> Any:
        """Call a function, record its seconds of CPU, and with `memory` the peak of what it allocates in a second call."""
        begin = time.process_time()
        value = call()
        self.add(f"{name}: s", ranks, time.process_time() - begin)
        if memory:
            tracemalloc.start()
            call()
            self.add(f"{name}: peak MB", ranks, tracemalloc.get_traced_memory()[1] / 1e6)
            tracemalloc.stop()
        return value

    def print(self, title: str) -> None:
        """Print a table with the exponent of growth between the two largest numbers of ranks."""
        columns = sorted({ranks for row in self.rows.values() for ranks in row})
        print(f"{title:46}" + "".join(f"{ranks:>10,}" for ranks in columns) + "   grows as")
        for name, row in self.rows.items():
            texts = "".join(f"{row[ranks]:>10.3g}" if ranks in row else f"{'':>10}" for ranks in columns)
            known = [ranks for ranks in columns if row.get(ranks)][-2:]
            grows = ""
            if len(known) == 2:
                grows = f"ranks^{math.log(row[known[1]] / row[known[0]]) / math.log(known[1] / known[0]):.1f}"
            print(f"  {name:44}{texts}   {grows}")
