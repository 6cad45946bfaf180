"""The configurations, which of them run on the ranks and memory at hand, and what the planner expects of each."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.toml_tables import TableError, read_tables
from meshfold.cli.arguments import read_changes, read_parallel
from meshfold.planner import Estimate, Machine, estimate, step_speed
from meshfold.train.model_choice import ModelChoice, choose_model

FILE = Path(__file__).resolve().parent / "configurations.toml"
GiB = 2**30


@dataclass(frozen=True)
class Configuration:
    """A training step that is planned and measured.

    Attributes:
        ranks: world size, which the spec must have.
        batch: sequences of a global batch.
        seq_len: tokens of a sequence.
        precision: of compute.
        model: a preset; empty for a Hugging Face model.
        changes: to the preset, ``layers=4``.
        hf: entries of a Hugging Face ``config.json``, ``model_type=gpt2``.
        parallel: the spec, as on a command line.
        recompute: as for the engine; empty: none.
        accumulate: micro-steps of a step.
        device: ``cpu`` or ``cuda``.
        least_gib: GiB that a device must have, where ``parallel`` has a limit of its own.
    """

    ranks: int
    batch: int
    seq_len: int
    precision: str
    model: str = ""
    changes: tuple[str, ...] = ()
    hf: tuple[str, ...] = ()
    parallel: str = "dict()"
    recompute: str = ""
    accumulate: int = 1
    device: str = "cuda"
    least_gib: float = 0.0

    @property
    def spec(self) -> dict[str, Any]:
        """The spec."""
        return read_parallel([self.parallel])

    def choose(self, folder: Path) -> ModelChoice:
        """Return the model; one of Hugging Face is written to the folder as a ``config.json``."""
        if self.model:
            changes = read_changes(list(self.changes))
            return choose_model(self.model, None, changes, vocab_size=None, seq_len=self.seq_len)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"dtype": "float32", **dict(map(_entry, self.hf))}))
        return choose_model(None, str(folder), {}, vocab_size=None, seq_len=self.seq_len)


def _entry(text: str) -> tuple[str, Any]:
    """Return the key and the value of ``n_embd=512`` or ``model_type=gpt2``."""
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):  # a word
        return key, value


def configurations() -> dict[str, Configuration]:
    """Return all by name.

    Raises:
        TableError: for one that is neither of our presets nor of Hugging Face, or both.
    """
    found = read_tables(FILE, Configuration)
    for name, one in found.items():
        if bool(one.model) == bool(one.hf):
            raise TableError(f"{FILE.name}, [{name}]: write model = ... or hf = [...], one of the two")
    return found


@dataclass(frozen=True, kw_only=True)
class Foresight:
    """Outcome that the planner expects.

    Attributes:
        seconds: of a step.
        bytes: of the fullest rank's device.
        misfit: why it does not fit; empty if it does.
        paced: share of the seconds that takes twice as long on a CPU which multiplies and launches at half the speed; its memory
            does not change.
    """

    seconds: float
    bytes: int
    misfit: str
    paced: float = 0.0


def planned(one: Configuration, machine: Machine, folder: Path) -> Foresight:
    """Return the plan of a configuration on a machine, with AdamW and clipping."""
    from meshfold.planner import explain_misfit

    model = one.choose(folder)
    found = _estimated(one, model, machine)
    seconds = step_speed(found, machine, one.precision).seconds
    pipeline = found.pipeline
    held = found.memory.total if pipeline is None else max(memory.total for memory in pipeline.memory)
    paced = 0.0
    if machine.kind == "cpu" and seconds:
        slower = _at_half_speed(machine)
        paced = step_speed(_estimated(one, model, slower), slower, one.precision).seconds / seconds - 1
    return Foresight(
        seconds=seconds, bytes=held, misfit=explain_misfit(found, machine), paced=min(1.0, max(0.0, paced))
    )


def _estimated(one: Configuration, model: ModelChoice, machine: Machine) -> Estimate:
    from meshfold.mesh import ParallelSpec

    return estimate(
        model.build,
        ParallelSpec.parse(one.spec, one.ranks),
        batch_size=one.batch,
        seq_len=one.seq_len,
        precision=one.precision,
        accumulate=one.accumulate,
        recompute=one.recompute or None,
        machine=machine,
        name=model.name,
    )


def _at_half_speed(machine: Machine) -> Machine:
    """Return a machine whose cores multiply and launch at half the speed, with the same memory and links."""
    return replace(
        machine,
        flops={precision: rate / 2 for precision, rate in machine.flops.items()},
        launches=replace(machine.launches, **{name: 2 * each for name, each in asdict(machine.launches).items()}),
    )


def runnable(found: Mapping[str, Configuration], *, device: str, ranks: int, memory: float) -> dict[str, Configuration]:
    """Return those for a kind of device, a number of them, and the bytes of each: one, two or four ranks, as many as there are."""
    return {
        name: one
        for name, one in found.items()
        if one.device == device and one.ranks <= ranks and one.least_gib * GiB <= memory
    }
