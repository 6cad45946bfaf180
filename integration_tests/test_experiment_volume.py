"""The experiment tensor-parallel-volume: small meshes counted anew, the committed counts and what is made of them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from experiments.report import with_results
from experiments.tensor_parallel_volume import closed_forms, counting, run, tables
from experiments.tensor_parallel_volume.checks import checks
from experiments.tensor_parallel_volume.config import Config, isoefficiency_meshes
from experiments.tensor_parallel_volume.config import ranks as ranks_of
from experiments.tensor_parallel_volume.isoefficiency import TAIL
from experiments.tensor_parallel_volume.published import MARKS, Published, published
from experiments.tensor_parallel_volume.records import Calls, Record, Results
from integration_tests.house import ROOT
from meshfold.mesh import Mesh
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import MODES, Cost, MatmulPlan, matmul_cost

FOLDER = ROOT / "experiments" / "tensor_parallel_volume"
COMMITTED = FOLDER / "results"


@pytest.fixture(scope="module", params=[8, pytest.param(16, marks=pytest.mark.slow)], ids="up to {} ranks".format)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment run on meshes of up to 8 or 16 ranks."""
    made = tmp_path_factory.mktemp("volume")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == 8:
            patch.setattr(run, "isoefficiency_meshes", tail)
        assert run.main(["--max-ranks", str(request.param), "--output", str(made)]) == 0
    return made


def tail(config: Config) -> list[tuple[str, dict[str, int]]]:
    """Return the meshes that the slopes of the isoefficiency are of."""
    return [(mode, axes) for mode, axes in isoefficiency_meshes(config) if ranks_of(axes) >= TAIL]


@pytest.fixture(scope="module")
def counted(folder: Path) -> Results:
    return Results.load(folder / "counts.json")


@pytest.fixture(scope="module")
def committed() -> Results:
    return Results.load(COMMITTED / "counts.json")


def square(results: Results, mode: str, axes: dict[str, int], keep: str = "", role: str = "column") -> Fraction:
    """What a rank sends in a linear layer with |X| = |W| = |Y| = 1."""
    found = results.one(what="linear", mode=mode, axes=axes, role=role, shape="square", keep=keep)
    return found.elements() / results.config.shapes["square"]["m"] ** 2


def test_a_run_leaves_counts_table_and_plots(folder: Path) -> None:
    assert (folder / "table.md").read_text().startswith("<!-- made from counts.json")
    for name in ("volume.png", "isoefficiency.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_counts_are_the_formulas_of_the_documentation(counted: Results) -> None:
    largest = counted.config.max_ranks
    for p in (p for p in (4, 8, 16) if p <= largest):
        for role in ("column", "row"):
            assert square(counted, "1d", {"tensor": p}, role=role) == Fraction(2 * (p - 1), p)
        assert square(counted, "1d+sequence", {"tensor": p}) == Fraction(3 * (p - 1), p)
    for q in (q for q in (2, 4) if q * q <= largest):
        assert square(counted, "2d", {"row": q, "col": q}) * q == Fraction(6 * (q - 1), q)
    for d in (d for d in (2, 4) if 4 * d <= largest):
        printed, omitted = Fraction(3 * (d + 1), 2 * d), Fraction(2 * (d - 1), d * 4)
        assert square(counted, "2.5d", {"depth": d, "row": 2, "col": 2}) == printed / 2 + omitted
    assert square(counted, "3d", {"a": 2, "b": 2, "c": 2}, "xw") == Fraction(6, 8)
    assert square(counted, "3d", {"a": 2, "b": 2, "c": 2}) == Fraction(8, 8)


def test_a_layer_counts_as_megatron_and_optimus_say(counted: Results) -> None:
    c = counted.config
    bsh, h = c.tokens * c.hidden, c.hidden
    for p in (p for p in (4, 8, 16) if p <= c.max_ranks):
        layer = counted.one(what="layer", mode="1d", axes={"tensor": p}, recompute=True)
        assert layer.elements("forward") == Fraction(4 * (p - 1), p) * bsh
        assert layer.elements("backward") == Fraction(8 * (p - 1), p) * bsh
    for q, trees in [(2, 1), (4, 2)][: 2 if c.max_ranks >= 16 else 1]:
        axes = {"row": q, "col": q}
        layer = counted.one(what="layer", mode="2d", axes=axes, recompute=True, lowering="stream")
        assert layer.elements("forward", "matmul") * trees == Fraction(trees, q) * (7 * bsh + 12 * h * h)


def test_every_verdict_holds(counted: Results, committed: Results) -> None:
    for results in (counted, committed):
        found = checks(results)
        assert [(check.name, check.failed) for check in found if check.failed] == []
    assert [check.name for check in found if not check.cases] == []
    assert committed.config.max_ranks == 512


def test_the_committed_counts_are_what_is_counted_today(counted: Results, committed: Results) -> None:
    """Isoefficiency is left out: the small run stops it earlier."""
    now = [r for r in counted.records if r.what != "isoefficiency"]
    then = [r for r in committed.records if r.what != "isoefficiency" and r.ranks <= counted.config.max_ranks]
    assert now == then


def test_the_committed_table_is_made_from_the_committed_counts(committed: Results) -> None:
    assert tables.page(committed).encode() == (COMMITTED / "table.md").read_bytes()
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert with_results(readme, tables.checks_table(checks(committed))) == readme


def test_counts_survive_the_file(counted: Results, tmp_path: Path) -> None:
    counted.save(tmp_path / "again.json")
    assert Results.load(tmp_path / "again.json") == counted


def test_a_wrong_count_is_not_reproduced(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = json.loads((folder / "counts.json").read_text())
    changed = next(r for r in counts["records"] if r["mode"] == "2.5d" and r["axes"]["depth"] == 2)
    changed["calls"][0][-1] += 4
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    assert run.main(["--render", "--no-plots", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "not reproduced" in said.out
    assert "not in: 2.5d {'depth': 2, 'row': 2, 'col': 2} column square" in said.err
    assert "**not reproduced**" in (tmp_path / "table.md").read_text()


def test_a_plan_that_says_something_else_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_dw(plan: MatmulPlan, *args: Any, **kwargs: Any) -> Cost:
        return matmul_cost(plan, *args, **{**kwargs, "phases": ("forward", "dx")})

    monkeypatch.setattr(counting, "matmul_cost", without_dw)
    assert run.main(["--max-ranks", "8", "--output", str(tmp_path)]) == 1
    assert "counted but not planned" in capsys.readouterr().err


def test_ranks_that_disagree_stop_the_run() -> None:
    def count(mesh: Mesh) -> tuple[Calls, ...]:
        return (Calls("forward", "matmul", "all_reduce", "tensor", 4, 1, mesh.rank),)

    job = counting.Job(record=Record(what="linear", mode="1d", axes={"tensor": 4}), count=count)
    with pytest.raises(counting.CountError, match="rank 3 sends"):
        list(counting.run([job]))


REAL = {"2d": {"row": 2, "col": 2}, "2.5d": {"depth": 1, "row": 2, "col": 2}, "3d": {"a": 2, "b": 2, "c": 1}}


@ranks(4)
@pytest.mark.parametrize("mode", REAL)
def test_real_ranks_send_what_fake_ones_do(mode: str) -> None:
    sizes = {"m": 8, "k": 16, "n": 32}
    mesh = Mesh(REAL[mode])
    calls = counting.count_matmul(MODES[mode].plans["column"], sizes, mesh, device="cpu")
    real = Record(what="linear", mode=mode, axes=REAL[mode], calls=calls)
    assert real.elements() == closed_forms.linear(mode, REAL[mode], "column", sizes, keep=False)
    mesh.close()


def test_published_formulas() -> None:
    rows = published()
    assert {row.mark for row in rows.values()} == set(MARKS)
    assert rows["docs-2.5d"].value(q=2, d=2) == Fraction(9, 4)
    assert rows["optimus-forward"].value(P=16, bsh=1, h=0) == Fraction(7, 2)
    assert rows["isoefficiency-2d"].value(P=64) == (8 * 6) ** 3
    with pytest.raises(ValueError, match=r"docs-2d.*'q' is not defined"):
        rows["docs-2d"].value(P=4)
    with pytest.raises(ValueError, match=r"sqrt\(8\) is not a whole number"):
        rows["optimus-forward"].value(P=8, bsh=1, h=1)
    with pytest.raises(ValueError, match="not defined"):
        replace(rows["docs-1d"], expression="open('x')").value()
    assert isinstance(rows["tesseract"], Published)


def test_the_script_runs_by_itself_from_anywhere(folder: Path, tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "counts.json").write_bytes((folder / "counts.json").read_bytes())
    script = [warm_python, str(FOLDER / "run.py"), "--render", "--no-plots", "--output", str(tmp_path)]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table.md").read_bytes() == (folder / "table.md").read_bytes()


def test_without_counts_the_error_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--render", "--output", str(tmp_path / "nothing")]) == 1
    assert "counts.json" in capsys.readouterr().err
