"""Analysis of a model before anything of it is changed: roles, heads, blocks, and the mode of each part."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.tensor_parallel.convert.attention_check import BIASES, AttentionTrial
from meshfold.tensor_parallel.convert.blocks import Blocks, find_blocks
from meshfold.tensor_parallel.convert.boundary import Boundary
from meshfold.tensor_parallel.convert.heads import Heads, find_heads
from meshfold.tensor_parallel.convert.roles import (
    ROLES,
    WHOLE,
    classify,
    is_head_norm,
    offered_rules,
    usual_role,
)
from meshfold.tensor_parallel.convert.shared_input import changes_tokens
from meshfold.tensor_parallel.layers.multihead import why_torchs
from meshfold.tensor_parallel.modes import Mode, outside_blocks
from meshfold.tensor_parallel.module_kinds import check_norm, features, is_linear, norm_kind, norm_size


class Analysis:
    """A model analysed for a mode.

    Attributes:
        modules: all of them by full name, parents first.
        roles: of each module.
        vocabulary: words in the head, or in the token table of a model without one.
        flat: the model's own code works on ``m h``.
        heads: of each attention module that is split.
        lists: the lists of blocks.
        begins: the residual stream begins inside of the model, at an embedding, patches or a stem.
        by_sequences: the stream's tokens are split by whole sequences.
        only_blocks: tokens are split within sequences, in the lists of blocks alone. Outside the stream is whole: the model's
            own code reads batch and length there.
        outer: the mode outside of the blocks.
        boundaries: of lists of blocks, or of the model (None): there the stream is split and gathered.
        stand_ins: attention whose code takes its width from its input, with the width of this rank's heads; found by
            :meth:`check`.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        mode: Mode,
        rules: Mapping[str, str],
        *,
        blocks_apart: bool = False,
        adapted: bool = False,
    ) -> None:
        """Args:
        blocks_apart: let each block split and join the stream by itself.
        adapted: projections have adapters that read their input too.
        """
        self.model, self.mesh, self.mode, self._rules = model, mesh, mode, rules
        self._adapted = adapted
        self.modules = dict(model.named_modules())
        self.roles = classify(model, rules)
        self.vocabulary = self._vocabulary()
        self.flat = bool(getattr(model, "flat_tokens", False))
        self.heads = {
            name: heads
            for name, module in self.modules.items()
            if not self._is_whole(name) and (heads := find_heads(name, module))
        }
        columns, rows = self.roles.named("column"), self.roles.named("row")
        self.lists = find_blocks(self.modules, columns, rows, one_by_one=blocks_apart)
        self.begins = any(self.roles.named(role) for role in ("embedding", "patch", "stem", "source"))
        residual, hidden = mode.layout("residual"), mode.layout("hidden")
        self.by_sequences = bool(hidden["m"]) or not residual["m"]
        self.only_blocks = self.begins and not self.flat and not self.by_sequences
        self.outer = outside_blocks(mode) if self.only_blocks else mode
        self.boundaries = self._boundaries()
        self.stand_ins: dict[str, int] = {}

    def mode_at(self, name: str) -> Mode:
        """Return the mode that holds where a module stands."""
        inside = not self.only_blocks or any(blocks.holds(name) for blocks in self.lists)
        return self.mode if inside else self.outer

    def flat_at(self, name: str) -> Boundary | None:
        """Return the boundary at which the stream that a module sees was flattened; None if it was not."""
        for blocks, boundary in self.boundaries:
            if boundary.flatten and (blocks is None or blocks.holds(name)):
                return boundary
        return None

    def children(self, name: str, role: str) -> list[str]:
        """Return the full names of a module's direct children of a role."""
        leaves = (f"{name}.{leaf}" if name else leaf for leaf, _ in self.modules[name].named_children())
        return [full for full in leaves if self.roles.role.get(full) == role]

    def needs_region(self, name: str) -> bool:
        """Return True if attention's own code would miscount its tokens where its layers gather their input themselves."""
        if name not in self.heads or self.flat:
            return False
        return changes_tokens(self.mode_at(name).plans["column"]) or self.flat_at(name) is not None

    def check(self) -> None:
        """Raise a LayoutError for what cannot be placed, and for heads and norms that cannot be split."""
        if self.roles.refused:
            listed = "\n".join(f"  {name or '(root)'}: {why}" for name, why in self.roles.refused.items())
            raise LayoutError(
                f"cannot place {len(self.roles.refused)} submodule(s):\n{listed}\nSay what they are with "
                f"{self._offer()}; role 'replicate' keeps a submodule whole on every rank. Roles are {', '.join(ROLES)}"
            )
        if not self.roles.role:
            raise LayoutError(
                f"nothing to split in {type(self.model).__name__}: it has no layer that a tensor-parallel mode knows"
            )
        if self.roles.role.get("", "replicate") != "replicate":
            raise LayoutError(
                f"{type(self.model).__name__}, the module to parallelize, is taken for a single layer (role "
                f"{self.roles.role['']!r}): put it in a module of its own (nn.Sequential(layer)), or make "
                "meshfold.tensor_parallel.Linear and its like directly"
            )
        for name, heads in self.heads.items():
            self._check_projections(name, heads)
        self._check_rules_fit()
        for name, heads in self.heads.items():
            heads.check(name, self.mesh, self.mode)
            self._check_region(name)
        for name in self.roles.named("head_norm"):
            self._check_head_norm(name)
        for name in (*self.roles.named("norm"), *self.roles.named("head_norm")):
            with torch.device("cpu"):  # the caller may have chosen the meta device
                check_norm(name, self.modules[name])
        for name in self.roles.named("replicate"):
            self._check_whole(name)
            self._check_joined(name)
        self._check_torchs_attention()
        self._check_two_streams()
        self._check_shared_by_blocks()
        for name, heads in self.heads.items():
            self._check_code(name, heads)

    def _offer(self) -> str:
        """Return rules for the refused modules, ready to paste if they are known to work; otherwise their form."""
        pairs = offered_rules(self.model, self.roles)
        if pairs:
            try:
                Analysis(self.model, self.mesh, self.mode, {**self._rules, **pairs}).check()
            except LayoutError:
                pairs = {}
        if not pairs:
            return "rules={'name or pattern': role}"
        written = ", ".join(f'"{pattern}": "{role}"' for pattern, role in pairs.items())
        return f"rules={{{written}}}, if a row layer reads what the column layer before it writes"

    def _check_rules_fit(self) -> None:
        """Raise a LayoutError for a linear layer whose rule does not fit the layers beside it: a row layer reads what a
        column layer writes.
        """
        for name in self.roles.by_rule:
            if not is_linear(self.modules[name]):
                continue
            role, parent = self.roles.role[name], name.rpartition(".")[0]
            reads, writes = features(self.modules[name])
            columns = [other for other in self.children(parent, "column") if other != name]
            rows = [other for other in self.children(parent, "row") if other != name]
            wide = {features(self.modules[other])[1] for other in columns}
            narrow = {features(self.modules[other])[0] for other in rows}
            hidden = self.roles.hidden
            if role == "row":
                columns = self._columns_before(name)
                wrong = reads not in self._row_widths(columns, narrow)
            elif role in ("column", "replicate") and reads in wide and writes == hidden != reads:
                wrong = True  # what writes the residual stream reads what is split
            else:
                wrong = role == "replicate" and reads == hidden and writes in wide & narrow
            if wrong:
                beside = ", ".join(columns) or "none"
                raise LayoutError(
                    f"{name}: Linear({reads}, {writes}) cannot be {role!r} by itself: a row layer reads what column layers "
                    f"beside it write (here: {beside}). They go together: what reads the residual stream is 'column', what "
                    f"writes it is 'row'; or keep all of it whole: {_everywhere(parent)}: 'replicate'"
                )

    def _row_widths(self, columns: list[str], taken: set[int]) -> set[int]:
        """Return the widths that a row layer may read behind column layers; ``taken`` are read by other row layers."""
        wide = {features(self.modules[column])[1] for column in columns}
        halves = {width // 2 for width in wide - taken}  # gate and up in one
        mine = set(columns)
        return (
            wide | halves | {h.heads * h.head_dim for h in self.heads.values() if mine & set(h.projections)}
        )

    def _columns_before(self, name: str) -> list[str]:
        """Return the column layers of the nearest enclosing module whose output no other row layer reads."""
        around, inner = name.rpartition(".")[0], True
        while True:
            columns = [
                column
                for column in self.roles.named("column")
                if (not around or column.startswith(f"{around}."))
                and (inner or not self.children(column.rpartition(".")[0], "row"))
            ]
            if columns or not around:
                return columns
            around, inner = around.rpartition(".")[0], False

    def _check_torchs_attention(self) -> None:
        """Raise a LayoutError for attention with dropout that keeps torch's forward: it would drop other weights on every rank."""
        for name, module in self.modules.items():
            if (
                isinstance(module, nn.MultiheadAttention)
                and module.dropout > 0
                and (why := why_torchs(module))
            ):
                raise LayoutError(
                    f"{name}: {type(module).__name__} with dropout={module.dropout} would drop different weights on each rank, as "
                    f"it keeps torch's own code: {why}. Set its dropout to 0"
                )

    def _check_two_streams(self) -> None:
        """Raise a LayoutError for an encoder-decoder whose two streams do not lie as attention reads them."""
        if not getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            return
        if self.only_blocks or any(self.needs_region(name) for name in self.heads):
            raise LayoutError(
                f"{type(self.model).__name__} is an encoder-decoder, which mode {self.mode.name!r} cannot split: attention has "
                "other tokens than the stream there, and the encoder's output is not gathered for the decoder's blocks. "
                "Use mode '1d', '2d' or '2.5d'"
            )

    def _check_shared_by_blocks(self) -> None:
        """Raise a LayoutError for a layer used inside blocks and outside: it would get split tokens here and whole ones there."""
        if not self.only_blocks:
            return
        members = {member for blocks in self.lists for member in blocks.members.values()}
        inside = {module for member in members for module in member.modules()}
        outside, found = {self.model}, [self.model]
        while found:
            found = [
                m for module in found for m in module.children() if m not in members and m not in outside
            ]
            outside.update(found)
        for name, module in self.modules.items():
            if module in inside & outside and next(module.parameters(recurse=False), None) is not None:
                raise LayoutError(
                    f"{name}, one {type(module).__name__}, is used inside blocks, where mode {self.mode.name!r} splits "
                    f"tokens, and outside them: make two of it, or use mode '1d'"
                )

    def _check_projections(self, name: str, heads: Heads) -> None:
        """Raise a LayoutError unless all projections of an attention are split, or none."""
        other = [p for p in heads.projections if self.roles.role.get(p) != "column"]
        prefix = f"{name}." if name else ""
        other += [
            said
            for said in self.roles.by_rule
            if said.rpartition(".")[0] == prefix[:-1]
            and said not in heads.projections
            and self.roles.role[said] == "column"
            and usual_role(said, self.modules[said], self.model, self.roles.hidden) == "row"
        ]
        if other:
            listed = ", ".join(f"{p} is {self.roles.role.get(p)!r}" for p in other)
            raise LayoutError(
                f"{name or '(root)'}: {listed}, but the projections {', '.join(heads.projections)} go together: all of them "
                f"are 'column' and the layer that writes the output is 'row', so that a rank has whole heads; or keep all of "
                f"the attention whole: {_everywhere(name)}: 'replicate'"
            )

    def _check_code(self, name: str, heads: Heads) -> None:
        """Raise a LayoutError unless attention's own code works on the heads of one rank."""
        biases = tuple(n for n in self.roles.named("head_bias") if n.rpartition(".")[0] == name)
        split = bool(self.roles.named("head_bias"))
        module, local = self.modules[name], heads.heads // self.mode.head_divisor(self.mesh) * heads.head_dim
        trial = partial(AttentionTrial, name, module, heads, self.mesh, self.mode, biases, split)
        if why := trial(self._input_width(name)).why_not():
            if self._only_attention(name) and not self._adapted and not trial(local, stand_in=True).why_not():
                self.stand_ins[name] = local
                return
            where = (
                ""
                if not self._splits_rows() or not set(BIASES) & set(_takes(self.modules[name]))
                else ", in mode '1d' or '1d+sequence', where that is made for all rows"
            )
            where = (
                ", in mode '1d'"
                if self._splits_stream() and "residual" in _takes(self.modules[name])
                else where
            )
            raise LayoutError(
                f"{name or '(root)'}: attention that cannot be split by heads: {why}. Keep all of it whole on every rank "
                f"with the rule {_everywhere(name)}: 'replicate'{where}; MLPs and tables are split all the same"
            )

    def _input_width(self, name: str) -> int:
        """Return the last dim of attention's input: the stream's local columns, folded where a region gathers it."""
        width = self.roles.hidden // self.mesh.size(*self.mode_at(name).layout("residual")["h"])
        plan = self.mode.plans["column"]
        folds = self.mesh.size(*(axis for dim, axis in plan.extras("y") if dim == plan.m))
        return width * folds if self.needs_region(name) else width

    def _splits_rows(self) -> bool:
        """Return True if ranks have different rows of the batch, masks included."""
        return self.by_sequences and self.mesh.size(*self.mode.layout("residual")["m"]) > 1

    def _splits_stream(self) -> bool:
        return self.mesh.size(*self.mode.layout("residual")["m"], *self.mode.layout("residual")["h"]) > 1

    def _check_joined(self, name: str) -> None:
        """Raise a LayoutError for a whole module with a second argument of the stream, or made for a rank's rows: only the
        first is gathered.
        """
        takes = _takes(self.modules[name])
        split = ["residual"] if self._splits_stream() else []
        split += BIASES if self._splits_rows() else []
        if wrong := [argument for argument in split if argument in takes]:
            modes = "mode '1d'" if "residual" in takes else "mode '1d' or '1d+sequence'"
            raise LayoutError(
                f"{name}: {type(self.modules[name]).__name__} cannot stay whole in mode {self.mode.name!r}: it takes "
                f"{', '.join(wrong)} as well, and only a module's first argument is joined; use {modes}"
            )

    def _check_region(self, name: str) -> None:
        """Raise a LayoutError for attention with other layers in its module, if its input is gathered in front of it."""
        if self.needs_region(name) and not self._only_attention(name):
            raise LayoutError(
                f"{name or '(root)'}: in mode {self.mode.name!r} attention has other tokens than the residual stream, so its "
                f"input is gathered for the module of its projections; let a module of their own hold "
                f"{', '.join(self.heads[name].projections)} and the layer that writes the output, without norms or MLP"
            )

    def _check_head_norm(self, name: str) -> None:
        """Raise a LayoutError for a norm of queries or keys that does not normalise each head by itself."""
        attention = name.rpartition(".")[0]
        size = norm_size(self.modules[name])
        whole = f"keep all of the attention whole: {attention!r}: 'replicate'"
        if attention not in self.heads:
            raise LayoutError(
                f"{name}: a norm of heads must be a child of the module that holds the attention's projections; give it the "
                f"rule 'norm' if it normalises the residual stream"
            )
        if size != self.heads[attention].head_dim:
            raise LayoutError(
                f"{name}: normalises {size} elements together, but heads of {self.heads[attention].head_dim} are split over "
                f"ranks: let it normalise each head by itself, or {whole}"
            )

    def _check_whole(self, name: str) -> None:
        """Raise a LayoutError for a trained module that is given the heads of one rank: other ranks would not have its
        gradients.
        """
        module, size = self.modules[name], self.roles.hidden
        attention = next(
            (heads for heads in self.heads if name.startswith(f"{heads}." if heads else "")), None
        )
        if attention is None or not any(p.requires_grad for p in module.parameters()):
            return
        if norm_kind(module):
            on_heads, role = is_head_norm(name) or norm_size(module) != size, "'head_norm'"
        elif is_linear(module):
            writes_output = usual_role(name, module, self.model, size) == "row"
            on_heads, role = writes_output or features(module)[0] != size, "'row'"
        else:  # in a module with norms and MLP it may read the stream
            on_heads, role = self._only_attention(attention), "none"
        if on_heads:
            raise LayoutError(
                f"{name} cannot stay whole inside attention whose heads are split: each rank would train it on its own "
                f"heads. Its role there is {role}; or keep all of the attention whole: "
                f"{attention!r}: 'replicate'"
            )

    def _only_attention(self, name: str) -> bool:
        """Return True if a module holds the layers of its attention, and no norm of the stream, MLP or table."""
        before = any(self.children(name, role) for role in ("norm", "embedding", "patch", "stem"))
        alike = set(self.children(name, "column")) == set(self.heads[name].projections)
        return alike and not before and len(self.children(name, "row")) == 1

    def _is_whole(self, name: str) -> bool:
        """Return True if a module stays whole, or lies in one that does."""
        whole = [name for role in WHOLE for name in self.roles.named(role)]
        return any(not kept or name == kept or name.startswith(f"{kept}.") for kept in whole)

    def _vocabulary(self) -> int:
        heads = [features(self.modules[name])[1] for name in self.roles.named("head")]
        tables: list[Any] = [self.modules[name] for name in self.roles.named("embedding")]
        return heads[0] if heads else max((table.num_embeddings for table in tables), default=0)

    def _boundaries(self) -> list[tuple[Blocks | None, Boundary]]:
        if self.only_blocks:
            return [(blocks, Boundary(self.mesh, self.mode, flatten=True)) for blocks in self.lists]
        if not self.begins:
            return [(None, Boundary(self.mesh, self.mode, flatten=not self.by_sequences and not self.flat))]
        return []


def _everywhere(name: str) -> str:
    """Return a pattern for modules of that name in all blocks, quoted."""
    return repr(f"*.{name.rpartition('.')[2]}" if "." in name else name)


def _takes(module: nn.Module) -> tuple[str, ...]:
    """Return the names of what a module's forward takes."""
    return tuple(inspect.signature(type(module).forward).parameters)
