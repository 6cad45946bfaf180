"""The tables of docs/choosing.md are what ``suggest`` answers, and their lines can be pasted."""

from __future__ import annotations

import re

import pytest
from docs.choosing import MODELS, PAGE, Case, cases, tables, with_row

from meshfold.cli.arguments import read_parallel
from meshfold.mesh import ParallelSpec

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = {one: line for one in cases() for line in tables(TEXT).get(one.model, []) if line.startswith(one.start)}
CHEAP = Case(model="llama-1b", gpus=1, memory=141)
AGAIN = "python docs/choosing.py writes the page anew"


def answer(row: str) -> tuple[str, float]:
    """Return a row's line and command, and its seconds; 0 if nothing fits."""
    _, _, line, step, *_ = row.split(" | ")
    found = re.match(r"([\d.]+) (ms|s|µs),", step)
    return line, float(found[1]) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[found[2]] if found else 0.0


def check(case: Case) -> None:
    (line, seconds), (today, now) = answer(ROWS[case]), answer(case.row())
    assert line == today, AGAIN
    assert seconds == pytest.approx(now, rel=0.03), AGAIN


def test_every_row_of_the_page_has_a_line_to_paste_and_its_command() -> None:
    assert set(tables(TEXT)) == set(MODELS) and CHEAP in ROWS
    assert sum(map(len, tables(TEXT).values())) == len(ROWS)  # none is unknown
    for case, row in ROWS.items():
        assert f"`{case.command}`" in row
        found = re.search(r"`parallel = (dict\(.*?\))`", row)
        if found is None:
            assert "| none<br>" in row and "fits in" in row
        else:
            assert ParallelSpec.parse(read_parallel([found[1]]), case.gpus).world_size == case.gpus


def test_a_row_of_the_page_is_the_answer_of_today() -> None:
    check(CHEAP)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ROWS if case != CHEAP], ids=lambda case: case.start + case.model)
def test_all_rows_of_the_page_are_the_answers_of_today(case: Case) -> None:
    check(case)


def test_a_row_is_written_in_its_place() -> None:
    first, second = list(cases())[:2]
    page = with_row(with_row(TEXT, second, f"{second.start} b |"), first, f"{first.start} a |")
    rows = tables(page)[first.model]
    assert rows[:2] == [f"{first.start} a |", f"{second.start} b |"]
    assert with_row(page, first, ROWS.get(first, f"{first.start} a |")) != TEXT
    assert tables(page)["llama-70b"] == tables(TEXT)["llama-70b"]
    with pytest.raises(ValueError, match="no '<!-- table: gpt2 -->'"):
        with_row(TEXT, Case(model="gpt2", gpus=1, memory=24), "")
