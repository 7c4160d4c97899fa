"""Layouts of checkpoints: runs of numbers, tables of ranks, and manifests of version 2."""

import numpy as np
import pytest

from weft.checkpoint.layouts import Layout, Parts, RankTable, from_runs, merge_tables, to_runs


@pytest.mark.parametrize("seed", range(20))
def test_runs_give_back_their_numbers(seed: int) -> None:
    random = np.random.default_rng(seed)
    pieces = [random.integers(50) + random.integers(0, 4) * np.arange(random.integers(1, 6)) for _ in range(seed)]
    numbers = np.concatenate([np.zeros(0, np.int64), *pieces])
    assert from_runs(to_runs(numbers)).tolist() == numbers.tolist()


def test_regular_numbers_take_one_run() -> None:
    assert to_runs(np.arange(7, 7 + 8 * 10_240, 8)) == ((7, 8, 10_240),)
    assert len(to_runs(np.concatenate([np.arange(5), np.arange(5)]))) == 2


@pytest.mark.parametrize("run", [(0, 1, 2**40), (2**62, 0, 1), (5, -3, 3), (0, 2**61, 4)])
def test_runs_that_no_checkpoint_has_are_refused_before_memory_is_taken(run: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="refused"):
        from_runs([run])


def random_tables(seed: int) -> tuple[list[RankTable], dict[str, set[tuple[int, tuple[int, ...], tuple[int, ...]]]]]:
    """Tables of six ranks in two stages, and the parts of each tensor."""
    random = np.random.default_rng(seed)
    expected: dict[str, set[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
    tables = []
    for rank in range(6):
        stage = rank // 3
        held = [(f"weights/{stage}.{n}", "F32", (12, 4)) for n in range(5)]
        held += [("weights/tied", "BF16", (12, 4)), (f"step/{stage}", "F32", ())]
        written: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for name, _, shape in held:
            for _ in range(random.integers(3)):
                offset = tuple(int(random.integers(size)) for size in shape)
                size = tuple(int(random.integers(1, 3)) for _ in shape)
                written.setdefault(name, []).append((offset, size))
                expected.setdefault(name, set()).add((rank, offset, size))
        tables.append(RankTable.of(held, written, [(f"rng/{rank}", "U8", (16,))]))
    return tables, expected


@pytest.mark.parametrize("seed", range(10))
def test_tables_of_ranks_merge_into_their_parts(seed: int) -> None:
    tables, expected = random_tables(seed)
    merged = merge_tables([RankTable.parse(table.dump(), table.names) for table in tables])
    assert merged.own == {f"rng/{rank}": ("U8", (16,), rank) for rank in range(6)}
    assert [merged.tensors[name].shape for name in ("step/0", "step/1", "weights/tied")] == [(), (), (12, 4)]
    for name, entry in merged.tensors.items():
        files, offsets, shapes = Layout.model_validate_json(merged.layouts[entry.layout].model_dump_json()).parts()
        found = zip(files.tolist(), map(tuple, offsets.tolist()), map(tuple, shapes.tolist()), strict=True)
        assert set(found) == expected.get(name, set())


def test_tensors_with_the_same_slices_have_one_layout() -> None:
    held = [(f"weights/{n}", "F32", (64, 8)) for n in range(100)]
    tables = [RankTable.of(held, {name: [((8 * rank, 0), (8, 8))] for name, _, _ in held}, []) for rank in range(8)]
    merged = merge_tables(tables)
    assert len(merged.layouts) == 1
    assert merged.layouts[0].files == ((0, 1, 8),)
    assert {entry.layout for entry in merged.tensors.values()} == {0}


def test_a_layout_with_missing_numbers_is_refused() -> None:
    parts = Parts(np.arange(4), np.zeros((4, 2), np.int64), np.ones((4, 2), np.int64))
    layout = Layout.of(parts)
    with pytest.raises(ValueError, match="other numbers"):
        layout.model_copy(update={"files": ((0, 1, 3),)}).parts()
    with pytest.raises(ValueError, match="other numbers"):
        layout.model_copy(update={"shapes": layout.shapes[:1]}).parts()
