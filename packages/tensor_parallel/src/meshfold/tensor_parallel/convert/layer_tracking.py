"""Callbacks of a split model for :mod:`meshfold.mesh.tracking`, in the forward in which its own code is tracked.

The layouts around each sharded layer are in :mod:`meshfold.tensor_parallel.convert.layer_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh, metadata
from meshfold.mesh.tracking import Dims, Tracker, axes_in, block
from meshfold.tensor_parallel.convert.boundary import Boundary
from meshfold.tensor_parallel.convert.layer_rules import rule_of
from meshfold.tensor_parallel.convert.stream_layout import spanning_axes
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.layers.embedding import PositionEmbedding
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.modes import Mode


class LayerTracking(OnMesh):
    """Callbacks of a split model for :func:`meshfold.mesh.tracking.track_forwards`."""

    def __init__(self, mesh: Mesh, mode: Mode, kept: Sequence[str], boundaries: Sequence[Boundary]) -> None:
        """Args:
        kept: full names of the modules that are kept whole.
        boundaries: of its lists of blocks.
        """
        self.mesh, self.mode, self.kept, self.boundaries = mesh, mode, frozenset(kept), boundaries
        self._ours: set[int] = set()  # ids of the parameters that sharded layers have

    def begin(self, found: Tracker, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Mark the model's inputs: whole on every tensor axis."""
        layers = [module for module in model.modules() if self.communicates(module)]
        # Other modules may compute with shards of their own parameters, if hooks sum their results.
        self._ours = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        found.random_axes = (*found.random_axes, *spanning_axes(self.mesh, self.mode.axes))
        # These test if a mask is all ones, to drop it; each rank may decide that for its own rows.
        found.overlooked = ("transformers/masking_utils.py", "transformers/cache_utils.py")

    def reads_shapes(self, module: nn.Module) -> bool:
        """Return True for a table of positions whose input says a shape."""
        return isinstance(module, PositionEmbedding) and module.reads_shapes

    def parameter_dims(self, parameter: Tensor) -> Dims | None:
        """Return the layout of a parameter that a sharded layer has split; other code that reads it gets a shard."""
        if id(parameter) not in self._ours:
            return None
        meta = metadata(parameter)
        axes = () if meta is None else meta.placement.axes
        if len(axes) != parameter.dim():
            return None
        split = [
            spanning_axes(self.mesh, tuple(axis for axis in several if axis in self.mode.axes)) for several in axes
        ]
        if not any(split):
            return None
        assert meta is not None
        made = []
        for number, (size, mine) in enumerate(zip(parameter.shape, split, strict=True)):
            lengths = tuple(length for _, length in meta.placement.segments(self.mesh, number))
            parts = lengths if number in meta.placement.parts and sum(lengths) == size else ()
            made.append(block(size, mine, parts, grain=-1))
        return tuple(made)

    def communicates(self, module: nn.Module) -> bool:
        """Return True if a module is a sharded layer."""
        return isinstance(module, OnMesh)

    def check_arguments(
        self, found: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a tensor without the layout that a layer reads."""
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if given is not None:
            rule_of(module).check(found, module, given)

    def mark_results(
        self, found: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Mark the layout of a layer's result."""
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        first = output[0] if isinstance(output, tuple) else output
        if given is None or not isinstance(first, Tensor):
            return
        rule = rule_of(module)
        dims = rule.result(found, module, given, tuple(first.shape))
        found.mark(first, dims)
        found.records.sum_over([first], self._summed_in(found, module, given, dims))
        rule.mark_rows(found, module, given, first)

    def made_later(self, found: Tracker, module: nn.Module, given: Tensor, shape: tuple[int, ...]) -> Dims | None:
        """Return the layout of logits that wait for their loss; None for one that does not follow from their rows."""
        rule = rule_of(module)
        try:
            rule.check(found, module, given)
            dims = rule.result(found, module, given, shape)
            summed = self._summed_in(found, module, given, dims)
        except LayoutError:
            return None  # the module's call says so again
        gathers = isinstance(module, Linear) and module.gather_output
        return None if summed and not gathers else dims

    def summed_later(self, found: Tracker, module: nn.Module, given: Tensor, layout: Dims) -> set[str]:
        """Return the axes along which ranks have parts of the gradient of logits that wait for their loss."""
        return self._summed_in(found, module, given, layout)

    def remedy(self, name: str, axes: tuple[str, ...]) -> str:
        """Return advice: keep the module whole, or split something else."""
        if not set(axes) & set(self.mode.axes):
            return ""
        for boundary in self.boundaries:
            if boundary.inside and boundary.name and not f"{name}.".startswith(f"{boundary.name}."):
                return boundary.order()
        while any(name == kept or name.startswith(f"{kept}.") for kept in self.kept):
            name = name.rpartition(".")[0]  # already whole: name the module around it
        parts = name.split(".")
        pattern = ".".join("*" if part.isdigit() else part for part in parts)
        rule = (
            f"Keep the module whole on every rank: rules={{{pattern!r}: 'replicate'}}"
            if name
            else "Put that code in a submodule and keep it whole on every rank: rules={'its_name': 'replicate'}"
        )
        residual = self.mode.layout("residual")
        splits = set(spanning_axes(self.mesh, residual["h"])) & set(axes)
        if splits:
            return f"{rule}; write norms as nn.LayerNorm or nn.RMSNorm; or use mode '1d', in which the stream is whole"
        if set(spanning_axes(self.mesh, residual["m"])) & set(axes):
            return f"{rule}; or use mode '1d', in which every rank has all tokens"
        return f"{rule}; or use a spec without tensor"

    def _summed_in(self, found: Tracker, layer: nn.Module, given: Tensor, out: Dims) -> set[str]:
        """Return the axes along which ranks may have the same output, with a layout ``out``, and parts of its gradient.

        Raises:
            LayoutError: if the input needs a gradient, and is replicated along axes over which the layer sums its parts.
        """
        mine = found.records.summed(given) - axes_in(found.dims(given))
        rule = rule_of(layer)
        in_region = rule.reads_region(layer, found.dims(given))
        reads, writes = ((), ()) if in_region else rule.token_axes(layer) or (mine, mine)
        reads, writes = (set(spanning_axes(self.mesh, tuple(axes))) for axes in (reads, writes))
        lacking = reads - axes_in(found.dims(given))
        if lacking != mine and given.requires_grad and any(p.requires_grad for p in layer.parameters()):
            axes = tuple(sorted(lacking ^ mine))
            found.refuse(
                type(layer).__name__,
                f"is given a tensor that is the same on every rank along {', '.join(axes)}, where it reads the stream: the parts "
                "of its gradient would not add up",
                given,
                axes=axes,
            )
        return writes - axes_in(out)
