"""What experiments that simulate have in common: claims beside published numbers, tables, the generated part of a README."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.toml_tables import check_names, read_tables

BEGIN, END = "<!-- results: made by run.py -->", "<!-- end of results -->"
NONE = "–"
MARKS = """Marks: **P** in the paper's own text, **A** in its abstract, **S** in a third party's account of the paper, **D** derived
by arithmetic from the others."""


@dataclass(frozen=True, slots=True)
class Case:
    """One published number beside ours."""

    what: str
    published: float
    ours: float


@dataclass(frozen=True, kw_only=True)
class ClaimText:
    """A table of an experiment's claims.toml.

    Attributes:
        name: short, for the verdict.
        claim: what is compared.
        mark: provenance of the published numbers.
        tolerance: how far ours may be off.
        relative: whether that is a share of the published number, or a difference.
        one_sided: ours may be below the published number by any amount: an upper bound was published.
        because: how the two relate. ``{names}`` are filled in from the numbers.
        expected: False where the claim is known not to hold; ``because`` gives the reason.
    """

    name: str
    claim: str
    mark: str
    tolerance: float
    relative: bool = False
    one_sided: bool = False
    because: str
    expected: bool = True


@dataclass(frozen=True, kw_only=True)
class Claim(ClaimText):
    """A claim and its cases."""

    cases: Sequence[Case] = field(repr=False)

    def off(self, case: Case) -> float:
        """How far ours is off in a case, never negative."""
        off = case.ours - case.published
        off = max(off, 0.0) if self.one_sided else abs(off)
        return off / abs(case.published) if self.relative else off

    @property
    def worst(self) -> float:
        """The farthest that a case is off."""
        return max((self.off(case) for case in self.cases), default=0.0)

    @property
    def failed(self) -> list[Case]:
        """The cases that are off by more than may be."""
        return [case for case in self.cases if self.off(case) > self.tolerance]

    @property
    def holds(self) -> bool:
        """Whether every case is within the tolerance."""
        return bool(self.cases) and not self.failed

    @property
    def distance(self) -> str:
        """``worst`` in words: rounded up, so that it is never less than it was."""
        if self.relative:
            return f"{_up(100 * self.worst, 1)} %"
        return "0" if self.worst < 1e-9 else f"{_up(self.worst, 5 if self.worst < 0.001 else 4)}"

    @property
    def said(self) -> str:
        """The verdict on this claim."""
        if not self.cases:
            return "not simulated"
        if self.holds:
            return "exact" if self.worst < 1e-9 else f"within {self.distance}"
        return f"**not reproduced**, off by up to {self.distance}"


Cases = dict[str, Sequence[Case]]
"""Cases of each claim, by the claim's table in claims.toml."""


def read_claims(folder: Path, cases: Cases, **numbers: float) -> list[Claim]:
    """Read an experiment's claims.toml and give each claim its cases, in the file's order.

    Args:
        folder: the experiment's.
        cases: for each table of the file.
        numbers: values for the ``{names}`` in ``because``.

    Raises:
        TableError: if the file does not fit its schema, or its tables are not those of ``cases``.
    """
    path = folder / "claims.toml"
    texts = read_tables(path, ClaimText)
    check_names(path, set(texts), set(cases))
    made = []
    for name, text in texts.items():
        values = {**vars(text), "because": text.because.format_map(numbers)}
        made.append(Claim(**values, cases=cases[name]))
    return made


def verdict(claims: Sequence[Claim]) -> str:
    """Two sentences: what is reproduced and within what, what is not and how far off."""
    held = [f"{one.name} ({one.said})" for one in claims if one.holds]
    missed = [f"{one.name} (off by up to {one.distance})" for one in claims if one.cases and not one.holds]
    said = f"Reproduced: {'; '.join(held)}." if held else "Nothing was reproduced."
    return said + (f" Not reproduced: {'; '.join(missed)}." if missed else "")


def claims_table(claims: Sequence[Claim]) -> str:
    """What was compared, and what came out."""
    rows = [
        [
            one.claim,
            one.mark,
            f"{len(one.cases) - len(one.failed)} of {len(one.cases)}",
            one.said,
            one.because,
        ]
        for one in claims
    ]
    head = ["claim", "mark", "cases", "verdict", "how ours relates to it"]
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers are aligned right."""
    right = [all(row[i].lstrip("*")[:1] in "0123456789–" for row in rows) for i in range(len(head))]
    rule = ["---:" if flag else "---" for flag in right]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, rule, *rows)
    )


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a published table; lines that begin with # say where it is from."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def rounded(value: Any, digits: int = 12) -> Any:
    """Every float in a nest of dicts and lists, rounded, so that files do not hang on a last bit."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: rounded(one, digits) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one, digits) for one in value]
    return value


def with_results(readme: str, text: str) -> str:
    """A README with its generated part made new.

    Raises:
        ValueError: if it has lost its marks.
    """
    head, begin, rest = readme.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not begin or not mark:
        raise ValueError(f"README.md has lost its marks {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def parser(name: str, description: str, folder: Path) -> argparse.ArgumentParser:
    """The arguments that all of them take."""
    made = argparse.ArgumentParser(prog=f"meshfold reproduce {name}", description=description)
    made.add_argument("--output", type=Path, default=folder / "results", help="folder for what is written")
    made.add_argument("--render", action="store_true", help="only make table and plot from the numbers that are there")
    made.add_argument("--no-plots", action="store_true", help="leave out the plot")
    return made


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """How an experiment goes from numbers to files.

    Attributes:
        file: the run.py that has it.
        about: a sentence for ``--help``.
        simulate: makes all numbers, of what JSON can hold.
        claims: from the numbers.
        page: results/table.md, from numbers and claims.
        draw: the plot, to a path; it may raise ImportError.
        measures: what ``--measure RANKS`` runs for real: the folder's measured.py. Empty where there is none.
        numbers_file: the file of all numbers, in the folder of results.
    """

    file: str
    about: str
    simulate: Callable[[], dict[str, Any]]
    claims: Callable[[Mapping[str, Any]], list[Claim]]
    page: Callable[[Mapping[str, Any], Sequence[Claim]], str]
    draw: Callable[[Mapping[str, Any], Path], None]
    measures: str = ""
    numbers_file: str = "simulated.json"

    @property
    def folder(self) -> Path:
        """Its own."""
        return Path(self.file).resolve().parent

    @property
    def name(self) -> str:
        """As it is called on the command line: its folder's, with dashes."""
        return self.folder.name.replace("_", "-")

    def arguments(self) -> argparse.ArgumentParser:
        """What it takes on the command line."""
        made = parser(self.name, self.about, self.folder)
        if self.measures:
            made.add_argument("--measure", type=int, metavar="RANKS", help=self.measures)
        return made

    def parse(self, argv: Sequence[str] | None, arguments: argparse.ArgumentParser | None = None) -> argparse.Namespace:
        """The options of a command line; ``sizes`` among them: the words that ``--measure RANKS`` passes on.

        Args:
            argv: the words; None: the process's.
            arguments: where it takes more than :meth:`arguments` says.
        """
        arguments = arguments or self.arguments()
        arguments.set_defaults(measure=None)
        options, sizes = arguments.parse_known_args(argv)
        if sizes and options.measure is None:
            arguments.error(f"unrecognized arguments: {' '.join(sizes)}")
        options.sizes = sizes
        return options

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the experiment on a command line's words; None: the process's.

        Returns:
            0 if every claim came out as the page says, else 1.
        """
        return self.run(self.parse(argv))

    def run(self, options: argparse.Namespace) -> int:
        """Numbers, table, plot, verdict; or, where it is to be measured, what the ranks do.

        Returns:
            0 if every claim came out as it was expected to, 1 if one did not, or files could not be read or written.
        """
        folder: Path = options.output
        if options.measure is not None:
            from meshfold.mesh.processes import launch

            program = [str(self.folder / "measured.py"), "--output", str(folder.resolve()), *options.sizes]
            return launch(program, options.measure)
        numbers = folder / self.numbers_file
        try:
            if not options.render:
                folder.mkdir(parents=True, exist_ok=True)
                made = rounded(self.simulate())
                numbers.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            found = json.loads(numbers.read_text(encoding="utf-8"))
            claims = self.write(found, folder)
        except OSError as error:
            said = f"{error.filename}: {error.strerror}"
            if options.render and error.filename == str(numbers):
                said = f"{numbers} is not there: run it once without --render, which makes it"
            print(f"meshfold reproduce {self.name}: {said}", file=sys.stderr)
            return 1
        if not options.no_plots:
            try:
                self.draw(found, folder / f"{self.name}.png")
            except ImportError:
                print("no plot: matplotlib is missing; pip install 'meshfold[plot]'", file=sys.stderr)
        wrong = [one for one in claims if one.holds != one.expected]
        for one in claims:
            print(f"{one.said.replace('*', ''):<42} {one.claim}")
        for one in wrong:
            for case in one.failed:
                print(
                    f"   {one.name}, {case.what}: {case.ours:.6g}, published {case.published:.6g}",
                    file=sys.stderr,
                )
        print(f"\n{verdict(claims)}\nTable: {folder / 'table.md'}")
        return 1 if wrong else 0

    def write(self, found: Mapping[str, Any], folder: Path) -> list[Claim]:
        """table.md, and in the experiment's own folder the README's part too."""
        claims = self.claims(found)
        (folder / "table.md").write_text(self.page(found, claims), encoding="utf-8")
        if folder.resolve() == self.folder / "results":
            readme = self.folder / "README.md"
            readme.write_text(with_results(readme.read_text(encoding="utf-8"), summary(claims)), encoding="utf-8")
        return claims


def summary(claims: Sequence[Claim]) -> str:
    """The generated part of a README."""
    return f"**Verdict.** {verdict(claims)}\n\n{claims_table(claims)}"


def _up(value: float, digits: int) -> str:
    step = 10.0**-digits
    whole = int(value / step - 1e-9) + 1
    return f"{whole * step:.{digits}f}"
