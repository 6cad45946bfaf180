"""Sums over ranks in the step of running sequences: one kernel for the sum, the residual add and the norm after it.

Under tensor parallelism in 1d a block sums over ranks twice, after attention and after its MLP. Each sum is added to the stream,
and an RMSNorm follows. Rules find these modules by the names in our models and in transformers', so no model has a file here.
While :class:`FusedSums` is entered, a layer that ends with a sum computes its part, and the kernel returns the sum and the norm's
result, which the norm hands out when it is called. The model's own code adds the stream; in blocks of ours the kernel does. A norm
that products of one row compute (:mod:`meshfold.tensor_parallel.few_rows.row_kernels`) is left to them: several programs sum a row
then. The rows of a split table of words, which begin the stream, are summed in this way too.

Names prove nothing: a norm whose input is not the stream that the kernel had is found when the code that makes this compares logits
(``PagedForward``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.kernels import table_rows
from meshfold.mesh import Group, SpecError
from meshfold.tensor_parallel.few_rows.one_shot_sums import SumNorm
from meshfold.tensor_parallel.few_rows.row_kernels import (
    ENDS,
    as_given,
    gain_of,
    is_own_block,
    own_block,
    ranks_of,
    replaced_forwards,
    sharded_layer,
    submodule,
)
from meshfold.tensor_parallel.layers import Embedding, Linear

_SUMS = (
    ("norm1", "attn.out", "norm2", "mlp.down"),
    ("input_layernorm", "self_attn.o_proj", "post_attention_layernorm", "mlp.down_proj"),
)
"""Modules of a block in the order of their calls: a norm of the stream, a layer with a sum, and both again."""


class FusedSums:
    """The layers of a model that end with a sum over ranks which a norm of the stream follows.

    Attributes:
        group: that sums.
        columns: of the stream.
        dtype: of the layers.
        sites: how many sums there are.
        ranks: of the model; None if they are not known.
    """

    def __init__(self, model: nn.Module) -> None:
        """Args:
        model: split in 1d.

        Raises:
            SpecError: if there are fewer than two such layers, or their groups differ.
        """
        self.ranks = ranks_of(model)
        found: list[tuple[nn.Module, Linear]] = []  # a norm, and the layer that adds to the stream which it had
        for block in model.modules():
            for names in _SUMS:
                parts = [submodule(block, name) for name in names]
                if all(part is not None for part in parts):
                    found += [(parts[0], parts[1]), (parts[2], parts[3])]  # type: ignore[list-item]
        norms = [norm for norm, _ in found]
        bases = (model, getattr(model, "model", None))
        last = next((norm for base in bases if isinstance(norm := getattr(base, "norm", None), nn.Module)), None)
        following = dict(zip((layer for _, layer in found), [*norms[1:], last], strict=True)) if found else {}
        self._sums: SumNorm | None = None
        self._added: dict[nn.Module, Tensor] = {}  # the stream, for a layer that adds it to its output
        self._forwards: dict[nn.Module, Callable[..., Tensor]] = {}
        groups: dict[tuple[str, ...], Group] = {}
        for layer, norm in following.items():
            if norm is None or not _is_rms_norm(norm) or not _sums_rows(layer):
                continue
            axes = layer.plan.sums("y")
            groups[axes] = layer.mesh.group(*axes)
            self._forwards[layer] = partial(self._sum, layer, norm)
            self.columns, self.dtype = layer.out_features, layer.weight.dtype
        self.sites = len(self._forwards)
        if self.sites < 2 or len(groups) > 1:
            raise SpecError("the model's layers that sum over ranks are not followed by a norm of the stream")
        [self.group] = groups.values()
        self._forwards.update({norm: partial(self._norm, norm) for norm in [*norms, last] if norm is not None})
        for block in model.modules():
            if is_own_block(block) and all(submodule(block, path) in self._forwards for path in ENDS):
                self._forwards[block] = partial(own_block, self._added, block)
        self._left: set[nn.Module] = set()  # norms that products compute
        for module in model.modules():
            if isinstance(module, Embedding) and _begins_stream(module, self.group, self.columns, self.dtype):
                self._forwards[module] = partial(self._table, module)
        self._stream: Tensor | None = None
        self._ready: tuple[nn.Module, Tensor] | None = None
        self._calls = 0

    def use(self, sums: SumNorm) -> None:
        """Sum in this way from now on."""
        self._sums = sums

    @property
    def rows(self) -> int:
        """Rows that are summed in this way at most."""
        return 0 if self._sums is None else self._sums.rows

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager: layers and norms compute in this way. Enter it after ``RowKernels``, if at all."""
        self._left = {module for module in self._forwards if vars(module).get("forward") is as_given}
        try:
            with replaced_forwards(self._forwards):
                yield
        finally:
            self._stream = self._ready = None
            self._added.clear()

    def begin(self) -> None:
        """Begin a token. Call it before each forward of the model."""
        self._stream, self._ready, self._calls = None, None, 0

    def _table(self, layer: Embedding, ids: Tensor) -> Tensor:
        rows = ids.numel()
        if self._sums is None or not 0 < rows <= self.rows:
            return type(layer).forward(layer, ids)
        first = layer.mesh.index(*layer.plan.compute[layer.plan.k]) * layer.weight.shape[0]
        y = self._sums.plain(table_rows(ids.reshape(-1), layer.weight, first), self._calls)
        self._calls += 1
        return y.view(*ids.shape, -1)

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        self._stream, ready, self._ready = x, self._ready, None
        if norm in self._left:
            return x
        if ready is not None and ready[0] is norm:
            return ready[1].view(x.shape)
        return type(norm).forward(norm, x)  # type: ignore[no-any-return]

    def _sum(self, layer: Linear, norm: nn.Module, given: Tensor) -> Tensor:
        add = self._added.pop(layer, None)
        known, rows = sharded_layer(layer), given.numel() // given.shape[-1]
        found = gain_of(norm)
        # Codes of several rows are unpacked by the layer.
        packed = known is not None and known.scale is not None and rows > 1
        if self._stream is None or self._sums is None or known is None or found is None or packed or rows > self.rows:
            total = type(layer).forward(layer, given)
            return total if add is None else total + add
        x = layer.input_adapter(given)[0]
        stream = (self._stream if add is None else add).reshape(rows, -1)
        options = (stream, *found, self._calls, add is not None)
        left = norm in self._left
        if rows == 1:
            total, normed = self._sums.of_product(x, known, *options, not left)
        else:
            total, normed = self._sums(F.linear(x, known.weight).reshape(rows, -1), *options)
        self._calls += 1
        self._ready = None if normed is None or left else (norm, normed)
        return total.view(*x.shape[:-1], -1)


def _begins_stream(layer: Embedding, group: Group, columns: int, dtype: torch.dtype) -> bool:
    """Return True for a table whose words are split over the ranks of a group, and that does nothing else."""
    plan = layer.plan
    split = plan.sums("y") and layer.mesh.group(*plan.sums("y")).ranks == group.ranks
    alike = layer.weight.shape[1] == columns and layer.weight.dtype == dtype and layer.weight.is_contiguous()
    plain = layer.padding_idx is None and not layer.has_own_code
    return bool(split and alike and plain and not any(plan.extras(operand) for operand in ("w", "y")))


def _sums_rows(layer: nn.Module) -> bool:
    """Return True for a layer whose output is a sum over ranks of the whole stream, without a bias."""
    if not isinstance(layer, Linear) or layer.bias is not None or sharded_layer(layer) is None:
        return False
    return bool(layer.plan.sums("y"))


def _is_rms_norm(norm: nn.Module) -> bool:
    """Return True for a norm that computes what its name says, tried on two rows."""
    found = gain_of(norm)
    if found is None:
        return False
    gain, eps = found
    x = torch.linspace(-1, 2, 2 * gain.numel(), dtype=torch.float32, device=gain.device).view(2, -1).to(gain.dtype)
    with torch.no_grad():
        wanted = F.rms_norm(x.float(), x.shape[-1:], gain.float(), eps)
        return torch.allclose(norm(x).float(), wanted, rtol=2e-2, atol=2e-2)
