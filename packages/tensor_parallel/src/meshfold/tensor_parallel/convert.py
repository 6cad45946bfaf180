"""``parallelize``: any nn.Module, in place, by rules on names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshfold.mesh import LayoutError, Mesh, ParameterMeta, Part, metadata
from meshfold.tensor_parallel import lowerings
from meshfold.tensor_parallel.foreign import adapt_foreign, check_rms_norm
from meshfold.tensor_parallel.frame import Frame
from meshfold.tensor_parallel.heads import find_heads
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.embedding import Embedding, PositionEmbedding
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.layers.loss import CausalLMLoss
from meshfold.tensor_parallel.layers.norm import LayerNorm, RMSNorm
from meshfold.tensor_parallel.layers.patch import PatchEmbedding
from meshfold.tensor_parallel.layers.replicated import replicate
from meshfold.tensor_parallel.modes import Mode, find_mode, outside_blocks
from meshfold.tensor_parallel.region import Boundary, make_region
from meshfold.tensor_parallel.report import Placed, Report
from meshfold.tensor_parallel.rules import classify, features, is_conv1d, norm_eps, norm_kind


def parallelize(
    module: nn.Module,
    mesh: Mesh,
    mode: str | Mode = "1d",
    *,
    rules: Mapping[str, str] | None = None,
    lowering: str = "gather",
) -> Report:
    """Split a model over the tensor axes of a mesh, in place.

    Afterwards every parameter is this rank's block and carries its metadata; inputs and labels are given whole on
    every rank of the tensor axes, a loss computed inside comes out the same on every rank, outputs come out whole.
    Gradients are complete over the tensor axes after ``backward()``; axes of data parallelism are not touched.

    Args:
        module: an nn.Module with real or meta weights; every rank must have the same real weights.
        mesh: has the mode's axes.
        mode: ``"1d"``, ``"1d+sequence"``, ``"2d"``, ``"2.5d"``, ``"3d"`` or a Mode of your own.
        rules: role by pattern of full names, where names and shapes do not tell: ``{"*.router": "replicate"}``. Roles
            are column, row, head, stem, embedding, positions, norm, dropout, loss, patch and replicate.
        lowering: how matmuls are carried out: ``"gather"``, ``"stream"``, ``"ring"``, where it applies.

    Returns:
        What was done to each submodule; print it.

    Raises:
        LayoutError: listing every submodule that cannot be placed, or the first size that cannot be split with
            those that can; nothing has been changed then.
    """
    found = find_mode(mode)
    mesh.require(*found.axes, what=f"mode {found.name!r}")
    return _Conversion(module, mesh, found, dict(rules or {}), lowering).run()


class _Conversion:
    """One call of ``parallelize``: first everything is looked at and checked, then modules are replaced."""

    def __init__(self, model: nn.Module, mesh: Mesh, mode: Mode, rules: Mapping[str, str], lowering: str) -> None:
        self.model, self.mesh, self.mode, self.lowering = model, mesh, mode, lowering
        self.modules = dict(model.named_modules())
        self.roles = classify(model, rules)
        self.flat = bool(getattr(model, "flat_tokens", False))
        # A stream split by tokens rather than by sequences needs its sequences back where the model's own code looks
        # at them: so it is split round the list of blocks only, and whole outside.
        self.blocks = self._block_list() if not self.flat and not self._splits_by_batch() else None
        self.outer = outside_blocks(mode) if self.blocks is not None else mode
        self.heads = {name: h for name, m in self.modules.items() if not self._is_inside_placed(name) and (h := find_heads(name, m))}
        self.report = Report(mode=mode.name, mesh=repr(mesh))

    def run(self) -> Report:
        self._check()
        self.report.parameters = sum(p.numel() for p in self.model.parameters())
        vocabulary = self._vocabulary()
        for role in ("embedding", "positions", "column", "row", "head", "stem", "norm", "patch", "dropout", "loss", "replicate"):
            for name in self.roles.named(role):
                self._place(name, role)
        for name, heads in self.heads.items():
            heads.tell(self.modules[name], self.mesh, self.mode)
        boundary = self._make_boundary()
        self._make_regions(boundary)
        frame = Frame(self.model, self.mesh, self.mode, flat=self.flat, blocks=self.blocks is not None)
        frame.attach([self._new(name) for name in self.roles.named("head")])
        self.report.notes += adapt_foreign(self.model, self.mesh, self.mode, self.outer, self.roles.hidden, vocabulary)
        self.report.local_parameters = sum(p.numel() for p in self.model.parameters())
        return self.report

    # -- looking ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.roles.refused:
            listed = "\n".join(f"  {name or '(root)'}: {why}" for name, why in self.roles.refused.items())
            raise LayoutError(
                f"cannot place {len(self.roles.refused)} submodule(s):\n{listed}\nSay what they are with "
                f"rules={{'name or pattern': role}}; role 'replicate' keeps a submodule whole on every rank"
            )
        if not self.roles.role:
            raise LayoutError(f"nothing to split in {type(self.model).__name__}: it has no layer that a tensor-parallel mode knows")
        for name, heads in self.heads.items():
            heads.check(name, self.mesh, self.mode)
        for name in self.roles.named("norm"):
            if norm_kind(self.modules[name]) == "rms":
                check_rms_norm(name, self.modules[name])
        self._dry_run()

    def _dry_run(self) -> None:
        """Convert meta twins of all layers: every size is refused before anything is changed."""
        for role in ("embedding", "column", "row", "head", "stem", "norm"):
            for name in self.roles.named(role):
                module = self.modules[name]
                twin = nn.Module()
                for p_name, p in module.named_parameters(recurse=False):
                    twin.register_parameter(p_name, nn.Parameter(p.detach().to("meta"), requires_grad=False))
                for attribute in ("normalized_shape", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
                    if hasattr(module, attribute):
                        setattr(twin, attribute, getattr(module, attribute))
                try:
                    self._make(name, role, twin, module)
                except LayoutError as error:
                    raise LayoutError(f"{name}: {error}") from None

    def _splits_by_batch(self) -> bool:
        """Whether whole sequences can be what splits the residual stream's tokens: whether attention's are split at all."""
        return bool(self.mode.layout("hidden")["m"]) or not self.mode.layout("residual")["m"]

    def _block_list(self) -> nn.ModuleList | None:
        """The list of blocks: the longest ModuleList whose members hold linear layers that are split."""
        split = [name for role in ("column", "row") for name in self.roles.named(role)]
        lists = [
            (name, m)
            for name, m in self.modules.items()
            if isinstance(m, nn.ModuleList) and any(s.startswith(f"{name}.") for s in split)
        ]
        return max(lists, key=lambda item: len(item[1]))[1] if lists else None

    def _is_inside_placed(self, name: str) -> bool:
        return any(name.startswith(f"{other}.") or name == other for other in self.roles.named("replicate"))

    def _in_blocks(self, name: str) -> bool:
        if self.blocks is None:
            return True
        inside = {id(m) for m in self.blocks.modules()}
        return id(self.modules[name]) in inside

    def _vocabulary(self) -> int:
        tables = [self.modules[name] for name in self.roles.named("embedding")]
        heads = [self.modules[name] for name in self.roles.named("head")]
        return features(heads[0])[1] if heads else max((t.num_embeddings for t in tables), default=0)  # type: ignore[type-var, return-value]

    # -- replacing ----------------------------------------------------------------------------------------------

    def _mode_at(self, name: str) -> Mode:
        return self.mode if self._in_blocks(name) else self.outer

    def _place(self, name: str, role: str) -> None:
        module = self.modules[name]
        if role == "replicate":
            replicate(module, self.mesh, self._mode_at(name), flat=self.flat)
            made = module
        else:
            made = self._make(name, role, module, module)
            parent, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, made) if name else self._refuse_root()
        weight = getattr(made, "weight", None)
        meta = metadata(weight) if weight is not None else None
        self.report.placed.append(
            Placed(
                name=name,
                role=getattr(made, "role", role),
                was=type(module).__name__,
                weights=_layout_text(made, meta) if meta else ("whole on every rank" if role == "replicate" else ""),
                shape=meta.placement.shape if meta else (),
                local=tuple(weight.shape) if meta and weight is not None else (),
            )
        )

    def _refuse_root(self) -> None:
        raise LayoutError(
            "the module to parallelize is a single layer: put it in a module of its own (nn.Sequential(layer)), or make "
            "meshfold.tensor_parallel.Linear and its like directly"
        )

    def _make(self, name: str, role: str, module: nn.Module, original: nn.Module) -> nn.Module:
        """The sharded twin of a module; ``original`` tells its kind where ``module`` is a meta twin of it."""
        mode, mesh = self._mode_at(name), self.mesh
        whole_tokens = mode is not self.mode
        if role == "embedding":
            return Embedding.convert(module, mesh, mode)  # type: ignore[arg-type]
        if role == "positions":
            return PositionEmbedding(module, mesh, mode, ids_are_whole=self.flat)  # type: ignore[arg-type]
        if role in ("column", "row", "head", "stem"):
            tied = role == "head" and any(
                self.modules[table].weight is original.weight for table in self.roles.named("embedding")
            )
            return Linear.convert(
                module,
                mesh,
                mode,
                "tied_head" if tied else role,  # type: ignore[arg-type]
                parts=self._parts(name, original),
                stored="kn" if is_conv1d(original) else "nk",
                lowering=self._lowering(mode, role),
            )
        if role == "norm":
            kind = LayerNorm if norm_kind(original) == "layer" else RMSNorm
            made: nn.Module = kind.convert(module, norm_eps(original), mesh, mode, whole_tokens=whole_tokens)
            return made
        if role == "patch":
            return PatchEmbedding.convert(module, mesh, mode)  # type: ignore[arg-type]
        if role == "dropout":
            return Dropout(original.p, mesh, mode, self.roles.hidden, name).train(original.training)  # type: ignore[arg-type]
        return CausalLMLoss(
            mesh, mode, self._vocabulary(), ignore_index=getattr(original, "ignore_index", -100),
            label_smoothing=getattr(original, "label_smoothing", 0.0), z_loss=getattr(original, "z_loss", 0.0),
        )  # fmt: skip

    def _parts(self, name: str, module: nn.Module) -> tuple[Part, ...]:
        for heads in self.heads.values():
            for role in ("query", "key_value", "fused"):
                if name in getattr(heads, role):
                    return heads.parts(role, self.mesh, self.mode)
        return tuple(Part(size) for size in getattr(module, "parts", ()))

    def _lowering(self, mode: Mode, role: str) -> str:
        plan = mode.plans.get(role)
        if plan is None or self.lowering == "gather":
            return "gather"
        found = lowerings.LOWERINGS.get(self.lowering)
        if found is None:
            lowerings.lowering(self.lowering, plan)
        return self.lowering if found is not None and not found.refuses(plan) else "gather"

    def _new(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def _make_boundary(self) -> Boundary | None:
        if self.blocks is not None:
            boundary = Boundary(self.mesh, self.mode, flatten=True)
            boundary.around(self.blocks[0], self.blocks[-1])
            self.report.notes.append(f"the stream is split over {', '.join(boundary.tokens)} from the first block to the last")
            return boundary
        if not self.roles.named("embedding") and not self.roles.named("patch") and not self.roles.named("stem"):
            boundary = Boundary(self.mesh, self.mode, flatten=not self._splits_by_batch())
            boundary.around(self.model, self.model)
            self.report.notes.append("inputs are split on the way in, outputs joined on the way out")
            return boundary if boundary.flatten and not self.flat else None
        return None

    def _make_regions(self, boundary: Boundary | None) -> None:
        """One gather for several linear layers that read the same input."""
        for name, module in self.modules.items():
            children = {leaf: f"{name}.{leaf}" if name else leaf for leaf, _ in module.named_children()}
            columns = [full for full in children.values() if self.roles.role.get(full) == "column"]
            rows = [full for full in children.values() if self.roles.role.get(full) == "row"]
            attends = name in self.heads
            if not name or not rows or not (len(columns) > 1 or (attends and boundary is not None)):
                continue
            if not attends and len(rows) > 1:
                continue  # several pairs one after the other: each reads its own input
            make_region(
                module,
                [self._linear(full) for full in columns],
                [self._linear(full) for full in rows],
                boundary if attends else None,
            )
            self.report.notes.append(f"{name}: its input is gathered once for {', '.join(c.rsplit('.', 1)[-1] for c in columns)}")

    def _linear(self, name: str) -> Linear:
        made = self._new(name)
        if not isinstance(made, Linear):
            raise LayoutError(f"{name} was not made a sharded linear layer")
        return made


def _layout_text(made: nn.Module, meta: ParameterMeta) -> str:
    plan = getattr(made, "plan", None)
    return str(plan.w) if plan is not None else " ".join(",".join(axes) or "–" for axes in meta.placement.axes)


__all__ = ["parallelize"]
