"""Construction of the sharded layer that replaces a module."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from meshfold.mesh import Mesh, Part
from meshfold.mesh.parameters import copy_parameter_hooks
from meshfold.tensor_parallel.convert.analysis import Analysis
from meshfold.tensor_parallel.convert.forward_code import children_called
from meshfold.tensor_parallel.convert.own_tokens import OwnTokens
from meshfold.tensor_parallel.convert.replicated import Replicated, StreamSource
from meshfold.tensor_parallel.layers.attention import (
    SplitMultiheadAttention,
    why_keep_forward,
    why_keep_whole,
)
from meshfold.tensor_parallel.layers.base import BatchShape
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.embedding import Embedding, HeadBias, PatchEmbedding, PositionEmbedding
from meshfold.tensor_parallel.layers.experts import Experts, experts_of
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.layers.loss import CausalLMLoss
from meshfold.tensor_parallel.layers.norm import HeadNorm, HeadNorms, LayerNorm, RMSNorm
from meshfold.tensor_parallel.lowerings import LOWERINGS, find_lowering
from meshfold.tensor_parallel.modes import Mode
from meshfold.tensor_parallel.module_kinds import features, is_conv1d, norm_eps, norm_kind, norm_size, norms_by_head


class LayerBuilder:
    """Builder of sharded layers for an analysed model."""

    def __init__(self, analysis: Analysis, mesh: Mesh, lowering: str) -> None:
        self.analysis, self.mesh, self.lowering = analysis, mesh, lowering
        self.blocks: dict[nn.Parameter, nn.Parameter] = {}
        """of whole parameters, what this rank has of them"""
        self.batch = BatchShape()

    def make(self, name: str, role: str, module: Any) -> nn.Module:
        """Return the sharded twin of a module, which may be a meta twin of the model's."""
        mode, mesh = self.analysis.mode_at(name), self.mesh
        if role == "embedding":
            return Embedding.convert(module, mesh, mode)
        if role == "positions":
            return PositionEmbedding(module, mesh, mode, flat_tokens=self.analysis.flat, batch=self.batch)
        if role in ("column", "row", "head", "stem"):
            tables = [self.analysis.modules[table].weight for table in self.analysis.roles.named("embedding")]
            if role == "head" and any(table is self.analysis.modules[name].weight for table in tables):
                role = "tied_head"
            return Linear.convert(
                module,
                mesh,
                mode,
                role,  # type: ignore[arg-type]
                parts=self._parts(name, module),
                input_parts=self._input_parts(name, module),
                head_dim=self._head_dim(name),
                stored="kn" if is_conv1d(module) else "nk",
                lowering=self._lowering(mode, role, self.analysis.is_by_tokens(name)),
                by_tokens=self.analysis.is_by_tokens(name),
                batch=self.batch if role in ("head", "tied_head") else None,
            )
        if role in ("norm", "head_norm"):
            return self._norm(name, role, module, mode)
        if role == "head_bias":
            return HeadBias(module, mesh, mode)
        if role == "patch":
            return PatchEmbedding.convert(module, mesh, mode)
        if role == "dropout":
            return self.dropout(name, module.p, mode, inner=self._inner_before(name)).train(module.training)
        return CausalLMLoss(
            mesh,
            mode,
            self.analysis.vocabulary,
            ignore_index=getattr(module, "ignore_index", -100),
            label_smoothing=getattr(module, "label_smoothing", 0.0),
            z_loss=getattr(module, "z_loss", 0.0),
        )

    def _norm(self, name: str, role: str, module: Any, mode: Mode) -> nn.Module:
        kind: type[LayerNorm | RMSNorm] = LayerNorm if norm_kind(module) == "layer" else RMSNorm
        if role == "norm":
            return kind.convert(module, norm_eps(module), self.mesh, mode)
        heads = self.analysis.heads[name.rpartition(".")[0]]
        if leaf := norms_by_head(module):
            part = heads.counted(len(module.get_submodule(leaf)), self.mesh, self.analysis.mode)
            return HeadNorms(module, self.mesh, mode, part or Part(heads.heads))
        size = norm_size(module)
        if size == heads.head_dim:
            return HeadNorm(module, self.mesh, mode)
        return kind.convert(
            module, norm_eps(module), self.mesh, mode, heads.normalised(size, self.mesh, self.analysis.mode)
        )

    def dropout(self, name: str, p: float, mode: Mode, *, inner: int = 0, whole: bool = False) -> Dropout:
        """Make a dropout that drops the same elements of the whole tensor on every mesh."""
        counts = {heads.heads for heads in self.analysis.heads.values()}
        return Dropout(
            p,
            self.mesh,
            mode,
            self.analysis.roles.hidden,
            name,
            inner=inner,
            heads=counts.pop() if len(counts) == 1 else 0,
            whole=whole,
            flat_tokens=self.analysis.flat or (self.analysis.flat_at(name) is not None and not whole),
            batch=self.batch,
        )

    def keep_whole(self, name: str, module: nn.Module, role: str = "replicate") -> str:
        """Gather the stream before a module and split it after it; dropout inside is the same on every rank.

        Args:
            role: ``"source"``: it makes the stream, and is given none. ``"mixture"``: the experts in it are split.
                ``"own_tokens"``: it works on each token separately, and on no token twice.
                ``"attention"``: torch's own, whose heads are.

        Returns:
            What was done to it, for the report.
        """
        mode, said = self.analysis.mode_at(name), "whole on every rank"
        if role == "own_tokens":
            flattened = self.analysis.flat_at(name) is not None
            OwnTokens(self.mesh, mode, self.batch, flattened=flattened).attach(module)
            return f"as it is; each rank of {', '.join(mode.axes)} gives it tokens of its own"
        adapter, whole = StreamSource if role == "source" else Replicated, ""
        hidden, boundary = self.analysis.roles.hidden, self.analysis.flat_at(name)
        adapter(module, self.mesh, mode, hidden, self.batch, boundary).keep_whole(module)
        if isinstance(module, nn.MultiheadAttention) and role == "attention":
            whole = why_keep_whole(module, self.mesh, self.analysis.mode)
            said = f"{said}: {whole}" if whole else f"heads split over {', '.join(self.analysis.mode.axes)}"
        if role == "mixture":
            leaf = experts_of(module)
            experts, splitter = module.get_submodule(leaf), Experts(self.mesh, self.analysis.mode)
            if why := splitter.why_not(experts):
                said = f"whole on every rank: {leaf} cannot be split, {why}"
            else:
                splitter.split(experts)
                said = f"{leaf} split by their inner dim over {', '.join(splitter.axes)}, the rest whole"
        for path, parent in module.named_modules(prefix=name):
            if isinstance(parent, nn.MultiheadAttention) and not why_keep_forward(parent):
                axes = self.analysis.mode.axes if role == "attention" and not whole else ()
                dropout = self.dropout(f"{path}.functional", 0.0, mode, whole=True)
                SplitMultiheadAttention.split(parent, self.mesh, axes, dropout, self.blocks)
            for leaf, child in parent._modules.items():
                if type(child) is nn.Dropout:
                    parent._modules[leaf] = self.dropout(f"{path}.{leaf}", child.p, mode, whole=True).train(
                        child.training
                    )
        return said

    def _inner_before(self, name: str) -> int:
        """Return the width of the column layer called directly before a module by the same parent; 0 without one.

        Modules are in the order of the calls in the parent's forward if its source can be read, otherwise in the order of creation.
        (T5 creates its dropout last but calls it before the last layer.)
        """
        parent = name.rpartition(".")[0]
        roles = self.analysis.roles.role
        if isinstance(self.analysis.modules[parent], nn.ModuleList) and (inner := self._inner_in_list(name)):
            return inner
        beside = [
            other
            for other, role in roles.items()
            if other == name or (other.rpartition(".")[0] == parent and role in ("column", "row"))
        ]
        calls = children_called(self.analysis.modules[parent])
        if all(other.rpartition(".")[2] in calls for other in beside):
            beside.sort(key=lambda other: calls.index(other.rpartition(".")[2]))
        place = beside.index(name)
        before = beside[place - 1] if place else ""
        return features(self.analysis.modules[before])[1] if roles.get(before) == "column" else 0

    def _inner_in_list(self, name: str) -> int:
        """Return the width that a dropout gets of the member before it in a list, an activation with its column layer."""
        around, _, leaf = name.rpartition(".")
        before = f"{around}.{int(leaf) - 1}"
        columns = self.analysis.children(before, "column") if before in self.analysis.modules else []
        if len(columns) != 1:
            return 0
        rows = self._rows_after(columns[0])
        return features(self.analysis.modules[rows[0]])[0] if len(rows) == 1 else 0

    def _head_dim(self, name: str) -> int:
        """Return the elements of a projection's output that must not be split; 0 for other layers."""
        for heads in self.analysis.heads.values():
            if name in heads.projections:
                return heads.kept_together(name)
        return 0

    def _parts(self, name: str, module: nn.Module) -> tuple[Part, ...]:
        for heads in self.analysis.heads.values():
            if name in heads.projections:
                return heads.parts(name, self.mesh, self.analysis.mode)
        given = tuple(Part(size) for size in getattr(module, "parts", ()))
        if given or self.analysis.roles.role[name] != "column":
            return given
        out = features(module)[1]
        rows = self._rows_after(name)
        if len(rows) == 1 and features(self.analysis.modules[rows[0]])[0] * 2 == out:
            return (Part(out // 2), Part(out // 2))  # fused gate and up
        return ()

    def _rows_after(self, column: str) -> list[str]:
        """Return the row layers in the same module as a column layer, or as the activation's module that holds it."""
        parent = column.rpartition(".")[0]
        all_rows = self.analysis.roles.named("row")
        rows = [row for row in all_rows if row.rpartition(".")[0] == parent]
        if rows or len(self.analysis.children(parent, "column")) != 1:
            return rows
        around = parent.rpartition(".")[0]
        return [row for row in all_rows if row.rpartition(".")[0] == around]

    def _input_parts(self, name: str, module: nn.Module) -> tuple[Part, ...]:
        """Return the parts of a row layer's input: heads and the MLP's inner dim, concatenated."""
        if self.analysis.roles.role[name] != "row":
            return ()
        parent, reads = name.rpartition(".")[0], features(module)[0]
        beside = [features(self.analysis.modules[column])[1] for column in self.analysis.children(parent, "column")]
        for attention, heads in self.analysis.heads.items():
            width = heads.heads * heads.head_dim
            if attention.rpartition(".")[0] == parent and len(beside) == 1 and width + beside[0] == reads:
                return (Part(width), Part(beside[0]))
        return ()

    def _lowering(self, mode: Mode, role: str, by_tokens: bool) -> str:
        plan = (mode.attention_plans if by_tokens else mode.plans).get(role)
        if plan is None or self.lowering == "gather":
            return "gather"
        found = LOWERINGS.get(self.lowering)
        if found is None:
            find_lowering(self.lowering, plan)
        return self.lowering if found is not None and not found.refuses(plan) else "gather"


def meta_twin(module: nn.Module) -> nn.Module:
    """Return the same layer, and those in it, without their values."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None if p is None else nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    twin._modules = {name: None if m is None else meta_twin(m) for name, m in module._modules.items()}
    return twin


def keep_hooks(module: nn.Module, made: nn.Module) -> None:
    """Move the hooks of a replaced layer to its replacement."""
    for name, hooks in vars(module).items():
        if name.startswith(("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")):
            getattr(made, name).update(hooks)
    made._is_full_backward_hook = module._is_full_backward_hook


def keep_ties(module: nn.Module, made: nn.Module, blocks: dict[nn.Parameter, nn.Parameter]) -> None:
    """Tie layers that shared a parameter to one block of it, and the layers in them."""
    for name, whole in module._parameters.items():
        block = made._parameters.get(name)
        if whole is not None and block is not None:
            if whole not in blocks:
                copy_parameter_hooks(whole, block)
            made._parameters[name] = blocks.setdefault(whole, block)
    for name, inner in module.named_children():
        if (twin := made._modules.get(name)) is not None:
            keep_ties(inner, twin, blocks)
