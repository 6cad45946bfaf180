"""The entry ``axial`` of a spec: its axes, its text, its mistakes."""

from __future__ import annotations

import pytest

from meshfold.mesh import ParallelSpec, SpecError

ENTRIES: list[tuple[object, dict[str, int]]] = [
    (3, {"axial": 3}),
    (dict(size=4), {"axial": 4}),
    (dict(mode="dap", size=4), {"axial": 4}),
    (dict(mode="grid", rows=2, columns=3), {"row": 2, "col": 3}),
    (dict(mode="grid", size=6), {"row": 2, "col": 3}),
    (dict(mode="grid", size=8, depth=2), {"depth": 2, "row": 2, "col": 2}),
    (dict(size=2, memory="60GiB"), {"axial": 2}),
    (dict(mode="grid", size=4, memory=2**30), {"row": 2, "col": 2}),
]


@pytest.mark.parametrize(("entry", "axes"), ENTRIES)
def test_axes_and_text(entry: object, axes: dict[str, int]) -> None:
    spec = ParallelSpec.parse(dict(data=2, pipeline=2, axial=entry, zero=dict(stage=1)))
    assert spec.axes == {"data": 2, "pipe": 2, **axes}
    assert ParallelSpec.parse(spec.to_dict()) == spec
    assert "axial" in spec.describe()
    assert "meshfold-folding" in spec.required_distributions()


MISTAKES: list[tuple[dict[str, object], str]] = [
    (dict(axial="dap"), "axial is a string, not a dict. Write axial=2 or axial=dict"),
    (dict(axial=0), "axial=0 is zero; the minimum is 1"),
    (dict(axial=dict(mode="dap")), "size is missing. Write size=2"),
    (dict(axial=dict(mode="gird", size=4)), "there is no mode 'gird'. Did you mean 'grid'"),
    (dict(axial=dict(mode="dap", size=4, rows=2)), "mode 'dap' takes no rows"),
    (dict(axial=dict(mode="grid", rows=2)), "columns is missing. Write rows=2, columns=2, or size=4"),
    (dict(axial=dict(mode="grid", size=4, rows=2)), "size is rows × columns × depth. Leave size out"),
    (dict(axial=dict(mode="grid", size=6, depth=4)), "depth 4 does not divide size 6. Write depth=1, 2, 3 or 6"),
    (dict(axial=dict(size=2, memory="60 gigs")), "Write memory='60GiB', say; units are"),
    (
        dict(axial=dict(size=2, memory=1.5)),
        "memory=1.5 is a float, neither a whole number of bytes nor a string. Write memory='60GiB'",
    ),
    (dict(axial=2, tensor=2), "works with data, pipeline and zero; there is tensor=2 too. Leave tensor out"),
]


@pytest.mark.parametrize(("spec", "message"), MISTAKES)
def test_mistakes(spec: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as error:
        ParallelSpec.parse(spec)
    assert message in str(error.value)
