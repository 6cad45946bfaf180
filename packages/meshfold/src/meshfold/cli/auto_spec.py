"""``meshfold train --parallel auto``: the spec that ``meshfold suggest`` puts first for the devices at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshfold.cli.arguments import AUTO, Failure

if TYPE_CHECKING:
    from meshfold.train.progress import Progress
    from meshfold.train.settings import TrainSettings


def with_chosen_spec(
    settings: TrainSettings, ranks: int | None, progress: Progress, machine: str | None = None
) -> tuple[TrainSettings, list[str]]:
    """Return the settings with a spec, and the words of the command line that say what was chosen.

    All ranks of a job choose the same: it follows from the settings and from the kind of their devices.

    Args:
        settings: of the run; unchanged unless their spec is ``auto``.
        ranks: world size, if given or running; by default one for each GPU.
        progress: is told what was chosen.
        machine: a name or a file of ``meshfold calibrate``, instead of the preset of the devices' kind.

    Raises:
        SpecError: if no spec fits, and for an unknown machine.
        Failure: if ``accumulate`` or ``recompute`` leave nothing to choose.
    """
    if settings.parallel != AUTO:
        return settings, []
    if settings.resume:
        raise Failure("--parallel auto with --resume: type the spec that settings.json has, or another one")
    from meshfold.planner import find_machine
    from meshfold.planner.suggestions import choice_words, suggest_here
    from meshfold.train.model_choice import choose_model

    model = choose_model(settings.model, settings.hf, settings.changes, vocab_size=None, seq_len=settings.seq_len)
    found = suggest_here(
        model.build,
        batch_size=settings.batch_size,
        seq_len=settings.seq_len,
        ranks=ranks,
        device=settings.device,
        machine=None if machine is None else find_machine(machine),
        precision=settings.precision,
        optimizer=settings.optimizer,
        rules=settings.rules,
        clip=settings.clip > 0,
        accumulate=None if settings.accumulate == 1 else settings.accumulate,
        name=model.name,
    )
    best = found.best.candidate
    progress.say(f"--parallel auto chose {choice_words(found)}")
    chosen = replace(
        settings,
        parallel=best.spec.to_dict(),
        accumulate=best.accumulate,
        recompute=settings.recompute or best.recompute,
    )
    words = ["--parallel", repr(chosen.parallel), "--accumulate", str(chosen.accumulate)]
    return chosen, words + (["--recompute", chosen.recompute] if chosen.recompute else [])
