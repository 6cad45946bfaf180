"""Report of ``parallelize``, submodule by submodule."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from meshfold.mesh import metadata
from meshfold.mesh.spec import format_table


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One submodule.

    Attributes:
        name: full name.
        role: its role.
        was: its class before.
        weights: layout of its weight, or how it was changed.
        shape: global shape of its weight, elements.
        local: shape of this rank's block, elements.
    """

    name: str
    role: str
    was: str
    weights: str
    shape: tuple[int, ...] = ()
    local: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Report:
    """A readable report of a conversion; ``print(report)``.

    Attributes:
        mode: name of the mode.
        mesh: the mesh, as text.
        placed: the layout of each submodule.
        parameters: global number of parameters, each tensor once.
        local_parameters: this rank's, padding included.
        notes: what else was done (heads, regions, loss).
    """

    mode: str
    mesh: str
    placed: list[Placed] = field(default_factory=list)
    parameters: int = 0
    local_parameters: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [("submodule", "role", "was", "weight", "global", "this rank")]
        rows += [
            (
                p.name or "(root)",
                p.role,
                p.was,
                p.weights,
                "×".join(map(str, p.shape)),
                "×".join(map(str, p.local)),
            )
            for p in self.placed
        ]
        lines = [f"mode {self.mode} on {self.mesh}", *format_table(rows)]
        share = self.local_parameters / self.parameters if self.parameters else 1.0
        lines.append(f"{self.parameters:,} parameters, {self.local_parameters:,} on this rank ({share:.1%})")
        return "\n".join([*lines, *self.notes])


def placed(name: str, role: str, was: str, made: nn.Module, said: str = "") -> Placed:
    """Return the entry of a submodule of the class ``was``; ``said`` describes one that was kept."""
    weight = getattr(made, "weight", None)
    meta = metadata(weight) if weight is not None else None
    if said:
        return Placed(name=name, role=role, was=was, weights=said)
    if meta is None:
        return Placed(name=name, role=role, was=was, weights="")
    plan = getattr(made, "plan", None)
    by_dim = " ".join(",".join(axes) or "–" for axes in meta.placement.axes)
    return Placed(
        name=name,
        role=getattr(made, "role", role),
        was=was,
        weights=by_dim if plan is None else str(plan.w),
        shape=meta.placement.shape,
        local=meta.placement.local_shape(meta.mesh),
    )
