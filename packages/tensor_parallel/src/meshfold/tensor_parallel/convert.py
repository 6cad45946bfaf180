"""``parallelize``: any nn.Module, in place, by rules on names and shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from meshfold.mesh import LayoutError, Mesh, Part, Placement, metadata
from meshfold.tensor_parallel import lowerings
from meshfold.tensor_parallel.blocks import Blocks, find_blocks
from meshfold.tensor_parallel.boundary import Boundary
from meshfold.tensor_parallel.foreign import Recomputation, is_causal_lm, layers_left_out, use_sharded_loss
from meshfold.tensor_parallel.frame import Frame
from meshfold.tensor_parallel.functional import DropoutCalls, DropoutPart, drops_by_function
from meshfold.tensor_parallel.heads import find_heads
from meshfold.tensor_parallel.kinds import check_norm, features, is_conv1d, norm_eps, norm_kind
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.embedding import Embedding, PositionEmbedding
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.layers.loss import CausalLMLoss
from meshfold.tensor_parallel.layers.norm import LayerNorm, RMSNorm
from meshfold.tensor_parallel.layers.patch import PatchEmbedding
from meshfold.tensor_parallel.layers.replicated import Replicated
from meshfold.tensor_parallel.modes import Mode, find_mode, outside_blocks
from meshfold.tensor_parallel.region import Region, changes_tokens
from meshfold.tensor_parallel.report import Report, placed
from meshfold.tensor_parallel.rules import classify

_ORDER = (
    "embedding",
    "positions",
    "patch",
    "stem",
    "column",
    "row",
    "head",
    "norm",
    "dropout",
    "loss",
    "replicate",
)


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

    A module whose own code works on a flat stream of tokens, ``m h`` rather than ``b s h``, says so with an attribute
    ``flat_tokens = True``: the stream may then be split within sequences throughout. A module that says
    ``causal_lm_loss = True`` and is called with (logits, labels) is replaced by the vocab-parallel loss.

    Args:
        module: an nn.Module with real or meta weights; every rank must have the same real weights.
        mesh: has the mode's axes.
        mode: ``"1d"``, ``"1d+sequence"``, ``"2d"``, ``"2.5d"``, ``"3d"`` or a Mode of your own.
        rules: role by pattern of full names, where names and shapes do not tell: ``{"*.router": "replicate"}``. Roles
            are column, row, head, stem, embedding, positions, norm, dropout, loss, patch and replicate.
        lowering: how matmuls are carried out: ``"gather"``, ``"stream"``, ``"ring"``, ``"auto"``, where it applies.

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
    """One call of ``parallelize``: first everything is looked at and tried on meta twins, then modules are replaced."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, mode: Mode, rules: Mapping[str, str], lowering: str
    ) -> None:
        self.model, self.mesh, self.mode, self.lowering = model, mesh, mode, lowering
        self.modules = dict(model.named_modules())
        self.roles = classify(model, rules)
        self.vocabulary = self._vocabulary()
        self.flat = bool(getattr(model, "flat_tokens", False))
        self.heads = {
            name: heads
            for name, m in self.modules.items()
            if not self._is_whole(name) and (heads := find_heads(name, m))
        }
        split = [name for role in ("column", "row") for name in self.roles.named(role)]
        self.lists = find_blocks(self.modules, split)
        # The stream begins and ends inside a model that has an embedding; else at the model's own input and output.
        self.begins = any(self.roles.named(role) for role in ("embedding", "patch", "stem"))
        # A stream split by tokens rather than by sequences needs its sequences back where the model's own code looks
        # at them: so it is split round the lists of blocks only, and whole outside.
        residual, hidden = mode.layout("residual"), mode.layout("hidden")
        self.by_sequences = bool(hidden["m"]) or not residual["m"]
        self.only_blocks = self.begins and not self.flat and not self.by_sequences
        self.outer = outside_blocks(mode) if self.only_blocks else mode
        self.boundaries = self._make_boundaries()
        self.report = Report(mode=mode.name, mesh=repr(mesh))

    def run(self) -> Report:
        self._check()
        self.report.parameters = sum(p.numel() for p in self.model.parameters())
        self._replace()
        for name, heads in self.heads.items():
            heads.tell(self.modules[name], self.mesh, self.mode)
        self._attach_boundaries()
        self._make_regions()
        self._make_frame()
        calls = self._catch_dropout()
        if any(hasattr(module, "gradient_checkpointing") for module in self.modules.values()):
            Recomputation([boundary for _, boundary in self.boundaries], calls).attach(self.model)
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
            raise LayoutError(
                f"nothing to split in {type(self.model).__name__}: it has no layer that a tensor-parallel mode knows"
            )
        if self.roles.role.get("", "replicate") != "replicate":
            raise LayoutError(
                "the module to parallelize is a single layer: put it in a module of its own (nn.Sequential(layer)), or make "
                "meshfold.tensor_parallel.Linear and its like directly"
            )
        if left_out := layers_left_out(self.model):
            raise LayoutError(
                f"{', '.join(left_out)}: layerdrop leaves out other layers on every rank; set it to 0"
            )
        for name, heads in self.heads.items():
            heads.check(name, self.mesh, self.mode)
            self._check_region(name)
        for name in self.roles.named("norm"):
            check_norm(name, self.modules[name])
        self._dry_run()

    def _check_region(self, name: str) -> None:
        """Attention that is given other tokens than its stream's must be a module whose input can be gathered for it."""
        if self._needs_region(name) and not self._may_share(name):
            raise LayoutError(
                f"{name or '(root)'}: in mode {self.mode.name!r} attention has other tokens than the residual stream, so its "
                f"input is gathered for the module of its projections; let a module of their own hold "
                f"{', '.join(self.heads[name].projections)} and the layer that writes the output, without norms or MLP"
            )

    def _dry_run(self) -> None:
        """Convert meta twins of all layers: every size, and every tie, is refused before anything is changed."""
        places: dict[nn.Parameter, tuple[str, Placement]] = {}
        for role in _ORDER:
            for name in self.roles.named(role):
                module = self.modules[name]
                if role == "replicate":
                    whole = [
                        (f"{name}.{key}", p, Placement(shape=tuple(p.shape), axes=((),) * p.dim()))
                        for key, p in module.named_parameters()
                    ]
                else:
                    try:
                        made = self._make(name, role, _meta_twin(module))
                    except LayoutError as error:
                        raise LayoutError(f"{name}: {error}") from None
                    whole = [
                        (f"{name}.{key}", p, meta.placement)
                        for key, p in module.named_parameters()
                        if (meta := metadata(made.get_parameter(key))) is not None
                    ]
                for full, parameter, place in whole:
                    other, known = places.setdefault(parameter, (full, place))
                    if known != place:
                        raise LayoutError(
                            f"{full} and {other} are one parameter, but their layers would split it differently "
                            f"({place.axes} and {known.axes}): untie them, or give both the rule 'replicate'"
                        )

    def _is_whole(self, name: str) -> bool:
        """Whether a module is, or lies in, one that stays whole."""
        return any(
            not whole or name == whole or name.startswith(f"{whole}.")
            for whole in self.roles.named("replicate")
        )

    def _vocabulary(self) -> int:
        heads = [features(self.modules[name])[1] for name in self.roles.named("head")]
        tables: list[Any] = [self.modules[name] for name in self.roles.named("embedding")]
        return heads[0] if heads else max((table.num_embeddings for table in tables), default=0)

    def _mode_at(self, name: str) -> Mode:
        inside = not self.only_blocks or any(blocks.holds(name) for blocks in self.lists)
        return self.mode if inside else self.outer

    # -- replacing ----------------------------------------------------------------------------------------------

    def _replace(self) -> None:
        places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in self.model.modules():
            for leaf, child in parent._modules.items():
                if child is not None:
                    places.setdefault(child, []).append((parent, leaf))
        blocks: dict[nn.Parameter, nn.Parameter] = {}
        for role in _ORDER:
            for name in self.roles.named(role):
                module = made = self.modules[name]
                if role == "replicate":
                    self._keep_whole(name, module)
                else:
                    made = self._make(name, role, module)
                    _keep_ties(module, made, blocks)
                    _keep_hooks(module, made)
                    for parent, leaf in places[module]:
                        parent._modules[leaf] = made
                self.report.placed.append(placed(name, role, module, made))

    def _make(self, name: str, role: str, module: Any) -> nn.Module:
        """The sharded twin of a module, which may be a meta twin of the model's."""
        mode, mesh = self._mode_at(name), self.mesh
        if role == "embedding":
            return Embedding.convert(module, mesh, mode)
        if role == "positions":
            return PositionEmbedding(module, mesh, mode, flat_tokens=self.flat)
        if role in ("column", "row", "head", "stem"):
            tables = [self.modules[table].weight for table in self.roles.named("embedding")]
            if role == "head" and any(table is self.modules[name].weight for table in tables):
                role = "tied_head"
            return Linear.convert(
                module,
                mesh,
                mode,
                role,  # type: ignore[arg-type]
                parts=self._parts(name, module),
                stored="kn" if is_conv1d(module) else "nk",
                lowering=self._lowering(mode, role),
            )
        if role == "norm":
            kind: type[LayerNorm | RMSNorm] = LayerNorm if norm_kind(module) == "layer" else RMSNorm
            return kind.convert(module, norm_eps(module), mesh, mode)
        if role == "patch":
            return PatchEmbedding.convert(module, mesh, mode)
        if role == "dropout":
            return self._dropout(name, module.p, mode, inner=self._inner_before(name)).train(module.training)
        return CausalLMLoss(
            mesh, mode, self.vocabulary, ignore_index=getattr(module, "ignore_index", -100),
            label_smoothing=getattr(module, "label_smoothing", 0.0), z_loss=getattr(module, "z_loss", 0.0),
        )  # fmt: skip

    def _dropout(self, name: str, p: float, mode: Mode, *, inner: int = 0, whole: bool = False) -> Dropout:
        counts = {heads.heads for heads in self.heads.values()}
        return Dropout(
            p,
            self.mesh,
            mode,
            self.roles.hidden,
            name,
            inner=inner,
            heads=counts.pop() if len(counts) == 1 else 0,
            whole=whole,
            flat_tokens=self.flat or (self._flat_at(name) is not None and not whole),
        )

    def _keep_whole(self, name: str, module: nn.Module) -> None:
        """Join the stream in front of a module and split it behind; what it drops it drops alike on every rank."""
        mode = self._mode_at(name)
        Replicated(self.mesh, mode, self.roles.hidden, self._flat_at(name)).around(module)
        for path, parent in module.named_modules(prefix=name):
            for leaf, child in parent._modules.items():
                if type(child) is nn.Dropout:
                    parent._modules[leaf] = self._dropout(f"{path}.{leaf}", child.p, mode, whole=True).train(
                        child.training
                    )

    def _inner_before(self, name: str) -> int:
        """The width of the column layer that stands directly before a module among the leaves of its parent, if one does."""
        parent = name.rpartition(".")[0]
        before = 0
        for other, role in self.roles.role.items():
            if other == name:
                break
            if other.rpartition(".")[0] == parent and role in ("column", "row"):
                before = features(self.modules[other])[1] if role == "column" else 0
        return before

    def _parts(self, name: str, module: nn.Module) -> tuple[Part, ...]:
        for heads in self.heads.values():
            if name in heads.projections:
                return heads.parts(name, self.mesh, self.mode)
        given = tuple(Part(size) for size in getattr(module, "parts", ()))
        if given or self.roles.role[name] != "column":
            return given
        parent, out = name.rpartition(".")[0], features(module)[1]
        rows = [row for row in self.roles.named("row") if row.rpartition(".")[0] == parent]
        if len(rows) == 1 and features(self.modules[rows[0]])[0] * 2 == out:
            return (Part(out // 2), Part(out // 2))  # gate and up in one
        return ()

    def _lowering(self, mode: Mode, role: str) -> str:
        plan = mode.plans.get(role)
        if plan is None or self.lowering == "gather":
            return "gather"
        found = lowerings.LOWERINGS.get(self.lowering)
        if found is None:
            lowerings.lowering(self.lowering, plan)
        return self.lowering if found is not None and not found.refuses(plan) else "gather"

    # -- around -------------------------------------------------------------------------------------------------

    def _make_boundaries(self) -> list[tuple[Blocks | None, Boundary]]:
        """Where the stream is split and joined: round each list of blocks, or round the model."""
        if self.only_blocks:
            return [(blocks, Boundary(self.mesh, self.mode, flatten=True)) for blocks in self.lists]
        if not self.begins:
            return [(None, Boundary(self.mesh, self.mode, flatten=not self.by_sequences and not self.flat))]
        return []

    def _attach_boundaries(self) -> None:
        for blocks, boundary in self.boundaries:
            if blocks is None:
                boundary.around(self.model, self.model)
                self.report.notes.append("inputs are split on the way in, outputs joined on the way out")
            else:
                boundary.around(blocks.first, blocks.last)
                self.report.notes.append(
                    f"{blocks.name}: the stream is split over {', '.join(boundary.tokens)} from the first block to the last"
                )
        if self.only_blocks and not self.lists:
            self.report.notes.append(
                "no nn.ModuleList or nn.Sequential of blocks: every rank has all tokens everywhere"
            )

    def _flat_at(self, name: str) -> Boundary | None:
        """The boundary at which the stream that a module sees was flattened, if it was."""
        for blocks, boundary in self.boundaries:
            if boundary.flatten and (blocks is None or blocks.holds(name)):
                return boundary
        return None

    def _make_regions(self) -> None:
        """One gather for several linear layers that read the same input."""
        for name, module in self.modules.items():
            columns = self._shared_columns(name)
            if (
                not columns
                or not self._may_share(name)
                or (len(columns) == 1 and not self._needs_region(name))
            ):
                continue
            Region(
                [self._linear(column) for column in columns],
                [self._linear(row) for row in self._children(name, "row")],
                self._flat_at(name) if name in self.heads else None,
            ).around(module)
            leaves = ", ".join(column.rsplit(".", 1)[-1] for column in columns)
            self.report.notes.append(f"{name or '(root)'}: its input is gathered once for {leaves}")

    def _children(self, name: str, role: str) -> list[str]:
        """Full names of a module's direct children of a role."""
        leaves = (f"{name}.{leaf}" if name else leaf for leaf, _ in self.modules[name].named_children())
        return [full for full in leaves if self.roles.role.get(full) == role]

    def _shared_columns(self, name: str) -> list[str]:
        """The linear layers of a module that read its input: the projections of attention, or all of an MLP's."""
        if name in self.heads:
            return [full for full in self.heads[name].projections if self.roles.role.get(full) == "column"]
        return self._children(name, "column")

    def _may_share(self, name: str) -> bool:
        """Whether what a module is called with is what its column layers read: it has one row layer, and nothing that
        comes before a column layer."""
        before = any(self._children(name, role) for role in ("norm", "embedding", "patch", "stem"))
        alike = set(self._children(name, "column")) == set(self._shared_columns(name))
        return alike and not before and len(self._children(name, "row")) == 1

    def _needs_region(self, name: str) -> bool:
        """Whether attention's own code would miscount its tokens if its layers gathered their input themselves."""
        if name not in self.heads or self.flat:
            return False
        return changes_tokens(self._mode_at(name).plans["column"]) or self._flat_at(name) is not None

    def _linear(self, name: str) -> Linear:
        made = self.model.get_submodule(name)
        if not isinstance(made, Linear):
            raise LayoutError(f"{name} was not made a sharded linear layer")
        return made

    def _make_frame(self) -> None:
        loss = bool(self.roles.named("loss"))
        if is_causal_lm(self.model):
            loss = True
            use_sharded_loss(self.model, self.mesh, self.outer, self.vocabulary)
            self.report.notes.append("loss: vocab-parallel cross entropy")
        heads = [self._linear(name) for name in self.roles.named("head")]
        Frame(
            self.model,
            self.mesh,
            self.mode,
            self.outer,
            by_tokens=self.flat or not self.by_sequences,
            heads=heads,
            positions=[m for m in self.model.modules() if isinstance(m, PositionEmbedding)],
            loss=loss,
            hidden=self.roles.hidden if self.begins and not heads else 0,
        ).attach()

    def _catch_dropout(self) -> DropoutCalls | None:
        if not drops_by_function(self.model):
            return None
        calls = DropoutCalls()
        parts = {"": self.model, **{name: m for blocks in self.lists for name, m in blocks.members.items()}}
        whole = {name: self.modules[name] for name in self.roles.named("replicate")}
        for name, module in {**parts, **whole}.items():
            part = self._dropout(f"{name}.functional", 0.0, self._mode_at(name), whole=name in whole)
            DropoutPart(calls, part).attach(module)
        self.report.notes.append("dropout called by function drops by global element")
        return calls


def _meta_twin(module: nn.Module) -> nn.Module:
    """The same layer without its values."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None if p is None else nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    return twin


def _keep_hooks(module: nn.Module, made: nn.Module) -> None:
    """Let a layer keep the hooks that were registered on the one it stands for."""
    for name, hooks in vars(module).items():
        if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
            getattr(made, name).update(hooks)


def _keep_ties(module: nn.Module, made: nn.Module, blocks: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let layers that shared a parameter share its block."""
    for name, whole in module._parameters.items():
        block = made._parameters.get(name)
        if whole is not None and block is not None:
            made._parameters[name] = blocks.setdefault(whole, block)


__all__ = ["parallelize"]
