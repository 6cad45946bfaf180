"""What is checked: in how many cases a count relates to a published number as checks.toml says, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from experiments.tensor_parallel_volume import closed_forms, isoefficiency
from experiments.tensor_parallel_volume.config import side
from experiments.tensor_parallel_volume.published import published
from experiments.tensor_parallel_volume.records import Record, Results
from experiments.toml_tables import check_names, read_tables

TEXTS = Path(__file__).with_name("checks.toml")
Case = tuple[str, bool]  # what it is, whether the relation holds


@dataclass(frozen=True, kw_only=True)
class CheckText:
    """A table of checks.toml.

    Attributes:
        claim: what is compared.
        sources: ids of published.csv; none for a check of ours against ours.
        verdict: the result where every case holds.
        because: the relation that was tested, in a sentence. ``{names}`` are filled in from the counts.
    """

    claim: str
    sources: tuple[str, ...]
    verdict: str
    because: str


@dataclass(frozen=True, kw_only=True)
class Check(CheckText):
    """A claim beside its counts.

    Attributes:
        name: of its table.
        cases: each with whether the relation held: exactly, unless the verdict is "direction only".
    """

    name: str
    cases: tuple[Case, ...]

    @property
    def failed(self) -> list[str]:
        """The cases in which it did not hold."""
        return [case for case, holds in self.cases if not holds]

    @property
    def said(self) -> str:
        """The verdict, or that it was not reproduced."""
        if not self.cases:
            return "not counted"
        return "**not reproduced**" if self.failed else self.verdict

    @property
    def marks(self) -> str:
        """Provenance of what is compared with."""
        return ", ".join(dict.fromkeys(published()[source].mark for source in self.sources))


def checks(results: Results) -> list[Check]:
    """Every check, in the order of checks.toml."""
    cases = {**_documentation(results), **_layers(results), **_tesseract(results), **_growth(results)}
    cases["closed_forms"] = _cases(results.find(what="linear"), lambda r: _is_closed_form(results, r))
    numbers = _numbers(results)
    texts = read_tables(TEXTS, CheckText)
    check_names(TEXTS, set(texts), set(cases))
    return [
        Check(
            name=name,
            **{**vars(text), "because": text.because.format_map(numbers)},
            cases=cases[name],
        )
        for name, text in texts.items()
    ]


def operands(results: Results, r: Record) -> tuple[Fraction, Fraction, Fraction]:
    """|X|, |W| and |Y| of a linear layer, in elements."""
    sizes = results.config.shapes[r.shape]
    m, k, n = sizes["m"], sizes["k"], sizes["n"]
    return Fraction(m * k), Fraction(k * n), Fraction(m * n)


def traffic_ratio(results: Results, ranks: int) -> Fraction:
    """What a layer sends in 1D, over what it sends in 2D, norms and biases included."""
    one, two = (
        next(r for r in results.find(what="layer", mode=mode, lowering="gather", recompute=True) if r.ranks == ranks)
        for mode in ("1d", "2d")
    )
    return one.elements() / two.elements()


def by_depth(results: Results, what: str, shape: str) -> dict[int, dict[int, Fraction]]:
    """Ranks to depth to elements a rank sends, where the same ranks have several depths.

    Args:
        results: the counts.
        what: ``tesseract``, or ``linear`` for column layers in 2D and 2.5D.
        shape: of the matmul.
    """
    found: dict[int, dict[int, Fraction]] = {}
    for r in results.find(what=what, shape=shape, keep=""):
        if what == "tesseract" or (r.mode in ("2d", "2.5d") and r.role == "column" and side(r.axes)):
            found.setdefault(r.ranks, {})[r.axes.get("depth", 1)] = r.elements()
    return {p: dict(sorted(depths.items())) for p, depths in sorted(found.items()) if len(depths) > 1}


def _cases(records: Iterable[Record], holds: Callable[[Record], bool]) -> tuple[Case, ...]:
    return tuple((f"{r.mode} {r.axes} {r.role} {r.shape} {r.keep}".strip(), holds(r)) for r in records)


def _is_closed_form(results: Results, r: Record) -> bool:
    sizes = results.config.shapes[r.shape]
    return r.elements() == closed_forms.linear(r.mode, r.axes, r.role, sizes, keep=bool(r.keep))


def _documentation(results: Results) -> dict[str, tuple[Case, ...]]:
    """Colossal-AI's table, and its general forms, on squares and cubes."""

    def value(formula: str, r: Record) -> Fraction:
        X, W, Y = operands(results, r)
        if r.mode.startswith("1d") and r.role == "row":
            X = Y
        q, d = side(r.axes), r.axes.get("depth", 1)
        return published()[formula].value(P=r.ranks, q=q, d=d, X=X, W=W, Y=Y)

    def unit(r: Record) -> Fraction:
        return r.elements() / operands(results, r)[0]

    def omitted(r: Record) -> Fraction:
        return value("general-2.5d-omitted", r)

    def linear(mode: str, shape: str = "square", keep: str = "", role: str = "") -> list[Record]:
        found = results.find(what="linear", mode=mode, shape=shape, keep=keep)
        return [r for r in found if side(r.axes) and role in ("", r.role)]

    def exactly(formula: str, r: Record) -> bool:
        return unit(r) == value(formula, r) and r.steps == value(f"{formula}-steps", r)

    def a_row_of_ranks(r: Record) -> bool:
        q = side(r.axes)
        return unit(r) * q == value("docs-2d", r) and r.steps == value("docs-2d-steps", r)

    def with_omitted(r: Record) -> bool:
        q, extra = side(r.axes), omitted(r) / operands(results, r)[0]
        steps = value("docs-2.5d-steps", r) + 2 * (r.axes["depth"] - 1)
        return unit(r) * q == value("docs-2.5d", r) + q * extra and r.steps == steps

    def general_25d(r: Record) -> bool:
        return (r.elements() - omitted(r)) * side(r.axes) == value("general-2.5d", r)

    one_gather = linear("1d+sequence", keep="xw", role="column") + linear("1d+sequence", role="row")
    return {
        "docs_1d": _cases(linear("1d"), lambda r: exactly("docs-1d", r))
        + _cases(linear("1d", "mixed"), lambda r: r.elements() == value("general-1d", r)),
        "docs_1d_sequence": _cases(one_gather, lambda r: unit(r) == value("docs-1d", r)),
        "docs_1d_sequence_as_it_runs": _cases(
            linear("1d+sequence", role="column"), lambda r: unit(r) * 2 == value("docs-1d", r) * 3
        ),
        "docs_2d": _cases(linear("2d"), a_row_of_ranks)
        + _cases(linear("2d", "mixed"), lambda r: r.elements() * side(r.axes) == value("general-2d", r)),
        "docs_25d": _cases(linear("2.5d"), with_omitted) + _cases(linear("2.5d", "mixed"), general_25d),
        "docs_3d": _cases(linear("3d", keep="xw"), lambda r: exactly("docs-3d", r))
        + _cases(linear("3d", "mixed", "xw"), lambda r: r.elements() == value("general-3d", r)),
        "docs_3d_as_it_runs": _cases(linear("3d"), lambda r: unit(r) * 3 == value("docs-3d", r) * 4),
    }


def _layers(results: Results) -> dict[str, tuple[Case, ...]]:
    """Transformer layers: Megatron's in 1D, Optimus' in 2D on squares."""
    c = results.config

    def value(formula: str, r: Record) -> Fraction:
        return published()[formula].value(P=r.ranks, bsh=c.tokens * c.hidden, h=c.hidden)

    def layers(mode: str, *, lowering: str = "gather", recompute: bool = True) -> list[Record]:
        found = results.find(what="layer", mode=mode, lowering=lowering, recompute=recompute)
        return [r for r in found if side(r.axes)]

    def each_way(r: Record, forward: str, backward: str) -> bool:
        return r.elements("forward") == value(forward, r) and r.elements("backward") == value(backward, r)

    def optimus(r: Record, phase: str) -> bool:
        """The paper leaves norms and biases out; its broadcasts are trees, ours send each panel once."""
        q = side(r.axes)
        tree = q.bit_length() - 1
        ring = 1 if r.lowering == "stream" else Fraction(q - 1, q)
        return r.elements(phase, "matmul") * tree == value(f"optimus-{phase}", r) * ring

    def sequence(r: Record) -> bool:
        limit = value("megatron-sp-forward", r)
        return r.elements("forward") == limit * (r.ranks - 1) / r.ranks

    sizes = [p for p in (4, 16, 64) if p <= c.max_ranks]
    ratios = [traffic_ratio(results, p) for p in sizes]
    grows = [True, *(a < b for a, b in pairwise(ratios))]
    sides = [(r > 1) == (published()[f"weak-scaling-{p}"].value() > 1) for p, r in zip(sizes, ratios, strict=True)]
    return {
        "megatron": _cases(layers("1d"), lambda r: each_way(r, "megatron-forward", "megatron-backward")),
        "rsa": _cases(layers("1d", recompute=False), lambda r: each_way(r, "rsa-1d", "rsa-1d")),
        "megatron_sequence": _cases(layers("1d+sequence", recompute=False), sequence),
        "optimus_summa": _cases(layers("2d", lowering="stream"), lambda r: optimus(r, "forward")),
        "optimus_rings": _cases(layers("2d"), lambda r: optimus(r, "forward") and optimus(r, "backward")),
        "weak_scaling": tuple((f"{p} ranks", grew and same) for p, grew, same in zip(sizes, grows, sides, strict=True)),
    }


def _tesseract(results: Results) -> dict[str, tuple[Case, ...]]:
    """The two accounts of 2.5D."""
    n = results.config.shapes["square"]["n"]

    def as_told(r: Record) -> bool:
        names = {"n": n, "q": r.axes["row"], "d": r.axes["depth"]}
        return r.elements() == published()["tesseract"].value(**names)

    def by_tokens(r: Record) -> bool:
        q, d = r.axes["row"], r.axes["depth"]
        return r.elements("forward") == Fraction(q - 1, q * q) * n * n * (Fraction(1, d) + 1)

    deeper: list[Case] = []
    for what, shape, falls in (
        ("tesseract", "square", True),
        ("linear", "tall", True),
        ("linear", "square", False),
    ):
        for p, depths in by_depth(results, what, shape).items():
            volumes = [volume for d, volume in depths.items() if d**3 <= p]  # d ≤ q
            if len(volumes) > 1:
                holds = all((b < a) == falls for a, b in pairwise(volumes))
                deeper.append((f"{what} {shape} {p} ranks", holds))
    of_tokens = results.find(what="linear", mode="2.5d", shape="square", keep="", role="column")
    return {
        "tesseract": _cases(results.find(what="tesseract"), as_told),
        "tesseract_by_tokens": _cases(of_tokens, by_tokens),
        "deeper": tuple(deeper),
    }


def _growth(results: Results) -> dict[str, tuple[Case, ...]]:
    exact = {curve.name: curve.exact for curve in isoefficiency.curves(results)}
    one = [name for name in exact if name.startswith("1D")]
    return {
        "isoefficiency_1d": tuple((name, exact[name]) for name in one),
        "isoefficiency_2d": tuple((name, holds) for name, holds in exact.items() if name not in one),
    }


def _numbers(results: Results) -> dict[str, str]:
    """What the texts quote."""
    exponents = {curve.name: f"{curve.exponent:.2f}" for curve in isoefficiency.curves(results)}
    sizes = [p for p in (4, 16, 64) if p <= results.config.max_ranks]
    return {
        "ratios": ", ".join(f"{float(traffic_ratio(results, p)):.2f}" for p in sizes),
        "tail": str(isoefficiency.TAIL),
        "one": exponents["1D"],
        "two": exponents["2D, rings"],
        "three": exponents["3D"],
        "tree": exponents["2D, SUMMA's broadcasts as trees"],
    }
