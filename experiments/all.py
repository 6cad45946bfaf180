"""``meshfold reproduce --all``: run every experiment, and write one page with every verdict.

The page is made from the generated part of each experiment's README.md, the list in docs/experiments.md from the page's counts.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own, too

from experiments.report import BEGIN, END, MARKS, markdown, with_results

FOLDER = Path(__file__).resolve().parent
PAGE, LIST = FOLDER / "verdicts.md", FOLDER.parent / "docs" / "experiments.md"
KINDS = ("match", "direction only", "differs", "not reproduced", "not run")
"""Kinds of verdicts: ``exact`` and ``within`` are matches; ``not run``: nothing was simulated, counted or trained."""
TEXT = """<!-- made by meshfold reproduce --all; do not edit -->

# Every verdict

{summary}

*Match*: exact, or within what is stated. *Direction only*: the sign is the published one. *Differs*: in a way that is explained.

{marks} **ours**: a check of this code. **run**: the published code was run.
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A row of an experiment's table of claims.

    Attributes:
        claim: what is compared.
        mark: provenance of the published numbers.
        cases: how many of how many hold.
        said: the verdict.
        because: how ours relates to it.
    """

    claim: str
    mark: str
    cases: str
    said: str
    because: str

    @property
    def kind(self) -> str:
        """One of KINDS."""
        said = self.said.strip("*")
        if said.startswith(("exact", "within", "match")):
            return "match"
        return next(
            (kind for kind in KINDS if said.startswith(kind)), "not run" if said.startswith("not ") else "differs"
        )


def names() -> list[str]:
    """The experiments, as they are called on the command line."""
    return sorted(file.parent.name.replace("_", "-") for file in FOLDER.glob("*/run.py"))


def folder_of(name: str) -> Path:
    """Return an experiment's folder."""
    return FOLDER / name.replace("-", "_")


def verdicts(name: str) -> list[Verdict]:
    """Read the table of claims in an experiment's README.md.

    Raises:
        ValueError: if it has none.
    """
    readme = folder_of(name) / "README.md"
    made = readme.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in made.splitlines() if line.startswith("| ")][2:]
    if not rows:
        raise ValueError(f"{readme} has no table of claims: run meshfold reproduce {name}, which makes it")
    cells = [[cell.strip() for cell in row.replace("\\|", "\0").strip("|").split("|")] for row in rows]
    keys = ("claim", "mark", "cases", "said", "because")
    return [Verdict(**{k: cell.replace("\0", "|") for k, cell in zip(keys, row, strict=True)}) for row in cells]


def about(name: str) -> str:
    """Return what an experiment is about, from the first line of its program."""
    text = ast.get_docstring(ast.parse((folder_of(name) / "run.py").read_text(encoding="utf-8"))) or ""
    said = text.partition("\n")[0].partition(": ")[2].rstrip(".")
    return said[:1].upper() + said[1:]


def counts(found: dict[str, list[Verdict]], link: str) -> str:
    """Return the table of how many verdicts of each kind an experiment has.

    Args:
        found: verdicts by experiment.
        link: where the experiments' folders are, from the page.
    """
    rows = []
    for name, some in found.items():
        by_kind = Counter(one.kind for one in some)
        page = f"[{name}]({link}{folder_of(name).name}/README.md)"
        rows.append([page, about(name), *(str(by_kind[kind] or "–") for kind in KINDS)])
    return markdown(["experiment", "what", *KINDS], rows)


def page(found: dict[str, list[Verdict]]) -> str:
    """Return the page of every verdict."""
    made = [TEXT.format(summary=counts(found, ""), marks=MARKS)]
    for name, some in found.items():
        rows = [[one.claim, one.mark, one.cases, one.said, one.because] for one in some]
        table = markdown(["claim", "mark", "cases", "verdict", "how ours relates to it"], rows)
        made.append(f"## {name}\n\n{about(name)}.\n\n{table}\n")
    return "\n".join(made)


def measure(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Start the ranks that measure experiments one after the other; return their exit code."""
    from experiments.all_measured import names as measurable
    from meshfold.mesh.processes import launch

    unknown = sorted(set(options.only or ()) - set(measurable()))
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} cannot be measured; give some of {', '.join(measurable())}")
    if options.output == PAGE:
        parser.error("--measure writes a folder for each experiment: give --output FOLDER")
    words = ["--only", *options.only] if options.only else []
    return launch([str(FOLDER / "all_measured.py"), "--output", str(options.output.resolve()), *words], options.measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all and write the page, or measure.

    Returns:
        0 if every experiment came out as its page says, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="meshfold reproduce --all", description="Run every experiment; write one page."
    )
    parser.add_argument("--render", action="store_true", help="only make tables from the numbers that are there")
    parser.add_argument("--no-plots", action="store_true", help="leave out the plots")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page; by default the repository's, and its list")
    parser.add_argument(
        "--measure",
        type=int,
        metavar="RANKS",
        help="instead run all that can be measured for real, in one start of so many ranks (GPUs, if there are as many), and write "
        "a folder for each under --output",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="with --measure: these experiments alone")
    options = parser.parse_args(argv)
    if options.measure is not None:
        return measure(parser, options)
    words = ["--render"] * options.render + ["--no-plots"] * options.no_plots
    failed = []
    for name in names():
        print(f"== {name}", flush=True)
        begun = time.perf_counter()
        if importlib.import_module(f"experiments.{folder_of(name).name}.run").main(words):
            failed.append(name)
        print(f"({time.perf_counter() - begun:.0f} s)\n", flush=True)
    found = {name: verdicts(name) for name in names()}
    options.output.write_text(page(found), encoding="utf-8")
    if options.output.resolve() == PAGE:
        LIST.write_text(
            with_results(LIST.read_text(encoding="utf-8"), counts(found, "../experiments/")), encoding="utf-8"
        )
    total = Counter(one.kind for some in found.values() for one in some)
    print(", ".join(f"{total[kind]} {kind}" for kind in KINDS) + f"\nPage: {options.output}")
    if failed:
        print(f"not as their pages say: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
