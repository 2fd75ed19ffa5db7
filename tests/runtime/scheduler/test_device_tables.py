"""Transfers to the device in one piece: changes of the tables, and the inputs of a decode step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.scheduler.forward import DecodeInputs, DeviceTables, OnDevice
from treeline_runtime.scheduler.graphs import sizes_up_to
from treeline_runtime.scheduler.plan import StepPlan, Writes
from treeline_runtime.scheduler.table import TableManager


def tables_of_a_device() -> tuple[TableManager, DeviceTables]:
    """Return tables whose device side is a copy, as on CUDA."""
    there = DeviceTables(4, 64, 4, torch.device("cpu"), scratch_page=99)
    there.page_table = there.page_table.clone()
    there._mirrored = True
    return TableManager(4, 64, 4), there


def tell(table: TableManager, there: DeviceTables) -> None:
    tokens, pages, _ = table.news()
    there.write(StepPlan([], [], [], tokens=tokens, pages=pages))
    table.told()


def test_writes_reach_the_device_with_the_next_plan() -> None:
    table, there = tables_of_a_device()
    row = table.alloc([5, 6, 7])
    table.write_pages(row, 0, np.array([8, 9]))
    tell(table, there)
    assert there.token_pool[row, :4].tolist() == [5, 6, 7, 0]
    assert there.page_table[row, :3].tolist() == [8, 9, 0]
    assert table.news() == (Writes(), Writes(), {})


def test_the_later_of_two_owners_of_a_row_counts() -> None:
    table, there = tables_of_a_device()
    first = table.alloc([1, 2, 3])
    table.write_pages(first, 0, np.array([1, 2]))
    table.free(first)
    second = table.alloc([4, 5])
    assert first == second
    table.write_pages(second, 0, np.array([3]))
    table.write_pages(second, 0, np.array([7]))
    tell(table, there)
    assert there.token_pool[second, :2].tolist() == [4, 5]
    assert there.page_table[second, 0] == 7


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(1, 4)), max_size=20))
def test_after_a_plan_all_page_tables_are_equal(writes: list[tuple[int, int, int]]) -> None:
    table, there = tables_of_a_device()
    for number, (row, start, count) in enumerate(writes):
        table.write_pages(row, start, np.arange(count) + 10 * number)
        if number % 7 == 6:
            tell(table, there)
    tell(table, there)
    assert there.page_table[:4].equal(torch.from_numpy(table.pages))
    assert (there.on_host([]).pages == there.page_table.numpy()).all()


def test_rows_with_other_first_pages_have_a_new_version() -> None:
    table, there = tables_of_a_device()
    row = table.alloc([1])
    versions = []
    for start in (0, 1, 2, 0):
        table.write_pages(row, start, np.array([start]))
        tell(table, there)
        versions.append(there.on_host([row]).version)
    assert versions == [1, 1, 1, 2]


def test_the_scratch_row_has_scratch_pages() -> None:
    table, there = tables_of_a_device()
    assert (there.page_table[there.scratch_row] == 99).all()
    assert there.scratch_row not in [table.alloc([1]) for _ in range(4)]


def test_inputs_keep_their_order_and_padding_is_greedy() -> None:
    keys = np.array([[1, -2], [3, -4]], dtype=np.int32)
    inputs = DecodeInputs([3, 0], [17, 5], [3, 7], [0.0, 0.75], keys)
    found = OnDevice.of(torch.from_numpy(inputs.packed(4, 9)))
    assert found.rows.tolist() == [3, 0, 9, 9]
    assert found.positions.tolist() == [17, 5, 0, 0]
    assert found.targets.tolist() == [3, 7, 9, 9]
    assert found.temperatures.tolist() == [0.0, 0.75, 0.0, 0.0]
    assert found.keys.tolist() == [[1, -2], [3, -4], [0, 0], [0, 0]]


@given(st.integers(0, 600))
def test_captured_sizes_reach_the_largest_and_waste_little(largest: int) -> None:
    sizes = sizes_up_to(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1:] == ([largest] if largest else [])
    for n in range(1, largest + 1):
        taken = next(size for size in sizes if size >= n)
        assert taken - n < 8
