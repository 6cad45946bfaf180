"""What came of a case: equal to the plain loop, refused with a remedy, or a finding."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from integration_tests.fuzz import run
from integration_tests.fuzz.cases import Case
from integration_tests.fuzz.run import Raised, Refused, Trained
from integration_tests.house import ROOT
from meshfold.mesh import MeshfoldError
from meshfold.mesh.testing import close_pools, run_on_ranks
from meshfold.mesh.testing.pool import RankFailure

TIMEOUT_S = 150.0
TOLERANCE = 1e-9  # of a tensor's largest element, in float64
FAMILY_TOLERANCE = 2e-5  # models of transformers make losses and some norms in float32

#: Words of a message that says what to do.
REMEDY = re.compile(
    r"\b(use|write|give|leave|make|take|set|let|say|call|keep|put|raise|lower|pass|build|replace|choose|divide[sd]?|instead|rules=|with|without|or)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a case.

    Attributes:
        kind: ``equal``, ``refused``, ``invalid`` (nothing to compare with) or ``finding``.
        why: of a refusal the message, of a finding what is wrong, in a line.
        detail: tracebacks.
        seconds: on the ranks.
    """

    kind: str
    why: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def sort(self) -> str:
        """What many of a kind have in common: the first words, numbers and names of parts left out."""
        text = re.sub(r"^(parallel|pipeline|tensor|sequence|zero)=.*?\): ", "", self.why)
        text = re.sub(r"^[\w.()]+(, an? [\w.]+,|:) ", "", text)
        text = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^]]*\]|\b[\w.]*\d[\w.]*", "~", text)
        return " ".join(text.split()[:10])


def judge(case: Case, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Run a case on ranks and beside them in this process."""
    try:
        with torch.random.fork_rng():
            first = run.first_state(case) if case.made == "function" else None
            wanted = None
            if case.dropout:
                try:
                    wanted = run.alone(case)
                except MeshfoldError:
                    case = replace(case, dropout=0.0)
            wanted = wanted or run.serial(case, first)
    except Exception as error:
        return Verdict(kind="invalid", why=f"{type(error).__name__}: {error}"[:300])
    if not all(map(math.isfinite, [*wanted.losses, wanted.assessed])) or max(map(abs, wanted.losses)) > 1e6:
        return Verdict(kind="invalid", why="the plain loop's loss is not finite")
    with tempfile.TemporaryDirectory(prefix="meshfold-fuzz-") as folder:
        path = str(Path(folder) / "checkpoint")
        verdict = _half(case, path, 0, case.ranks, wanted, timeout_s)
        if verdict.kind == "equal" and case.then is not None:
            then = _half(case, path, 1, case.then_ranks, wanted, timeout_s)
            before = "going on, " if then.kind == "finding" else ""
            verdict = replace(then, why=before + then.why, seconds=verdict.seconds + then.seconds)
    if verdict.kind == "finding":
        close_pools()  # whatever is left of it must not trouble the next case
    return verdict


def _half(case: Case, folder: str, half: int, ranks: int, wanted: Trained, timeout_s: float) -> Verdict:
    try:
        answers = run_on_ranks(ranks, run.timed, case, folder, half, timeout_s=timeout_s)
    except RankFailure as error:
        what = "hang: " if "did not end" in str(error) else "died: "
        return Verdict(kind="finding", why=what + str(error).split("\n")[0], detail=error.detail)
    seconds = max(seconds for _, seconds in answers)
    found = [one for one, _ in answers]
    raised = [one for one in found if isinstance(one, Raised)]
    if raised:
        one = raised[0]
        why = f"raised in {one.where}: {one.kind}: {_line(one.text)}"
        return Verdict(kind="finding", why=why, detail=one.traceback, seconds=seconds)
    refused = [one for one in found if isinstance(one, Refused)]
    if refused:
        return _refusal(case, half, ranks, refused, wanted)
    trained = [one for one in found if isinstance(one, Trained)]
    why = compare(case, trained, wanted, half)
    if why and is_rounding(case, trained, wanted, half):
        return Verdict(kind="invalid", why=f"the plain loop multiplies rounding errors: {why}", seconds=seconds)
    return Verdict(kind="finding" if why else "equal", why=why, seconds=seconds)


def _line(text: str) -> str:
    """A text in one line, with paths from the checkout's root: what is kept says nothing of a machine."""
    return " ".join(text.split()).replace(f"{ROOT}/", "")[:400]


def _refusal(case: Case, half: int, ranks: int, refused: list[Refused], wanted: Trained) -> Verdict:
    told = [each for each in refused if "so the others end" in each.text]
    one = next(each for each in refused if each not in told or len(told) == len(refused))
    line, first = _line(one.text), f"step {half * case.steps * case.accumulation + 1}"
    if len(refused) < ranks:
        why = f"refused on {len(refused)} of {ranks} ranks in {one.where}: {line}"
    elif one.kind == "CollectiveError":
        why = f"raised in {one.where}: {one.kind}: {line}"
    elif harmed := [each.harmed for each in refused if each.harmed]:
        why = f"refused in {one.where}, and the model is harmed ({harmed[0]}): {line}"
    elif one.where not in ("engine", "load", first):
        why = f"refused late, in {one.where}: {line}"
    elif not REMEDY.search(one.text):
        why = f"refused without a remedy: {line}"
    else:
        why = "" if told else _unharmed(one, half, ranks, wanted)
        if told:
            close_pools()  # their connections are cut
    return Verdict(kind="finding" if why else "refused", why=why or line, detail=one.text)


def _unharmed(one: Refused, half: int, ranks: int, wanted: Trained) -> str:
    """What is wrong with the model after a step that was refused; empty: nothing."""
    if one.where == "engine":
        return ""
    try:
        after = run_on_ranks(ranks, run.after_refusal, timeout_s=TIMEOUT_S)[0]
    except RankFailure as error:
        return f"refused in {one.where}; then its state cannot be had: {_line(one.text)} {_line(str(error))}"
    off = [name for name, value in wanted.first.items() if _off(after.get(name), value) > TOLERANCE]
    return f"refused in {one.where}, and the weights changed ({off[:3]}): {_line(one.text)}" if off and not half else ""


def is_rounding(case: Case, found: list[Trained], wanted: Trained, half: int) -> bool:
    """Return whether a small difference is rounding that the training itself multiplies, as one that diverges does.

    The plain loop is run again, a few times, from weights that differ in their last digits. Where it misses itself by a hundredth
    of the tolerance, a difference of up to a thousand times the tolerance, 1e-6, says nothing of the ranks; where it misses itself
    by the whole tolerance, one of up to 1e-5.
    """
    if case.dropout or case.model.get("family"):
        return False
    for own, ours in ((TOLERANCE / 100, TOLERANCE * 1000), (TOLERANCE, TOLERANCE * 10_000)):
        generator = torch.Generator().manual_seed(0)
        if not compare(case, found, wanted, half, ours):
            return any(_misses_itself(case, found[0], wanted, half, generator, own) for _ in range(4))
    return False


def _misses_itself(
    case: Case,
    found: Trained,
    wanted: Trained,
    half: int,
    generator: torch.Generator,
    tolerance: float,
) -> bool:
    nudged = {
        name: value * (1 + 1e-15 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
        if value.is_floating_point()
        else value
        for name, value in wanted.first.items()
    }
    again = run.serial(case, nudged)
    losses, norms = len(found.losses), len(found.norms)
    again = replace(
        again,
        losses=again.losses[half * losses :][:losses],
        norms=again.norms[half * norms :][:norms],
        first=wanted.first,
    )
    return bool(compare(case, [again], wanted, half, tolerance))


def compare(case: Case, found: list[Trained], wanted: Trained, half: int, tolerance: float | None = None) -> str:
    """Return what differs between the ranks' training and the plain loop; empty: nothing.

    Args:
        case: what was trained.
        found: by each rank, in this half.
        wanted: of the plain loop, in both halves.
        half: 0, or 1 for what was resumed.
        tolerance: of a tensor's largest element; that of the kind of model by default.
    """
    one = found[0]
    if tolerance is None:
        tolerance = FAMILY_TOLERANCE if case.model.get("family") else TOLERANCE
    for rank, other in enumerate(found[1:], 1):
        if (other.losses, other.norms, other.assessed) != (one.losses, one.norms, one.assessed):
            return f"rank {rank} has other losses or norms than rank 0: {other.losses} and {one.losses}"
        for name, value in one.state.items():
            if not torch.equal(other.state[name], value):
                return f"rank {rank} has another state than rank 0: {name}"
    if list(one.state) != list(wanted.state):
        return f"names of the state: {sorted(set(one.state) ^ set(wanted.state))[:6]}, or their order"
    if half == 0:
        for name, value in wanted.first.items():
            if _off(one.first.get(name), value) > tolerance:
                return f"initial weights: {name} is off by {_off(one.first.get(name), value):.1e}"
    count = case.steps * case.accumulation
    for number, (got, want) in enumerate(zip(one.losses, wanted.losses[half * count :], strict=False), 1):
        if not abs(got - want) <= tolerance * max(1.0, abs(want)):
            return f"wrong loss in step {number}: {got!r}, not {want!r} ({got / want if want else 0:.6g} of it)"
    for number, (norm, other_norm) in enumerate(zip(one.norms, wanted.norms[half * case.steps :], strict=False), 1):
        if norm is None or other_norm is None:
            continue
        if not abs(norm - other_norm) <= tolerance * 10 * max(other_norm, 1e-6):
            return f"wrong norm of the gradient in step {number}: {norm!r}, not {other_norm!r}"
    if half == 1 or case.then is None:
        return _state(one, wanted, tolerance)
    return ""


def _state(one: Trained, wanted: Trained, tolerance: float) -> str:
    wrong = []
    for name, value in wanted.state.items():
        moved = float((value - wanted.first[name]).abs().max()) if value.is_floating_point() and value.numel() else 0.0
        off = _off(one.state[name], value)
        if off > tolerance or (moved > 1e-8 and _gap(one.state[name], value) > tolerance * 100 * moved + 1e-14):
            wrong.append(f"{name} off by {_gap(one.state[name], value):.2e} of a change of {moved:.2e}")
    if wrong:
        return f"wrong weights: {len(wrong)} of {len(wanted.state)}: {'; '.join(wrong[:3])}"
    if not abs(one.assessed - wanted.assessed) <= tolerance * max(1.0, abs(wanted.assessed)):
        return f"wrong loss of eval_step: {one.assessed!r}, not {wanted.assessed!r}"
    return ""


def _gap(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max()) if want.numel() else 0.0


def _off(got: Tensor | None, want: Tensor) -> float:
    """The largest difference, of the largest element."""
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not want.numel():
        return 0.0
    gap = _gap(got, want)
    return math.inf if math.isnan(gap) else gap / max(float(want.double().abs().max()), 1.0)
