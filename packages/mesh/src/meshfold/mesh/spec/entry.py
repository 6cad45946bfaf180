"""One entry of a spec as the user wrote it, and the checks that every entry shares.

A check returns a value of the promised type, or raises a SpecError. The error quotes the whole entry (``tensor=dict(mode='2d',
size=6)``), names the mistake, and says what to write instead. The arithmetic at the end finds sizes that would work.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex

from meshfold.mesh.errors import SpecError, did_you_mean
from meshfold.mesh.spec.text import UNITS, parse_bytes

_LONGEST_QUOTE = 300  # characters; messages cut longer values, such as a module

# Names used by other libraries that a spelling check would not find.
_SYNONYMS = {
    "ddp": "data",
    "dp": "data",
    "data_parallel_size": "data",
    "pp": "pipeline",
    "tp": "tensor",
    "model": "tensor",
    "cp": "sequence",
    "context": "sequence",
    "seq": "sequence",
    "sp": "sequence",
    "ep": "expert",
    "experts": "expert",
    "moe": "expert",
    "fsdp": "zero",
    "gemini": "zero",
    "level": "stage",
    "degree": "size",
    "gpus": "size",
    "ranks": "size",
    "stages": "size",
    "world_size": "size",
    "model_chunks": "chunks",
    "num_model_chunks": "chunks",
    "shape": "grid",
    "tensor_placement_policy": "placement",
    "nvme_offload_dir": "offload_path",
    "gpu": "cuda",
    "device": "cuda",
    "host": "cpu",
    "megatron-sp": "megatron",
    "usp": "ring_ulysses",
    "vp": "interleaved",
    "zbh1": "zb-h1",
    "zbh2": "zb-h2",
    "zbv": "zb-v",
    "summa": "stream",
}


def format_value(value: object) -> str:
    """Return the value as a user would write it: dicts as ``dict(size=2)``, everything else by repr."""
    if isinstance(value, dict) and all(
        isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key) for key in value
    ):
        text = "dict(" + ", ".join(f"{key}={format_value(item)}" for key, item in value.items()) + ")"
    else:
        try:
            text = repr(value)
        except Exception:  # a broken __repr__ must not hide the real mistake
            text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."


def kind(value: object) -> str:
    """Return the type in plain words, with its article: ``a string``, ``a bool``, ``None``."""
    if value is None:
        return "None"
    name = "string" if isinstance(value, str) else type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def join_choices(words: Iterable[object], last: str = "or") -> str:
    """Return the values as text: ``1, 2 or 4``."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def suggest(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'tensor'?`` by spelling or by what other libraries call it; may be empty."""
    names = list(known)
    synonym = _SYNONYMS.get(word.casefold())
    return f" Did you mean {synonym!r}?" if synonym in names else did_you_mean(word, names)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """``name=value`` of a spec. ``fields`` is the value where it is a dict, with its keys checked."""

    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.name}={format_value(self.value)}"

    def error(self, problem: str, change: str) -> SpecError:
        """Return the error to raise: the entry, the mistake, and the change to make, the last two as whole sentences."""
        quoted = "" if problem.startswith(str(self)) else f"{self}: "
        return SpecError(f"{quoted}{problem} {change}")

    def fields(self, known: tuple[str, ...], example: str) -> Mapping[str, object]:
        """Return the value as a dict that has known keys only; ``example`` is shown where it is not a dict."""
        if not isinstance(self.value, dict):
            raise self.error(f"{self.name} is {kind(self.value)}, not a dict.", f"Write {example}.")
        keys = f"Known keys: {', '.join(known)}."
        for key in self.value:
            if not isinstance(key, str):
                raise self.error(f"the key {format_value(key)} is {kind(key)}, not a name.", keys)
            if key not in known:
                raise self.error(f"{self.name} has no key {key!r}.{suggest(key, known)}", keys)
        return self.value

    def bytes(self, key: str, value: object, example: str) -> int:
        """Parse a number of bytes: a whole number, or a string such as ``24GiB``. ``example``: what a message says to write."""
        if not isinstance(value, str):
            if isinstance(value, bool) or not isinstance(value, int):
                problem = f"{key}={format_value(value)} is {kind(value)}, neither a whole number of bytes nor a string."
                raise self.error(problem, f"Write {key}={example!r}, say.")
            return self.count(key, value, parse_bytes(example))
        try:
            return parse_bytes(value)
        except ValueError as error:
            change = f"Write {key}={example!r}, say; units are {', '.join(UNITS)}."
            raise self.error(f"{key}={format_value(value)} {error}", change) from None

    def count(self, key: str, value: object, example: int) -> int:
        """Return ``value`` as an int of at least 1; ``example`` is a number that would work."""
        if isinstance(value, bool) or not isinstance(value, int):
            problem = f"{key}={format_value(value)} is {kind(value)}, not an int."
            raise self.error(problem, f"Write {key}={meant(value) or example}.")
        if value < 1:
            sign = "zero" if value == 0 else "negative"
            problem = f"{key}={format_value(value)} is {sign}; the minimum is 1."
            raise self.error(problem, f"Write {key}={example}, say.")
        if value >= 2**63:
            raise self.error(f"{key} is more than any machine has.", f"Write {key}={example}, say.")
        return int(value)

    def choice(self, key: str, value: object, known: tuple[str, ...], also: str = "") -> str:
        """Return ``value`` if it is one of the known names; ``also`` says what else the key takes."""
        options = f"Known: {', '.join(known)}{also}."
        if not isinstance(value, str):
            raise self.error(f"{key}={format_value(value)} is {kind(value)}, not a name.", options)
        for name in known:
            if value == name:
                return name
        raise self.error(f"there is no {key} {format_value(value)}.{suggest(value, known)}", options)


def meant(value: object) -> int | None:
    """Return the int that another value clearly means: 4 for ``4.0``, ``"4"`` and a NumPy integer 4."""
    if isinstance(value, float):
        number = int(value) if value.is_integer() else 0
    elif isinstance(value, str):
        number = int(value) if value.isdecimal() and len(value) < 19 else 0
    else:
        number = operator.index(value) if isinstance(value, SupportsIndex) and value is not True else 0
    return number if 1 <= number < 2**63 else None


_TRIED_DIVISORS = 4096  # enough for messages; a size of 10**18 must not hang the parser


def root(number: int, degree: int) -> int:
    """Return the largest whole r with ``r ** degree <= number``, exactly, for number >= 0 and degree >= 1."""
    if degree == 1:
        return number
    if degree == 2:
        return math.isqrt(number)
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle)
    return low


def is_power(number: int, degree: int) -> bool:
    """Return True if ``number`` is a whole number to the power ``degree``: a square, a cube, ..."""
    base: int = root(number, degree)
    return math.prod([base] * degree) == number


def powers_near(number: int, degree: int) -> tuple[int, ...]:
    """Return the perfect powers just below (if any) and just above a number that is not one itself."""
    below = root(number, degree)
    return tuple(base**degree for base in (below, below + 1) if base >= 1)


def divisors(number: int) -> list[int]:
    """Return divisors in rising order; beyond 16 million (4096 squared) only those with a small partner."""
    small = [d for d in range(1, min(math.isqrt(number), _TRIED_DIVISORS) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def balanced(number: int, parts: int) -> tuple[int, ...]:
    """Return ``number`` as ``parts`` factors as equal as its divisors allow: 12 as (3, 4) or (2, 2, 3)."""
    if parts == 1:
        return (number,)
    first = max(d for d in divisors(number) if d <= root(number, parts))
    return (first, *balanced(number // first, parts - 1))
