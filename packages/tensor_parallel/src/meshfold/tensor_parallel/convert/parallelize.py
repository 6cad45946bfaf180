"""``parallelize``: any nn.Module, in place, by rules on names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshfold.mesh import LayoutError, Mesh, Placement, metadata
from meshfold.mesh.tracking import track_forwards
from meshfold.tensor_parallel.convert.analysis import Analysis
from meshfold.tensor_parallel.convert.build import LayerBuilder, keep_hooks, keep_ties, meta_twin
from meshfold.tensor_parallel.convert.checks import check_analysis
from meshfold.tensor_parallel.convert.functional_dropout import (
    DropoutPart,
    FunctionalDropout,
    has_functional_dropout,
)
from meshfold.tensor_parallel.convert.gathered_input import Region, SharedInput
from meshfold.tensor_parallel.convert.head_biases import HeadBiases, names_of
from meshfold.tensor_parallel.convert.huggingface import (
    Recomputation,
    is_causal_lm,
    layers_left_out,
    use_sharded_loss,
)
from meshfold.tensor_parallel.convert.layer_tracking import LayerTracking
from meshfold.tensor_parallel.convert.lora import Adapters, has_adapters
from meshfold.tensor_parallel.convert.model_adapter import ModelAdapter
from meshfold.tensor_parallel.convert.replicated import takes_rows
from meshfold.tensor_parallel.convert.report import Report, placed
from meshfold.tensor_parallel.convert.roles import WHOLE
from meshfold.tensor_parallel.layers.base import ShardedLayer
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.layers.loss import CausalLMLoss
from meshfold.tensor_parallel.modes import Mode, find_mode, outside_blocks

_ORDER = (
    "embedding",
    "positions",
    "patch",
    "source",
    "stem",
    "column",
    "row",
    "head",
    "norm",
    "head_norm",
    "head_bias",
    "dropout",
    "loss",
    "mixture",
    "own_tokens",
    "attention",
    "replicate",
)


def parallelize(
    module: nn.Module,
    mesh: Mesh,
    mode: str | Mode = "1d",
    *,
    rules: Mapping[str, str] | None = None,
    lowering: str = "gather",
    blocks_apart: bool = False,
) -> Report:
    """Split a model over the tensor axes of a mesh, in place.

    Afterwards every parameter is this rank's block and carries its metadata. Pass whole inputs and labels on every rank of the
    tensor axes. A loss computed inside is the same on every rank, and outputs are returned whole. Gradients are complete over the
    tensor axes after ``backward()``; axes of data parallelism are not touched.

    If a module's own code works on a flat stream of tokens, ``m h`` rather than ``b s h``, give it an attribute ``flat_tokens =
    True``: the stream may then be split within sequences everywhere. A module that says ``causal_lm_loss = True`` and is called
    with (logits, labels) is replaced by the vocab-parallel loss.

    Args:
        module: an nn.Module with real or meta weights; every rank must have the same real weights.
        mesh: has the mode's axes.
        mode: ``"1d"``, ``"1d+sequence"``, ``"1d+tokens"``, ``"2d"``, ``"2.5d"``, ``"3d"`` or a Mode of your own.
        rules: role by pattern of full names, where names and shapes do not show it: ``{"*.router": "replicate"}``. Roles
            are column, row, head, stem, embedding, positions, norm, head_norm, head_bias, dropout, loss, patch, source,
            mixture, own_tokens and replicate.
        lowering: how matmuls are carried out: ``"gather"``, ``"stream"``, ``"ring"``, ``"push"``, ``"auto"``, where it applies.
        blocks_apart: if tokens are split around blocks (``"1d+sequence"``), each block does so by itself. Any of them may then be
            called separately, as in stages of a pipeline.

    Returns:
        What was done to each submodule; print it.

    Raises:
        LayoutError: listing every submodule that cannot be placed, or the first size that cannot be split with sizes that can; the
            module is then unchanged.
    """
    _check_arguments(module, mesh)
    found = find_mode(mode)
    mesh.require(*found.axes, what=f"mode {found.name!r}")
    if not has_adapters(module):
        return _split(module, mesh, found, rules, lowering, None, blocks_apart)
    adapters = Adapters(module, found)
    adapters.take_off()
    try:
        return _split(adapters.model, mesh, found, rules, lowering, adapters, blocks_apart)
    finally:
        adapters.put_back()


def _split(
    module: nn.Module,
    mesh: Mesh,
    mode: Mode,
    rules: Mapping[str, str] | None,
    lowering: str,
    adapters: Adapters | None,
    blocks_apart: bool,
) -> Report:
    given = {} if rules is None else rules
    analysis = Analysis(module, mesh, mode, given, blocks_apart=blocks_apart, adapted=adapters is not None)
    builder = LayerBuilder(analysis, mesh, lowering)
    if adapters is not None:
        adapters.check(analysis.roles.role)
    report = _Conversion(analysis, builder).run()
    if adapters is not None:
        adapters.split(mesh, mode, lambda name, p, inner: builder.dropout(name, p, mode, inner=inner), report)
    return report


def _check_arguments(module: object, mesh: object) -> None:
    if not isinstance(module, nn.Module):
        raise LayoutError(f"parallelize needs an nn.Module, but got {module!r}, a {type(module).__name__}")
    if not isinstance(mesh, Mesh):
        raise LayoutError(
            f"mesh={mesh!r} is a {type(mesh).__name__}, not a Mesh: make one of axes and sizes, such as "
            f"Mesh({{'tensor': 4}}) for mode '1d'"
        )
    split = [layer for layer in module.modules() if isinstance(layer, ShardedLayer)]
    if split:
        raise LayoutError(
            f"the {type(module).__name__} is split already, over {split[0].mesh!r}: a model is parallelized once, so build it "
            f"again to split it differently"
        )


class _Conversion:
    """One call of ``parallelize``: check everything and try it on meta twins, then replace modules."""

    def __init__(self, analysis: Analysis, builder: LayerBuilder) -> None:
        self.analysis, self.builder = analysis, builder
        self.model, self.mesh, self.mode, self.roles = (
            analysis.model,
            analysis.mesh,
            analysis.mode,
            analysis.roles,
        )
        self.report = Report(mode=analysis.mode.name, mesh=repr(analysis.mesh))

    def run(self) -> Report:
        """Run the checks, then change the model."""
        check_analysis(self.analysis)
        if left_out := layers_left_out(self.model):
            raise LayoutError(f"{', '.join(left_out)}: layerdrop would skip different layers on each rank; set it to 0")
        self._dry_run()
        self.report.parameters = sum(p.numel() for p in self.model.parameters())
        self._replace()
        for name, heads in self.analysis.heads.items():
            heads.set_counts(self.analysis.modules[name], self.mesh, self.mode)
        self._set_torchs_sizes()
        self._split_and_join()
        self._share_inputs()
        self._take_biases()
        self._adapt_model()
        calls = self._catch_dropout()
        boundaries = [boundary for _, boundary in self.analysis.boundaries]
        track_forwards(self.model, LayerTracking(self.mesh, self.mode, self.roles.named("replicate"), boundaries))
        Recomputation(boundaries, calls).attach(self.model)
        self.report.local_parameters = sum(p.numel() for p in self.model.parameters())
        return self.report

    def _dry_run(self) -> None:
        """Convert meta twins of all layers, so that any size or tie is refused before the model is changed."""
        places: dict[nn.Parameter, tuple[str, Placement]] = {}
        for role in _ORDER:
            for name in self.roles.named(role):
                module = self.analysis.modules[name]
                if role in WHOLE:
                    whole = [
                        (f"{name}.{key}", p, Placement(shape=tuple(p.shape), axes=((),) * p.dim()))
                        for key, p in module.named_parameters()
                    ]
                else:
                    try:
                        made = self.builder.make(name, role, meta_twin(module))
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

    def _replace(self) -> None:
        places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in self.model.modules():
            for leaf, child in parent._modules.items():
                if child is not None:
                    places.setdefault(child, []).append((parent, leaf))
        blocks = self.builder.blocks
        for role in _ORDER:
            for name in self.roles.named(role):
                module = made = self.analysis.modules[name]
                said, was = "", type(module).__name__
                if role in WHOLE:
                    said = self.builder.keep_whole(name, module, role)
                else:
                    made = self.builder.make(name, role, module)
                    keep_ties(module, made, blocks)
                    keep_hooks(module, made)
                    for parent, leaf in places[module]:
                        parent._modules[leaf] = made
                self.report.placed.append(placed(name, role, was, made, said))
        for module in self.model.modules():  # other names of parameters that were split
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter in blocks:
                    module._parameters[leaf] = blocks[parameter]

    def _set_torchs_sizes(self) -> None:
        """Set the sizes that torch's own transformers expect in their layers."""
        for name, module in self.analysis.modules.items():
            if isinstance(module, nn.TransformerEncoder):  # else it passes nested tensors in eval mode
                module.use_nested_tensor = False
            if isinstance(module, nn.Transformer) and self.analysis.begins:
                columns = self.analysis.mode_at(name).layout("residual")["h"]
                module.d_model = self.roles.hidden // self.mesh.size(*columns)

    def _split_and_join(self) -> None:
        for blocks, boundary in self.analysis.boundaries:
            if blocks is None:
                boundary.attach(self.model)
                self.report.notes.append("inputs are split on the way in, outputs joined on the way out")
            else:
                boundary.attach_to_blocks(blocks.name, list(blocks.members.values()), self.model)
                self.report.notes.append(
                    f"{blocks.name}: the stream is split over {', '.join(boundary.tokens)} from the first block to the last"
                )
        if self.analysis.only_blocks and not self.analysis.lists:
            self.report.notes.append(
                "no nn.ModuleList or nn.Sequential of blocks: every rank has all tokens everywhere"
            )

    def _share_inputs(self) -> None:
        """Gather an input once for all linear layers that read it."""
        for name, module in self.analysis.modules.items():
            columns = self.analysis.children(name, "column")
            stand_in = self.analysis.stand_ins.get(name, 0)
            if stand_in or self.analysis.needs_region(name):
                rows = [self._linear(row) for row in self.analysis.children(name, "row")]
                reads = [self._linear(column) for column in columns]
                boundary = self.analysis.flat_at(name)
                if self.analysis.mode_at(name).attention:  # no rank has the whole input
                    stand_in = stand_in or reads[0].in_features
                outer = None if boundary is None else outside_blocks(self.analysis.mode_at(name)).plans["column"]
                Region(reads, rows, boundary, batch=self.builder.batch, stand_in=stand_in, outer=outer).attach(module)
            elif any(self.analysis.is_by_tokens(column) for column in columns):
                continue
            elif len(columns) > 1 and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                SharedInput([self._linear(column) for column in columns]).around(module)
            else:
                continue
            leaves = ", ".join(column.rsplit(".", 1)[-1] for column in columns)
            self.report.notes.append(f"{name or '(root)'}: its input is gathered once for {leaves}")

    def _take_biases(self) -> None:
        """Give attention its own heads' biases, where those of all heads are made outside of it."""
        if self.roles.named("head_bias"):
            return
        for name, heads in self.analysis.heads.items():
            module = self.analysis.modules[name]
            names, order = names_of(module)
            if names:
                HeadBiases(self.mesh, self.mode, heads.heads, names, order).attach(module)
                self.report.notes.append(f"{name or '(root)'}: takes its own heads of {', '.join(names)}")

    def _linear(self, name: str) -> Linear:
        made = self.model.get_submodule(name)
        if not isinstance(made, Linear):
            raise LayoutError(f"{name} was not made a sharded linear layer")
        return made

    def _adapt_model(self) -> None:
        loss = bool(self.roles.named("loss"))
        if is_causal_lm(self.model):
            loss = True
            use_sharded_loss(self.model, self.mesh, self.analysis.outer, self.analysis.vocabulary)
            self.report.notes.append("loss: vocab-parallel cross entropy")
        heads = [self._linear(name) for name in self.roles.named("head")]
        losses = [m for m in self.model.modules() if isinstance(m, CausalLMLoss)]
        ModelAdapter(
            self.model,
            self.mesh,
            self.mode,
            self.analysis.outer,
            by_tokens=self.analysis.flat or not self.analysis.by_sequences,
            heads=heads,
            loss=loss,
            hidden=self.roles.hidden if self.analysis.begins and not heads else 0,
            whole=next((n for n in self.roles.named("replicate") if takes_rows(self.analysis.modules[n])), ""),
            ignored=losses[0].ignore_index if losses else -100,
            batch=self.builder.batch,
        ).attach_to_model(self.model)

    def _catch_dropout(self) -> FunctionalDropout | None:
        if not has_functional_dropout(self.model):
            return None
        calls = FunctionalDropout()
        parts = {
            "": self.model,
            **{name: m for blocks in self.analysis.lists for name, m in blocks.members.items()},
        }
        # A pipeline may cut between the members of a dict, so calls are numbered in each member separately.
        dicts = [name for name, m in self.model.named_modules() if isinstance(m, nn.ModuleDict)]
        for name in dicts:
            if not any(front and f"{name}.".startswith(f"{front}.") for front in parts):
                members = self.analysis.modules[name].named_children()
                parts.update({f"{name}.{key}" if name else key: member for key, member in members})
        whole = {name: self.analysis.modules[name] for role in WHOLE for name in self.roles.named(role)}
        for name, module in {**parts, **whole}.items():
            part = self.builder.dropout(f"{name}.functional", 0.0, self.analysis.mode_at(name), whole=name in whole)
            DropoutPart(calls, part).attach(module)
        self.report.notes.append("dropout called by function drops by global element")
        return calls
