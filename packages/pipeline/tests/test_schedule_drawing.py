"""The picture shows every action where and when it runs, in SVG and PNG alike."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from schedule_cases import NAMED, named

from meshfold.mesh import MeshfoldError
from meshfold.pipeline import draw, schedule, simulate
from meshfold.pipeline.scheduling.drawing import Rectangle, figure, scene, svg, title

_ACTION = re.compile(r"\d+(F|BW|B|W)\d+")


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_every_action_is_a_box_in_its_rank_and_time(name: str, options: dict[str, int]) -> None:
    result = simulate(named(name, 4, 6, options), 1, 1.3, 0.7, 0.2)
    shapes = [shape for shape in scene(result).shapes if isinstance(shape, Rectangle)]
    rows = {shape.name: shape for shape in shapes if shape.name.startswith("rank")}
    boxes = {shape.name: shape for shape in shapes if _ACTION.fullmatch(shape.name)}
    assert len(boxes) == sum(map(len, result.schedule.ranks))
    left, whole = rows["rank 0"].x, rows["rank 0"].width
    for timed in result.ranks:
        for one in timed:
            box, row = boxes[str(one.action)], rows[f"rank {one.rank}"]
            assert row.y - 1e-9 <= box.y
            assert box.y + box.height <= row.y + row.height + 1e-9
            begin, end = one.start / result.makespan, one.end / result.makespan
            assert box.x == pytest.approx(left + begin * whole)
            assert left + end * whole - 1.01 <= box.x + box.width <= left + end * whole


def test_operations_micro_batches_and_stages_are_told_apart() -> None:
    boxes = {
        shape.name: shape
        for shape in scene(simulate(schedule("dualpipe-v", ranks=2, microbatches=8))).shapes
        if isinstance(shape, Rectangle)
    }
    assert len({boxes[name].fill for name in ("0F7", "0B7", "0W7")}) == 3
    assert len({boxes[f"0F{i}"].fill for i in range(8)}) == 8
    assert boxes["0F0"].y < boxes["3F0"].y
    many = scene(simulate(schedule("gpipe", ranks=2, microbatches=40))).shapes
    fills = {shape.fill for shape in many if isinstance(shape, Rectangle) and re.fullmatch(r"0F\d+", shape.name)}
    assert len(fills) == 40


def test_svg_is_whole_and_says_what_it_shows() -> None:
    result = simulate(schedule("zb-h2", ranks=4, microbatches=8))
    text = svg(result)
    root = ElementTree.fromstring(text.encode())
    found = root.find(".//{http://purl.org/dc/elements/1.1/}description")
    assert found is not None
    assert found.text == scene(result).words
    assert str(result.schedule) in str(found.text)
    assert title(result) == (
        "zb-h2, 8 micro-batches: bubble 11.1% with a barrier after the step, 0.0% in the longest span of a rank"
    )
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert title(result) in words
    assert {"time", "0", "20", "rank 3", "F: forward", "W: gradient of the weights"} <= set(words)
    assert "BW: both gradients" not in words
    assert svg(result) == text
    assert result._repr_svg_() == text  # what a notebook shows


def test_both_kinds_of_file_hold_the_same_boxes(tmp_path: Path) -> None:
    result = simulate(schedule("hanayo", ranks=2, microbatches=3), send=0.1)
    drawn = figure(result).axes[0]
    want = [shape for shape in scene(result).shapes if isinstance(shape, Rectangle)]
    have = [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in drawn.patches]
    assert have == [(shape.x, shape.y, shape.width, shape.height) for shape in want]
    assert draw(result, tmp_path / "a.svg").read_text() == svg(result)
    png = draw(result, tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert draw(result, tmp_path / "b.png").read_bytes() == png
    assert draw(result, tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["schedule", "schedule.txt"])
def test_an_ending_that_is_no_pictures_is_refused(name: str, tmp_path: Path) -> None:
    result = simulate(schedule("gpipe", ranks=2, microbatches=2))
    with pytest.raises(MeshfoldError, match=rf"'{name}': give a name that ends in one of .*\.png.*\.svg"):
        draw(result, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
