"""The tables of docs/choosing.md: the fastest spec by model, number of GPUs and their memory, as ``meshfold suggest`` answers.

python docs/choosing.py                 # every row, a quarter of an hour
python docs/choosing.py llama-1b 8      # rows of a model, a number of GPUs, or both

A row names its command. A new row is an entry of :data:`MODELS`, :data:`GPUS` or :data:`MEMORY`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshfold.mesh import SpecError
from meshfold.planner import Machine, Suggestion, find_machine, suggest
from meshfold.planner.report import format_seconds
from meshfold.planner.suggestions.options import what_costs
from meshfold.planner.suggestions.text import family_words, settings_words, spec_words

PAGE = Path(__file__).resolve().parent / "choosing.md"
MODELS = {"llama-1b": "1 billion parameters", "llama-8b": "8 billion parameters", "llama-70b": "70 billion parameters"}
"""Presets, and the title of their table."""
GPUS = (1, 2, 8, 64)
MEMORY = {24: ("h100", 24), 80: ("h100", None), 141: ("h200", None)}
"""GiB of a GPU by its data sheet: the machine, and the GiB of ``--gpu-memory`` if it is less than the machine's."""
ROWS, SEQ_LEN = 8, 4096
"""Sequences for each GPU in a step, and their tokens."""
_LOSERS = 2
_ALIKE, _CLEAR = "about as fast", 0.03
_HEAD = "| GPUs | GiB each | line to paste, and the command that shows it | a step | why the next lose |\n|---|---|---|---|---|"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of a table.

    Attributes:
        model: a preset.
        gpus: number of GPUs.
        memory: of each, a key of :data:`MEMORY`.
    """

    model: str
    gpus: int
    memory: int

    @property
    def machine_name(self) -> str:
        """What ``--machine`` takes: one GPU, or nodes of eight."""
        kind, _ = MEMORY[self.memory]
        return kind if self.gpus == 1 else f"{kind}x8"

    @property
    def machine(self) -> Machine:
        """The machine, with the memory of the case."""
        found, (_, limit) = find_machine(self.machine_name), MEMORY[self.memory]
        return found if limit is None else replace(found, memory=float(limit * 2**30))

    @property
    def command(self) -> str:
        """What prints the answer."""
        limit = MEMORY[self.memory][1]
        words = [f"meshfold suggest --model {self.model} --machine {self.machine_name} --ranks {self.gpus}"]
        words.append(f"--batch-size {ROWS * self.gpus} --seq-len {SEQ_LEN}")
        return " ".join(words + ([] if limit is None else [f"--gpu-memory {limit}GiB"]))

    @property
    def start(self) -> str:
        """The cells by which the row is found."""
        return f"| {self.gpus} | {self.memory} |"

    def row(self) -> str:
        """Return the row, which takes a suggestion."""
        from meshfold.train.model_choice import choose_model

        model = choose_model(self.model, None, {}, vocab_size=None, seq_len=SEQ_LEN)
        try:
            found = suggest(
                model.build,
                self.machine,
                ranks=self.gpus,
                batch_size=ROWS * self.gpus,
                seq_len=SEQ_LEN,
                name=model.name,
            )
        except SpecError as error:
            return f"{self.start} none<br>`{self.command}` | – | {_cell(str(error))} |"
        best = found.best
        words = " ".join(
            [f"`parallel = dict({spec_words(best.candidate)})`", *map(_code, settings_words(best.candidate))]
        )
        speed = best.speed
        step = (
            f"{format_seconds(speed.seconds)}, {speed.tokens_per_second / self.gpus:,.0f} tokens/s a GPU, "
            f"MFU {100 * speed.mfu:.0f} %, {best.bytes / 2**30:.1f} GiB"
        )
        return (
            f"{self.start} {words}<br>`{self.command}` | {step} | {'; '.join(losers(found)) or 'there is no other'} |"
        )


def cases() -> Iterator[Case]:
    """Yield the rows in the order of the page."""
    for model in MODELS:
        for gpus in GPUS:
            for memory in MEMORY:
                yield Case(model=model, gpus=gpus, memory=memory)


def losers(found: Suggestion) -> list[str]:
    """Return the next specs, fastest first, each with its seconds and what costs them."""
    best = found.best
    next_ones = [
        (one.speed.seconds, f"dict({spec_words(one.candidate)})", what_costs(one.outlook, best.outlook))
        for one in found.options[1:]
    ]
    next_ones += [(one.seconds, family_words(one.family), one.why) for one in found.rejected if one.outlook is not None]
    said = []
    for seconds, words, why in sorted(next_ones, key=lambda one: one[0])[:_LOSERS]:
        slower = seconds / best.speed.seconds - 1
        if why == _ALIKE and slower > _CLEAR:  # what its outlook did not have
            why = f"{100 * slower:.0f} % slower by its whole plan"
        said.append(f"{_code(words)} {format_seconds(seconds)}: {_cell(why)}")
    return said + [
        f"{_code(spec_words(one.candidate))}: does not fit, {one.bytes / 2**30:.1f} GiB" for one in found.misfits[:1]
    ]


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ").removesuffix(".")


def tables(page: str) -> dict[str, list[str]]:
    """Return the rows of each model's table on the page."""
    found = re.findall(r"<!-- table: ([\w.-]+) -->\n(.*?)<!-- end of table -->", page, re.DOTALL)
    return {model: [line for line in text.splitlines() if re.match(r"\| \d", line)] for model, text in found}


def with_row(page: str, case: Case, row: str) -> str:
    """Return the page with one row written anew, in its place in the order of :func:`cases`.

    Raises:
        ValueError: if the page has no table for the model.
    """
    rows = tables(page)
    if case.model not in rows:
        raise ValueError(f"{PAGE} has no '<!-- table: {case.model} -->' ... '<!-- end of table -->' for the row")
    kept = {one.start: line for one in cases() for line in rows[case.model] if line.startswith(one.start)}
    kept[case.start] = row
    lines = [kept[one.start] for one in cases() if one.model == case.model and one.start in kept]
    body = "\n".join([_HEAD, *lines])
    begin, end = f"<!-- table: {case.model} -->\n", "\n<!-- end of table -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{body}{end}{rest.partition(end.lstrip())[2]}"


def main(argv: Sequence[str]) -> int:
    """Write rows anew: all, or those of the models and numbers of GPUs that are named."""
    strangers = [word for word in argv if word not in MODELS and word not in map(str, GPUS)]
    if strangers:
        print(f"{strangers[0]!r} is neither of {', '.join(MODELS)} nor of {', '.join(map(str, GPUS))}", file=sys.stderr)
        return 2
    models = [word for word in argv if word in MODELS] or list(MODELS)
    gpus = [int(word) for word in argv if word not in MODELS] or list(GPUS)
    for case in cases():
        if case.model in models and case.gpus in gpus:
            row = case.row()
            PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), case, row), encoding="utf-8")
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
