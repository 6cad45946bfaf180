"""Attention heads: their number, whether they can be split, and the local counts that are set on a module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from meshfold.mesh import LayoutError, Mesh, Part
from meshfold.tensor_parallel.convert.roles import FUSED_QKV, INTERLEAVED_QKV, KEY_VALUE, QUERY
from meshfold.tensor_parallel.modes import Mode, neighbours
from meshfold.tensor_parallel.module_kinds import features, is_linear

_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_heads", "n_kv_head")
_GROUPS = ("num_key_value_groups", "n_rep")
_HEAD_DIMS = ("head_dim", "attention_head_size", "d_head", "head_size")
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim", "n_embd", "hidden_size", "d_model")
"""What modules call the width of all their heads together."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of an attention module.

    Attributes:
        query: full names of the projections that compute only queries.
        key_value: full names of those that compute keys or values.
        fused: full names of those that compute all three, concatenated.
        interleaved: full names of those that compute for one key/value head after the other: its queries, key and value.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: elements a head.
    """

    query: tuple[str, ...]
    key_value: tuple[str, ...]
    fused: tuple[str, ...]
    interleaved: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def projections(self) -> tuple[str, ...]:
        """Full names of all projections that read the attention's input."""
        return (*self.query, *self.key_value, *self.fused, *self.interleaved)

    def kept_together(self, name: str) -> int:
        """Return the elements of a projection's output that must not be split: those of a head, or of a group of heads."""
        return (self.heads // self.kv_heads + 2 if name in self.interleaved else 1) * self.head_dim

    def repeat(self, mesh: Mesh, mode: Mode) -> int:
        """Return how many neighbouring ranks hold the same key/value head."""
        return max(1, mode.head_divisor(mesh) // self.kv_heads)

    def parts(self, name: str, mesh: Mesh, mode: Mode) -> tuple[Part, ...]:
        """Return the parts of a projection's output."""
        kv = Part(self.kv_heads * self.head_dim, self.repeat(mesh, mode))
        whole = (Part(self.heads * self.head_dim), kv, kv)
        return (
            whole[:1]
            if name in self.query
            else whole[1:2]
            if name in self.key_value
            else whole
            if name in self.fused
            else ()
        )

    def counted(self, number: int, mesh: Mesh, mode: Mode) -> Part | None:
        """Return the part that a number of heads is split as, in heads: of queries, or of keys. None for any other number."""
        repeats = {self.kv_heads: self.repeat(mesh, mode), self.heads: 1}
        return Part(number, repeats[number]) if number in repeats else None

    def normalised(self, size: int, mesh: Mesh, mode: Mode) -> Part | None:
        """Return the part of a projection that a norm of ``size`` normalises, all heads together: of queries, or of keys. None for
        any other size.
        """
        heads = None if size % self.head_dim else self.counted(size // self.head_dim, mesh, mode)
        return None if heads is None else Part(size, heads.repeat)

    def check(self, name: str, mesh: Mesh, mode: Mode) -> None:
        """Raise a LayoutError if the heads cannot be split."""
        blocks = mode.head_divisor(mesh)
        axes = ", ".join(mode.layout("hidden")["n"])
        if self.heads % blocks:
            raise LayoutError(
                f"{name}: {self.heads} attention heads cannot be split over {axes} ({blocks} blocks): use a multiple of "
                f"{blocks} heads, such as {neighbours(self.heads, blocks)}, or a mesh whose {axes} divides {self.heads}"
            )
        if self.interleaved and self.kv_heads % blocks:
            raise LayoutError(
                f"{name}: {self.kv_heads} groups of {self.heads // self.kv_heads} queries, a key and a value each cannot be split "
                f"over {axes} ({blocks} blocks): use a mesh whose {axes} divides {self.kv_heads}, or keep all of the attention "
                f"whole: {name!r}: 'replicate'"
            )
        if self.kv_heads % blocks and blocks % self.kv_heads:
            raise LayoutError(
                f"{name}: {self.kv_heads} key/value heads cannot be split over {axes} ({blocks} blocks), nor {blocks} blocks "
                f"share {self.kv_heads} heads evenly: use a number of key/value heads that divides {blocks} or is a multiple of it"
            )

    def set_counts(self, module: nn.Module, mesh: Mesh, mode: Mode) -> None:
        """Set the module's own counts of heads and widths to the local ones."""
        blocks = mode.head_divisor(mesh)
        local, local_kv = self.heads // blocks, max(1, self.kv_heads // blocks)
        for names, value in ((_HEADS, local), (_KV_HEADS, local_kv), (_GROUPS, local // local_kv)):
            for name in names:
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, value)
        for name in _WIDTHS:
            if getattr(module, name, None) == self.heads * self.head_dim:
                setattr(module, name, local * self.head_dim)


def find_heads(name: str, module: nn.Module) -> Heads | None:
    """Return the heads of a module whose direct children are attention projections; None for any other module.

    Raises:
        LayoutError: if neither attributes nor shapes show the number of heads.
    """
    linears = {leaf: child for leaf, child in module.named_children() if is_linear(child)}
    query = [leaf for leaf in linears if QUERY.fullmatch(leaf)]
    key_value = [leaf for leaf in linears if KEY_VALUE.fullmatch(leaf)]
    fused = [leaf for leaf in linears if FUSED_QKV.fullmatch(leaf)]
    interleaved = [leaf for leaf in linears if INTERLEAVED_QKV.fullmatch(leaf)]
    if not fused and not interleaved and not (query and key_value):
        return None
    heads, kv_heads = _first_int(module, _HEADS), _first_int(module, _KV_HEADS)
    head_dim = _first_int(module, _HEAD_DIMS)
    if fused or interleaved:
        width = features(linears[[*fused, *interleaved][0]])[1]
        if not heads and head_dim:
            heads = width // head_dim - 2 * kv_heads if kv_heads else width // 3 // head_dim
        kv_heads = kv_heads or heads
        head_dim = width // (heads + 2 * kv_heads) if heads else 0
        if not head_dim or width != (heads + 2 * kv_heads) * head_dim or heads % kv_heads:
            raise LayoutError(
                f"{name}: cannot tell the heads in its fused projection of width {width}: give the module the attributes "
                f"num_heads, num_key_value_heads (if fewer) and head_dim"
            )
        if kv_heads == 1:  # a single group: queries, key and value are concatenated
            fused, interleaved = [*fused, *interleaved], []
    else:
        wide, narrow = features(linears[query[0]])[1], features(linears[key_value[0]])[1]
        if not head_dim and heads:
            head_dim = wide // heads
        if not head_dim:
            raise LayoutError(
                f"{name}: cannot tell its number of heads: give the module an attribute num_heads or head_dim"
            )
        heads, kv_heads = wide // head_dim, narrow // head_dim

    def full(leaves: list[str]) -> tuple[str, ...]:
        return tuple(f"{name}.{leaf}" if name else leaf for leaf in leaves)

    return Heads(
        query=full(query),
        key_value=full(key_value),
        fused=full(fused),
        interleaved=full(interleaved),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _first_int(module: nn.Module, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
