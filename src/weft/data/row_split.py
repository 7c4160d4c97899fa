"""Split of the rows of a global batch over data ranks, in equal or unequal shares, and over micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.job import ResolvedJob


@dataclass(frozen=True)
class RowSplit:
    """Split of the rows of a global batch over data ranks and micro-batches."""

    global_batch: int
    """Rows per step over all data ranks."""
    micro_batch: int
    """Maximum rows per micro-batch."""
    data_ranks: int
    rows_per_rank: tuple[int, ...] = ()
    """Rows of each data rank; empty: equal numbers of rows."""

    @classmethod
    def of_job(cls, job: ResolvedJob) -> "RowSplit":
        """Split of a job; with `rebalance`, equal shares are numbers of rows that can change."""
        train, parallel = job.train, job.plan.parallel
        rows = parallel.rows_per_rank
        if parallel.rebalance == "auto" and not rows:
            rows = proportional(train.global_batch_size, [1.0] * parallel.data_ranks)
        return cls(train.global_batch_size, train.micro_batch_size, parallel.data_ranks, rows)

    def share(self, data_rank: int) -> range:
        """Rows of a data rank, as indices in the global batch; contiguous, in the order of data ranks."""
        if self.rows_per_rank:
            low = sum(self.rows_per_rank[:data_rank])
            return range(low, low + self.rows_per_rank[data_rank])
        return range(
            data_rank * self.global_batch // self.data_ranks, (data_rank + 1) * self.global_batch // self.data_ranks
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step, the same on every data rank, because collectives of ZeRO must match in number."""
        return -(-self._most // self.micro_batch)

    def sizes(self, data_rank: int) -> list[int]:
        """Rows of each micro-batch of a data rank, including padding rows.

        Equal shares are padded to the largest one, and only the last micro-batch is smaller. Unequal shares are divided evenly
        over the micro-batches, so that all ranks need about the same time for each of them: with ZeRO 3, they wait for each
        other in every micro-batch.
        """
        if self.rows_per_rank:
            rows, count = self.rows_per_rank[data_rank], self.num_micro_batches
            return [rows // count + (index < rows % count) for index in range(count)]
        return [min(self.micro_batch, self._most - begin) for begin in range(0, self._most, self.micro_batch)]

    @property
    def _most(self) -> int:
        """Rows of the data rank with the most rows, including padding rows."""
        return max(self.rows_per_rank, default=-(-self.global_batch // self.data_ranks))

    def balanced(self, data_rank: int, costs: Sequence[float]) -> list[tuple[list[int], int]]:
        """Micro-batches as `micro_batches`, of rows of unequal cost: each has about the same cost on all data ranks.

        The rows are divided in descending order of cost, so that rows of a micro-batch need little padding. Each goes to the
        data rank with the lowest cost per row of its micro-batch: ranks with more rows get more costs.

        Args:
            data_rank: index of the data rank.
            costs: cost of each row of the global batch.
        """
        order, found = sorted(range(len(costs)), key=lambda row: -costs[row]), []
        for parts in zip(*(self.micro_batches(rank) for rank in range(self.data_ranks)), strict=True):
            rooms: list[int] = [len(rows) for rows, _ in parts]
            chosen: list[list[int]] = [[] for _ in parts]
            loads = [0.0] * len(parts)
            for row in order[: sum(rooms)]:
                free = [rank for rank, room in enumerate(rooms) if len(chosen[rank]) < room]
                rank = min(free, key=lambda rank: loads[rank] / rooms[rank])
                chosen[rank].append(row)
                loads[rank] += costs[row]
            order = order[sum(rooms) :]
            found.append((chosen[data_rank], parts[data_rank][1]))
        return found

    def micro_batches(self, data_rank: int) -> list[tuple[range, int]]:
        """Rows of each micro-batch, as indices in the global batch; and their number including padding rows."""
        share, sizes = self.share(data_rank), self.sizes(data_rank)
        begins = [share.start + sum(sizes[:index]) for index in range(len(sizes))]
        return [
            (range(min(begin, share.stop), min(begin + size, share.stop)), size)
            for begin, size in zip(begins, sizes, strict=True)
        ]


def proportional(total: int, weights: Sequence[float], least: int = 1) -> tuple[int, ...]:
    """Divide `total` into whole numbers in proportion to weights, such that the largest number / weight is minimal.

    Args:
        total: number to divide; at least `least` for each weight.
        weights: positive weights, such as speeds.
        least: smallest number.
    """
    parts = [least] * len(weights)
    for _ in range(total - least * len(weights)):
        least = min(range(len(weights)), key=lambda index: ((parts[index] + 1) / weights[index], index))
        parts[least] += 1
    return tuple(parts)
