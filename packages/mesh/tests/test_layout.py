"""Layouts: the small language and what it refuses."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.mesh import Layout, LayoutError

# Not from_regex: it makes a table of all characters of Unicode first, for five seconds in a fresh checkout.
_REST = st.text(string.ascii_letters + string.digits + "_", max_size=5)
names = st.tuples(st.sampled_from(string.ascii_letters), _REST).map("".join)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dims = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    axes = draw(st.lists(names, max_size=6, unique=True))
    owners = [draw(st.sampled_from([*dims, None])) for _ in axes]
    return Layout({dim: tuple(a for a, o in zip(axes, owners, strict=True) if o == dim) for dim in dims})


def test_an_example() -> None:
    layout = Layout.parse("m:data,row k:col n")
    assert dict(layout) == {"m": ("data", "row"), "k": ("col",), "n": ()}
    assert layout["m"] == ("data", "row") and "k" in layout and "j" not in layout
    assert list(layout) == ["m", "k", "n"] and len(layout) == 3
    assert layout.axes == ("data", "row", "col")
    assert str(layout) == "m:data,row k:col n" and repr(layout) == "Layout('m:data,row k:col n')"


@given(layouts())
def test_text_goes_round(layout: Layout) -> None:
    again = Layout.parse(str(layout))
    assert again == layout and hash(again) == hash(layout) and list(again) == list(layout)


def test_order_matters() -> None:
    assert Layout.parse("k:a,b") != Layout.parse("k:b,a")
    assert Layout.parse("m k") != Layout.parse("k m")
    assert Layout.parse("m k") != {"m": (), "k": ()}


def test_parsing_is_cached_and_takes_layouts() -> None:
    assert Layout.parse("m:a k") is Layout.parse("m:a k")
    layout = Layout({"m": ("a",)})
    assert Layout.parse(layout) is layout


def test_spaces_do_not_matter_between_dims() -> None:
    assert Layout.parse("  m:a   k ") == Layout.parse("m:a k")


def test_factors_of_axes_are_axes() -> None:
    assert Layout.parse("n:tensor/2,tensor%4")["n"] == ("tensor/2", "tensor%4")


def test_replace() -> None:
    layout = Layout.parse("m:data k:col")
    assert str(layout.replace(k=("row", "col"))) == "m:data k:row,col" and str(layout) == "m:data k:col"
    with pytest.raises(LayoutError, match="has no dim 'n', only m, k"):
        layout.replace(n=("row",))
    with pytest.raises(LayoutError, match="axis 'data' appears twice"):
        layout.replace(k=("data",))


def test_a_dim_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="layout 'm k' has no dim 'n', only m, k"):
        Layout.parse("m k")["n"]


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "an empty layout: name the dims of the tensor, as in 'm:data k'"),
        ("   ", "an empty layout"),
        ("m:a k:a", "axis 'a' appears twice in layout 'm:a k:a' (in dim 'm' and in dim 'k')"),
        ("m:a,a", "axis 'a' appears twice"),
        ("m m", "dim 'm' appears twice in layout 'm m': give each dim its own name"),
        ("1m", "'1m' in layout '1m' is not a name of a dim"),
        ("m:", "is not a name of a mesh axis: write 'm:axis' or 'm:major,minor'"),
        ("m: a", "without spaces around ':' and ','"),
        ("m:a, b", "'' in 'm:a,' of layout 'm:a, b' is not a name of a mesh axis"),
        ("m:a,,b", "'' in 'm:a,,b'"),
        ("m:a:b", "'a:b' in 'm:a:b'"),
        ("m:a/0", "'a/0' in 'm:a/0'"),
        ("m:a-b", "'a-b'"),
        (":a", "'' in layout ':a' is not a name of a dim"),
        ("(m k)", "'(m' in layout '(m k)'"),
        (3, "a layout is a string such as 'm:data,row k:col', not 3"),
        (None, "not None"),
    ],
)
def test_what_is_not_a_layout(text: object, fragment: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)  # type: ignore[arg-type]
    assert fragment in str(caught.value)
