"""What stays gathered between two uses: as much as is allowed, and of that what is wanted first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshfold.zero_gemini.runtime.gather_cache import GatherCache


@dataclass(eq=False)
class Sized:
    """Stands for a chunk."""

    name: str
    gathered_bytes: int = 10


def cache(most: int, *steps: str, **sizes: int) -> tuple[GatherCache, dict[str, Any]]:
    """Of a step that wanted these chunks, a letter each, at its places."""
    chunks: dict[str, Any] = {name: Sized(name, sizes.get(name, 10)) for name in sorted(set("".join(steps)))}
    made = GatherCache()
    made.most_bytes = most
    made.learn([[chunks[name] for name in step] for step in steps])
    return made, chunks


def evicted(made: GatherCache, chunks: dict[str, Any], names: str, place: int) -> str:
    return "".join(chunk.name for chunk in made.evicted([chunks[name] for name in names], place))


def test_what_is_wanted_last_goes_first() -> None:
    made, chunks = cache(20, "a", "b", "c", "c", "b", "a")
    assert evicted(made, chunks, "abc", 3) == "a"
    assert evicted(made, chunks, "abc", 4) == "c"  # never again in this step
    assert evicted(made, chunks, "abc", 6) == "abc"


def test_nothing_stays_where_there_is_no_room() -> None:
    assert evicted(*cache(0, "a", "a"), "a", 1) == "a"
    assert evicted(*cache(9, "a", "a"), "a", 1) == "a"
    assert evicted(*cache(10, "a", "a"), "a", 1) == ""


def test_sizes_count() -> None:
    made, chunks = cache(25, "ab", "b", "a", b=20)
    assert evicted(made, chunks, "ab", 1) == "a"


@given(
    st.lists(st.sampled_from(["a", "b", "c", "ab", "bc"]), min_size=1, max_size=12),
    st.integers(0, 40),
    st.data(),
)
def test_never_more_than_allowed_and_never_what_comes_later_first(
    steps: list[str], most: int, data: st.DataObject
) -> None:
    made, chunks = cache(most, *steps, a=7, b=11, c=13)
    place = data.draw(st.integers(0, len(steps)))
    names = "".join(chunks)
    gone = evicted(made, chunks, names, place)
    stays = [name for name in names if name not in gone]
    assert sum(chunks[name].gathered_bytes for name in stays) <= most
    following = {name: [at for at, step in enumerate(steps) if at >= place and name in step] for name in names}
    assert all(following[name] for name in stays)
    for name in gone:
        assert all(following[kept][0] <= following[name][0] for kept in stays if following[name])
