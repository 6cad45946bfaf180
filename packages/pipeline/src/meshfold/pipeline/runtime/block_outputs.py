"""The structure of a block's output, so that a placeholder for the block returns its input in the same structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from meshfold.mesh.tracking import set_tracked_layout, tracked_layout
from meshfold.pipeline.errors import ChainError
from meshfold.pipeline.runtime.placeholders import TensorPlaceholder
from meshfold.pipeline.runtime.stage_border import same_storage


@dataclass(frozen=True, kw_only=True)
class OutputForm:
    """The structure of a block's output, without values.

    Attributes:
        spec: the tree structure of the output.
        leaves: the shape of each tensor; other leaves unchanged.
        place: index of the leaf that has the shape of the block's input.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    place: int

    @classmethod
    def of(cls, output: Any, given: Tensor, kind: str) -> OutputForm:
        """Return the form of an output.

        Args:
            output: of a block.
            given: what the block was called with.
            kind: the block's class.

        Raises:
            ChainError: if nothing in it has the shape of the input.
        """
        leaves, spec = tree_flatten(output)
        place = next((i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.shape == given.shape), None)
        if place is None:
            others = [leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | bool | None)]
            if others:
                raise ChainError(
                    f"a {kind} returns a {type(others[0]).__name__}, whose contents are unknown: let blocks return a tensor, "
                    "or a tuple, list or dict of tensors"
                )
            shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            raise ChainError(
                f"a {kind} turns {tuple(given.shape)} into {shapes}: a model can be cut into stages only between blocks that keep "
                "the shape of their input"
            )
        without_values = (TensorPlaceholder(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec=spec, leaves=tuple(without_values), place=place)

    @property
    def key(self) -> object:
        """A key that is equal for forms that differ only in shapes and plain values."""
        return str(self.spec), self.place, tuple(isinstance(leaf, TensorPlaceholder) for leaf in self.leaves)

    @property
    def has_more(self) -> bool:
        """True if the output has more tensors than the one that the block was given."""
        return sum(isinstance(leaf, TensorPlaceholder) for leaf in self.leaves) > 1

    def __str__(self) -> str:
        """Return the shapes as a message names them: ``(1, 6, 16) and (1, 1, 16)``."""
        return " and ".join(str(tuple(leaf.shape)) for leaf in self.leaves if isinstance(leaf, TensorPlaceholder))

    def fill(self, given: Tensor, others: Sequence[Tensor] = ()) -> Any:
        """Return the output of a block that passes its input through.

        ``others``: other inputs of the block; an output of the same shape (the text next to an image) has the same layout.
        """
        made = [leaf.make(given.requires_grad) if isinstance(leaf, TensorPlaceholder) else leaf for leaf in self.leaves]
        for place, leaf in enumerate(made):
            known = [tracked_layout(x) for x in others if isinstance(leaf, Tensor) and x.shape == leaf.shape]
            if place != self.place and len(known) == 1:
                set_tracked_layout(made[place], known[0])
        made[self.place] = same_storage(given)
        return tree_unflatten(made, self.spec)


class OutputForms:
    """The output forms of a model's blocks that were recorded while all blocks were on this rank."""

    def __init__(self) -> None:
        self._seen: dict[int, OutputForm] = {}
        self._none: dict[int, ChainError] = {}  # blocks without one, and why

    def note(self, index: int, learn: Callable[[int], OutputForm]) -> OutputForm:
        """Record the form of a block, which ``learn`` calls. If it cannot run on placeholders, it gets the first block's."""
        try:
            form = learn(index)
        except Exception as error:
            if not self._seen:
                raise
            if isinstance(error, ChainError):
                self._none[index] = error
            form = next(iter(self._seen.values()))
        self._seen[index] = form
        return form

    def like(
        self,
        index: int,
        known: Mapping[int, OutputForm],
        here: Sequence[int],
        learn: Callable[[int], OutputForm],
    ) -> OutputForm:
        """Return the form of a block that may be on another rank.

        Args:
            index: of the block.
            known: of other blocks, for this shape of input.
            here: the blocks of this rank.
            learn: calls one of them for its form.
        """
        same = next((form for other, form in known.items() if self._alike(other, index)), None)
        if same is not None:
            return same
        mine = next((other for other in here if self._alike(other, index) and other not in self._none), None)
        if mine is None and index in self._seen:
            return self._seen[index]
        return learn(here[0] if mine is None else mine)

    def check(self, ranks: Sequence[Sequence[int]]) -> None:
        """Raise a ChainError for a block without a form before the last, or a rank that cannot build another one's output.

        Args:
            ranks: the blocks that each will have.
        """
        last = max(max(own) for own in ranks)
        for index, error in self._none.items():
            if index < last or any(len(own) == 1 and last in own for own in ranks):
                raise error
        for index, form in self._seen.items():
            if index == last or not form.has_more:  # the last block passes nothing on
                continue
            for own in ranks:
                if not any(self._alike(other, index) for other in own):
                    raise ChainError(
                        f"block {index} returns {form}, but block {own[0]} {self._seen.get(own[0], 'something else')}: ranks "
                        "without a block of the same form cannot stand in for it. Let all blocks return the same form"
                    )

    def _alike(self, one: int, other: int) -> bool:
        first, second = self._seen.get(one), self._seen.get(other)
        return first is second or (first is not None and second is not None and first.key == second.key)
