"""The tensor-parallel modes: one table of layouts.

A mode defines the layouts of a transformer's tensors on the tensor axes. Everything else (collectives, cost, layers,
gradients, biases, norm weights) follows from the layout algebra. To make your own mode, write its row::

    mine = Mode(
        name="mine", axes=("u", "v"),
        residual="m:u h:v", column="k:u n:v", hidden="m:u n:v", row="k:u n:v",
        embedding="v:u h:v", ids="m v:u", head="k:u v:v", logits="m:u v:v",
    )
    print(mine)                                    # checked, with every collective
    parallelize(model, Mesh(dict(u=2, v=3)), mine)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from meshfold.mesh import Layout, LayoutError, Mesh, did_you_mean
from meshfold.tensor_parallel.plan import MatmulPlan, plan


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A row of the table. Layout strings use the dims m (tokens), h (hidden size), k and n (in and out), v (vocabulary).

    Attributes:
        name: what users write.
        axes: its mesh axes, outermost first.
        residual: the stream between blocks, ``m h``.
        column: the weight of a linear layer that reads the residual stream (QKV, up, gate), ``k n``.
        hidden: its output, ``m n``: heads, or the inner dim of an MLP.
        row: the weight of a linear layer that writes the residual stream (out, down), ``k n``.
        embedding: the table, ``v h``.
        ids: the one-hot matrix that an embedding multiplies with, never built: which tokens and which rows of the
            table a rank looks up, ``m v``.
        head: the LM head's weight, ``k v``.
        logits: its output, ``m v``.
        attention: ``"tokens"``: attention's linear layers have whole weights and multiply a rank's own tokens. An all-to-all
            exchanges tokens for heads after the projections, and another heads for tokens before the output projection
            (:mod:`meshfold.tensor_parallel.layers.head_exchange`). Empty: they are split as ``column`` and ``row`` say.
        paper: where it comes from.

    Raises:
        LayoutError: if a layout names an axis that the mode does not have, or the layouts do not fit each other.
    """

    name: str
    axes: tuple[str, ...]
    residual: str
    column: str
    hidden: str
    row: str
    embedding: str
    ids: str
    head: str
    logits: str
    attention: str = ""
    paper: str = ""

    def __post_init__(self) -> None:
        dims = {
            "residual": "m h",
            "column": "k n",
            "hidden": "m n",
            "row": "k n",
            "embedding": "v h",
            "ids": "m v",
            "head": "k v",
            "logits": "m v",
        }
        for role, wanted in dims.items():
            layout = self.layout(role)
            if list(layout) != wanted.split():
                raise LayoutError(
                    f"mode {self.name!r}: {role}={str(layout)!r} must have the dims {wanted!r}, in this order"
                )
            for axis in layout.axes:
                if axis not in self.axes:
                    raise LayoutError(
                        f"mode {self.name!r}: {role}={str(layout)!r} names the axis {axis!r}, which is not one of its axes "
                        f"{', '.join(self.axes)}.{did_you_mean(axis, self.axes)}"
                    )
        self._check_attention()
        _ = self.plans  # derived now, so that a wrong mode is refused when it is made
        _ = self.attention_plans

    def _check_attention(self) -> None:
        if self.attention not in ("", "tokens"):
            raise LayoutError(
                f"mode {self.name!r}: attention={self.attention!r} is not known: write attention='tokens', or leave it out"
            )
        residual, hidden = self.layout("residual"), self.layout("hidden")
        if self.attention and (residual["h"] or hidden["m"] or residual["m"] not in ((), hidden["n"])):
            raise LayoutError(
                f"mode {self.name!r}: attention='tokens' exchanges tokens for heads over one set of axes, so it needs a stream "
                f"split by tokens alone, as in residual='m:tensor h', hidden='m n:tensor'; these are {self.residual!r} and "
                f"{self.hidden!r}"
            )

    @cached_property
    def attention_plans(self) -> Mapping[str, MatmulPlan]:
        """The matmuls of attention's linear layers, column and row, where they are computed by tokens; else none.

        Whole weights, ``k n``, on a rank's own tokens: nothing is sent but the sum of the weights' gradients.
        """
        tokens = self.layout("residual")["m"]
        if not self.attention:
            return {}
        own = plan(Layout({"m": tokens, "k": ()}), Layout({"k": (), "n": ()}), Layout({"m": tokens, "n": ()}))
        return {"column": own, "row": own}

    def layout(self, role: str) -> Layout:
        """Return one of the layouts, parsed."""
        return Layout.parse(getattr(self, role))

    @cached_property
    def plans(self) -> Mapping[str, MatmulPlan]:
        """The matmuls of the mode: column, row, embedding, head and tied_head.

        Raises:
            LayoutError: naming the matmul whose layouts do not fit.
        """
        residual, hidden = self.layout("residual"), self.layout("hidden")
        embedding, logits = self.layout("embedding"), self.layout("logits")
        made: dict[str, MatmulPlan] = {}
        for role, x, w, y in (
            ("column", _named(residual, m="m", h="k"), self.layout("column"), hidden),
            ("row", _named(hidden, m="m", n="k"), self.layout("row"), _named(residual, m="m", h="n")),
            ("embedding", self.layout("ids"), embedding, residual),
            ("head", _named(residual, m="m", h="k"), self.layout("head"), logits),
            ("tied_head", residual, Layout({"h": embedding["h"], "v": embedding["v"]}), logits),
        ):
            try:
                made[role] = plan(x, w, y)
            except LayoutError as error:
                raise LayoutError(f"mode {self.name!r}, {role.replace('_', ' ')}: {error}") from None
        return made

    def batch_divisor(self, mesh: Mesh) -> int:
        """Return the number that the batch must be a multiple of for attention to be local: the blocks of m in ``hidden``."""
        return mesh.size(*self.layout("hidden")["m"])

    def head_divisor(self, mesh: Mesh) -> int:
        """Return the number that the heads must be a multiple of: the blocks of n in ``hidden``."""
        return mesh.size(*self.layout("hidden")["n"])

    def __str__(self) -> str:
        lines = [f"mode {self.name!r} on axes {', '.join(self.axes)}" + (f" ({self.paper})" if self.paper else "")]
        for field in fields(self):
            if field.name not in ("name", "axes", "attention", "paper"):
                lines.append(f"  {field.name:<10}{self.layout(field.name)}")
        for role, matmul in self.plans.items():
            lines += ["", f"{role.replace('_', ' ')}: {matmul}"]
        for role, matmul in self.attention_plans.items():
            where = "exchanged for heads behind it" if role == "column" else "exchanged for tokens in front of it"
            lines += ["", f"{role} of attention, {where}: {matmul}"]
        return "\n".join(lines)


def _named(layout: Layout, **names: str) -> Layout:
    """Return the layout with its dims renamed: ``_named(residual, m="m", h="k")``."""
    return Layout({names[dim]: axes for dim, axes in layout.items()})


_BY_TOKENS = dict(
    residual="m:tensor h",
    column="k n:tensor",
    hidden="m n:tensor",
    row="k:tensor n",
    embedding="v:tensor h",
    ids="m v:tensor",
    head="k v:tensor",
    logits="m v:tensor",
)
"""1D with a residual stream that is split by tokens."""
_GRID_2D = dict(
    residual="m:row h:col",
    column="k:row n:col",
    hidden="m:row n:col",
    row="k:row n:col",
    embedding="v:row h:col",
    ids="m v:row",
    head="k:row v:col",
    logits="m:row v:col",
)

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            name="1d",
            axes=("tensor",),
            paper="arXiv 1909.08053",
            residual="m h",
            column="k n:tensor",
            hidden="m n:tensor",
            row="k:tensor n",
            embedding="v:tensor h",
            ids="m v:tensor",
            head="k v:tensor",
            logits="m v:tensor",
        ),
        Mode(name="1d+sequence", axes=("tensor",), paper="arXiv 2205.05198", **_BY_TOKENS),
        Mode(name="1d+tokens", axes=("tensor",), paper="arXiv 2309.14509", **_BY_TOKENS, attention="tokens"),
        Mode(name="2d", axes=("row", "col"), paper="arXiv 2104.05343", **_GRID_2D),
        Mode(
            name="2.5d",
            axes=("depth", "row", "col"),
            paper="arXiv 2105.14500",
            residual="m:depth,row h:col",
            column="k:row n:col",
            hidden="m:depth,row n:col",
            row="k:row n:col",
            embedding="v:row h:col",
            ids="m:depth v:row",
            head="k:row v:col",
            logits="m:depth,row v:col",
        ),
        Mode(
            name="3d",
            axes=("a", "b", "c"),
            paper="arXiv 2105.14450",
            residual="m:a,c h:b",
            column="k:b,a n:c",
            hidden="m:a,b n:c",
            row="k:c,a n:b",
            embedding="v:c,a h:b",
            ids="m:a v:c",
            head="k:b,a v:c",
            logits="m:a,b v:c",
        ),
    )
}
"""The built-in modes by name."""


def find_mode(mode: str | Mode) -> Mode:
    """Return a built-in mode by name, or the mode itself.

    Raises:
        LayoutError: for an unknown name.
    """
    if isinstance(mode, Mode):
        return mode
    if not isinstance(mode, str) or mode not in MODES:
        hint = did_you_mean(mode, MODES) if isinstance(mode, str) else ""
        raise LayoutError(
            f"no tensor-parallel mode {mode!r}.{hint} There are {', '.join(MODES)}, or make a Mode of your own"
        )
    return MODES[mode]


def outside_blocks(mode: Mode) -> Mode:
    """Return the mode for the parts of a model where the residual stream has all its tokens on every rank.

    Raises:
        LayoutError: if the mode's weights only fit a stream that is split by tokens.
    """
    residual = mode.layout("residual").replace(m=())
    try:
        return replace(mode, name=f"{mode.name} (all tokens)", residual=str(residual), attention="")
    except LayoutError as error:
        raise LayoutError(
            f"mode {mode.name!r} splits tokens within sequences, from the first block of a model to the last. Outside of "
            f"the blocks it needs a form with all tokens, which does not fit: {error}; or write the model with "
            f"flat_tokens = True"
        ) from None


def split_evenly(size: int, axes: tuple[str, ...], mesh: Mesh, what: str) -> None:
    """Raise a LayoutError unless the blocks of the axes divide the size."""
    blocks = mesh.size(*axes)
    if size % blocks:
        raise LayoutError(
            f"{what} cannot be split over {', '.join(axes)} ({blocks} blocks): use a multiple of {blocks}, such as "
            f"{neighbours(size, blocks)}"
        )


def neighbours(size: int, multiple: int) -> str:
    """Return the multiples next to a size: ``'8 or 12'``."""
    below = size // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


def vocabulary_multiple(mode: Mode, mesh: Mesh) -> int:
    """Return the multiple that a vocabulary is padded to, so that table, head and logits can all be split."""
    splits = [mode.layout("embedding")["v"], mode.layout("head")["v"], mode.layout("logits")["v"]]
    return math.lcm(*(mesh.size(*axes) for axes in splits))
