"""Tables of pages: only what is new is filled in, and rows that end have the spare page again."""

from __future__ import annotations

import torch

from meshfold.kernels import PageTables


def test_tables_have_the_pages_of_their_rows() -> None:
    tables = PageTables(3, 4, 9, torch.device("cpu"))
    one, two = [5], [1, 2]
    tables.fill([one, two], [0, 2])
    assert tables.on_device.tolist() == [[5, 9, 9, 9], [9] * 4, [1, 2, 9, 9]]
    one += [6, 7, 8, 3]  # the table has no room for the last one
    tables.fill([one, two], [0, 2])
    assert tables.on_device.tolist() == [[5, 6, 7, 8], [9] * 4, [1, 2, 9, 9]]
    tables.fill([[4], two], [0, 1])  # another sequence in row 0, and row 2 has ended
    assert tables.on_device.tolist() == [[4, 9, 9, 9], [1, 2, 9, 9], [9] * 4]
    before = tables.on_device.clone()
    tables.fill([[4], two], [0, 1])
    assert torch.equal(tables.on_device, before)
