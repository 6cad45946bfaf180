"""The tables: markdown, from the counts alone."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from experiments.tensor_parallel_volume import isoefficiency
from experiments.tensor_parallel_volume.checks import Check, by_depth, checks, operands
from experiments.tensor_parallel_volume.config import ITEMSIZE, side
from experiments.tensor_parallel_volume.published import published
from experiments.tensor_parallel_volume.records import Record, Results

TEMPLATE = Path(__file__).with_name("table.md.in")
NONE = "–"


def page(results: Results) -> str:
    """results/table.md: the template with its tables filled in."""
    c = results.config
    filled = {
        "max_ranks": c.max_ranks,
        "devices": results.machine["devices"],
        "system": results.machine["system"],
        **results.versions,
        "itemsize": ITEMSIZE,
        "runs": len(results.records),
        "square": c.shapes["square"]["m"],
        "tokens": c.tokens,
        "hidden": c.hidden,
        "hidden_share": _number(Fraction(c.hidden, c.tokens)),
        "tail": isoefficiency.TAIL,
        "checks": checks_table(checks(results)),
        "linear": _linear_table(results),
        "layer": _layer_table(results),
        "depth": _depth_table(results),
        "growth": _growth_table(results),
    }
    return TEMPLATE.read_text(encoding="utf-8").format_map(filled)


def checks_table(found: Sequence[Check]) -> str:
    """What is checked, the verdicts, and why."""
    rows = []
    for check in found:
        held = len(check.cases) - len(check.failed)
        rows.append([check.claim, check.marks or "ours", f"{held} of {len(check.cases)}", check.said, check.because])
    return _markdown(["claim", "mark", "cases", "verdict", "how the count relates to it"], rows, numbers=0)


def _linear_table(results: Results) -> str:
    rows = []
    for r in results.find(what="linear", shape="square", role="column", keep=""):
        kept = results.one(what="linear", mode=r.mode, axes=r.axes, shape="square", role="column", keep="xw")
        row = results.one(what="linear", mode=r.mode, axes=r.axes, shape="square", role="row", keep="")
        printed, of_one, steps, verdict = _documented(results, r, kept)
        rows.append(
            [
                r.mode,
                str(r.ranks),
                _mesh(r),
                _unit(results, r),
                _unit(results, row),
                _unit(results, kept),
                printed,
                of_one,
                f"{r.steps} / {kept.steps}",
                steps,
                verdict,
            ]
        )
    head = ["mode", "ranks", "mesh", "counted", "row layer", "kept", "printed", "of one rank"]
    return _markdown([*head, "steps / kept", "printed", "verdict"], rows, numbers=1)


def _documented(results: Results, r: Record, kept: Record) -> tuple[str, str, str, str]:
    """(printed, of one rank with what it omits, printed steps, verdict) of Colossal-AI's table."""
    q, d = side(r.axes), r.axes.get("depth", 1)
    mode = "1d" if r.mode == "1d+sequence" else r.mode
    if not q:
        return NONE, NONE, NONE, "closed form"
    names = {"P": r.ranks, "q": q, "d": d, "W": 1}
    printed = published()[f"docs-{mode}"].value(**names)
    of_one = printed / q if mode in ("2d", "2.5d") else printed
    steps = published()[f"docs-{mode}-steps"].value(**names)
    verdict = "match"
    if mode == "2.5d":
        of_one += published()["general-2.5d-omitted"].value(**names)
        verdict = "match with the omitted term"
    unit = operands(results, r)[0]
    if r.elements() != of_one * unit:
        verdict = "match (kept)" if kept.elements() == of_one * unit else "**not reproduced**"
    shown_steps = f"{steps} + {2 * (d - 1)}" if mode == "2.5d" else str(steps)
    return _number(printed), _number(of_one), NONE if r.mode == "1d+sequence" else shown_steps, verdict


def _layer_table(results: Results) -> str:
    c = results.config
    unit = Fraction(c.tokens * c.hidden)
    rows = []
    for r in results.find(what="layer", recompute=True):
        plain = results.find(what="layer", mode=r.mode, axes=r.axes, lowering=r.lowering, recompute=False)
        name = f"{r.mode}, SUMMA" if r.lowering == "stream" else r.mode
        rest = 100 * r.elements(part="rest") / r.elements()
        cells = [name, str(r.ranks), _mesh(r), _number(r.elements("forward") / unit)]
        cells += [_number(r.elements("backward") / unit), _number(r.elements() / unit)]
        cells.append(_number(plain[0].elements() / unit) if plain else NONE)
        cells.append(f"{float(rest):.2g} %" if rest else "none")
        rows.append([*cells, *_published_layer(results, r, unit)])
    head = ["mode", "ranks", "mesh", "forward", "backward, recomputed", "both", "not recomputed", "rest"]
    return _markdown([*head, "published forward", "published backward"], rows, numbers=1)


def _published_layer(results: Results, r: Record, unit: Fraction) -> tuple[str, str]:
    c, q = results.config, side(r.axes)
    source = {"1d": "megatron", "2d": "optimus"}.get(r.mode)
    if source is None or not q:
        return NONE, NONE
    found = []
    for phase in ("forward", "backward"):
        value = published()[f"{source}-{phase}"].value(P=r.ranks, bsh=c.tokens * c.hidden, h=c.hidden) / unit
        tree = f" / {_number(value / (q.bit_length() - 1))}" if source == "optimus" else ""
        found.append(_number(value) + tree)
    return found[0], found[1]


def _depth_table(results: Results) -> str:
    q_of = {(r.ranks, r.axes["depth"]): r.axes["row"] for r in results.find(what="tesseract")}
    unit = results.config.shapes["square"]["n"]
    tables = [
        (by_depth(results, "tesseract", "square"), unit**2),
        (by_depth(results, "linear", "square"), unit**2),
        (
            by_depth(results, "linear", "tall"),
            results.config.shapes["tall"]["m"] * results.config.shapes["tall"]["k"],
        ),
    ]
    rows = []
    for p, depths in tables[1][0].items():
        for d in depths:
            cells = [_number(found[p][d] / size) if d in found.get(p, {}) else NONE for found, size in tables]
            if d in tables[0][0].get(p, {}):
                said = published()["tesseract"].value(n=1, q=q_of[p, d], d=d)
                cells[0] += f" [{_number(said)}]"
            rows.append([str(p), str(d), *cells])
    head = ["ranks", "depth", "Tesseract's matmul", "linear layer, |X| = |W|", "linear layer, |X| = 16 |W|"]
    return _markdown(head, rows, numbers=0)


def _growth_table(results: Results) -> str:
    curves = isoefficiency.curves(results)
    ranks = sorted({p for curve in curves for p in curve.points})
    rows = []
    for curve in curves:
        said = {"1D": "isoefficiency-1d", "2D, SUMMA's broadcasts as trees": "isoefficiency-2d"}.get(curve.name)
        published_law = published()[said].expression.replace("**", "^") if said else NONE
        cells = [_compact(curve.points[p]) if p in curve.points else NONE for p in ranks]
        rows.append([curve.name, curve.law if curve.exact else "none", published_law, f"{curve.exponent:.2f}", *cells])
    head = ["counted", "exactly", "published", "exponent", *(f"p = {p}" for p in ranks)]
    return _markdown(head, rows, numbers=3)


def _mesh(r: Record) -> str:
    return " × ".join(str(size) for size in r.axes.values())


def _unit(results: Results, r: Record) -> str:
    return _number(r.elements() / operands(results, r)[0])


def _number(value: Fraction) -> str:
    """Four significant digits, or more before the point."""
    x = float(value)
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:#.4g}"


def _compact(value: Fraction) -> str:
    x = float(value)
    return f"{x:.0f}" if x < 1e5 else f"{x:.2e}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int) -> str:
    """A table; columns from index ``numbers`` up are aligned right unless they hold words."""
    right = [i >= numbers and all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    rule = ["---:" if flag else "---" for flag in right]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell == NONE
