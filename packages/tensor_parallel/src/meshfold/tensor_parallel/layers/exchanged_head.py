"""Operands for the loss of a head whose own product is no local matmul: a tied head in 2D and 2.5D, any in 3D.

Such a head makes partial sums of logits, which are much larger than its operands. For a loss the operands move instead::

    x  m:row h:col  ->  m k             gathered
    w  v:row h:col  ->  v:row,col k     by an all-to-all over the axes of k

so that each rank has all rows, or those that other axes leave to it, and its own words of all ranks that share the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels import VocabularyShard
from meshfold.mesh import Mesh, collectives
from meshfold.mesh.collectives import bind_enter, bind_exchange, bind_gather
from meshfold.tensor_parallel.plan import MatmulPlan

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ExchangedHead:
    """The moves of a head's operands.

    Attributes:
        mesh: where they lie.
        tokens: axes that split the rows of the loss.
        gathered: axes that split the rows of x, and not those of the loss.
        features: axes that split k of x.
        words, inner: axes that split n and k of the weight; both split the words of the loss, ``inner`` within ``words``.
        outputs: axes that split the bias.
    """

    mesh: Mesh
    tokens: Axes
    gathered: Axes
    features: Axes
    words: Axes
    inner: Axes
    outputs: Axes

    @classmethod
    def of(cls, plan: MatmulPlan, mesh: Mesh) -> ExchangedHead | None:
        """Return the moves for a plan; None if ranks that share the weight would not have the same rows then."""
        shares = {*plan.w[plan.n], *plan.w[plan.k]}
        rows = plan.x[plan.m]
        kept = tuple(axis for axis in rows if axis not in shares)
        moved = rows[len(kept) :]
        if rows[: len(kept)] != kept or {*moved, *plan.x[plan.k]} != shares:
            return None
        return cls(
            mesh=mesh,
            tokens=kept,
            gathered=moved,
            features=plan.x[plan.k],
            words=plan.w[plan.n],
            inner=plan.w[plan.k],
            outputs=plan.y[plan.n],
        )

    def shard(self, rows: int, size: int) -> VocabularyShard:
        """Return this rank's words of ``size``, if it holds ``rows`` of the weight, padding included."""
        start, columns = self._place(rows)
        mine = rows - self.mesh.index(*self.inner) * columns
        group = self.mesh.group(*self.words, *self.inner)
        return VocabularyShard(
            start=start,
            valid=max(min(columns, mine, size - start), 0),
            size=size,
            all_reduce_max=lambda values: collectives.all_reduce(values, group, "max"),
            all_reduce_sum=lambda values: collectives.all_reduce(values, group),
        )

    def operands(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows ``m k``, weight ``v k`` and bias ``v`` of x ``.. k``, weight ``n k`` and bias ``n``, as ranks hold them."""
        mesh = self.mesh
        rows = bind_gather(mesh, 1, self.features)(bind_gather(mesh, 0, self.gathered)(x.reshape(-1, x.shape[-1])))
        start, columns = self._place(weight.shape[0])
        more = columns * mesh.size(*self.inner) - weight.shape[0]
        mine = F.pad(bind_enter(mesh, self.tokens)(weight), (0, 0, 0, more))
        mine = bind_exchange(mesh, 0, 1, self.inner)(mine)
        if bias is None:
            return rows, mine, None
        others = (*self.tokens, *(axis for axis in (*self.words, *self.inner) if axis not in self.outputs))
        every = bind_gather(mesh, 0, self.outputs)(bind_enter(mesh, others)(bias))
        return rows, mine, F.pad(every, (0, columns))[start : start + columns]

    def _place(self, rows: int) -> tuple[int, int]:
        """Return the first word of this rank, and how many it has with padding."""
        columns = -(-rows // self.mesh.size(*self.inner))
        return self.mesh.index(*self.words) * rows + self.mesh.index(*self.inner) * columns, columns
