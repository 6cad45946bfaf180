"""Embeddings of tokens, positions and image patches, and the bias of a head.

A lookup of rows is a matmul with a one-hot matrix that is never built, so it uses the mode's plan. Ids are whole on every rank.
Each rank looks up the tokens and the rows given by its layout of the one-hot matrix, and the result is reduced as y is. A patch
embedding is a convolution whose stride is its kernel: a matmul of unfolded patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh, Placement
from meshfold.mesh.collectives import Primitive, bind_enter, bind_take, take_block
from meshfold.tensor_parallel.layers import vocabulary
from meshfold.tensor_parallel.layers.base import BatchShape, ShardedLayer, shard_parameter, to_autocast_dtype
from meshfold.tensor_parallel.layers.linear import stem_plan
from meshfold.tensor_parallel.layers.vocabulary import checked
from meshfold.tensor_parallel.matmul import (
    Product,
    bind_enter_operand,
    bind_leave_operand,
    bind_matmul,
    lead_shape,
    on_one_rank,
)
from meshfold.tensor_parallel.modes import Mode, find_mode, split_evenly, vocabulary_multiple
from meshfold.tensor_parallel.module_kinds import is_patch
from meshfold.tensor_parallel.plan import MatmulPlan
from meshfold.tensor_parallel.row_code import row_code


class Embedding(ShardedLayer):
    """A table ``v h`` split as the mode says. Takes ids whole on every rank, returns the residual stream.

    The vocabulary may be of any size: the table is padded to a multiple of its blocks with unused rows.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mesh: Mesh,
        mode: str | Mode = "1d",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises:
        LayoutError: if the mesh lacks an axis of the mode, or the hidden size cannot be split.
        """
        super().__init__()
        found = find_mode(mode)
        mesh.require(*found.axes, what=f"mode {found.name!r}")
        self._take_over(
            nn.Embedding(num_embeddings, embedding_dim, padding_idx, device="meta", dtype=dtype), mesh, found
        )
        if device != "meta":
            self.to_empty(device=device or "cpu")
            nn.init.normal_(self.weight)

    @classmethod
    def convert(cls, module: nn.Embedding, mesh: Mesh, mode: Mode) -> Embedding:
        """Return a sharded table made of a whole one; real or meta weights.

        Raises:
            LayoutError: for the options ``max_norm``, ``scale_grad_by_freq`` and ``sparse``.
        """
        refuse_options(module)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take_over(module, mesh, mode)
        made.train(module.training)
        return made

    def _take_over(self, module: nn.Embedding, mesh: Mesh, mode: Mode) -> None:
        self.mesh, self.mode, self.plan = mesh, mode, mode.plans["embedding"]
        self.num_embeddings, self.embedding_dim, self.padding_idx = *module.weight.shape, module.padding_idx
        w = self.plan.w
        split_evenly(self.embedding_dim, w[self.plan.n], mesh, f"embedding_dim={self.embedding_dim}")
        place = Placement(
            shape=tuple(module.weight.shape),
            axes=(w[self.plan.k], w[self.plan.n]),
            multiple={0: vocabulary_multiple(mode, mesh)},
        )
        self.weight = shard_parameter(module.weight, place, mesh)
        self._code = row_code(module)
        if self._code is not None:
            for name, buffer in module._buffers.items():
                self.register_buffer(name, buffer, persistent=False)
        self._gather_table = bind_enter_operand(self.plan, mesh, "w")
        self._leave = bind_leave_operand(self.plan, mesh)
        self._alone = on_one_rank(self.plan, mesh)
        vocabulary.prepare()

    def forward(self, ids: Tensor) -> Tensor:
        """``..`` int64, whole on every rank -> ``.. h`` of the residual layout.

        Raises:
            TokenError: on the CPU, for an id beyond the table; on a GPU it is an assertion on the device.
        """
        # A GPU kernel checks ids only against the table's rows, which include the padding of the vocabulary.
        if not self._alone or ids.device.type == "cpu" or self.weight.shape[0] != self.num_embeddings:
            ids = checked(ids, self.num_embeddings, "token id")
        if self._alone:
            return self._coded(F.embedding(ids, self.weight, self.padding_idx), ids)
        flat = take_block(ids.reshape(-1), self.mesh, 0, self.plan.compute[self.plan.m])
        # The plan's w is [n, k], the table [k, n]: gather a transposed view.
        table = self._gather_table(self.weight.t()).t()
        rows = table.shape[0]
        first = self.mesh.index(*self.plan.compute[self.plan.k]) * rows
        local = flat - first
        here = (local >= 0) & (local < rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        found = F.embedding(torch.where(here, local, 0), table, padding)
        y = self._leave(found * here.unsqueeze(-1))
        return self._coded(y.view(*lead_shape(ids.shape, y.shape[0]), y.shape[-1]), ids)

    @property
    def has_own_code(self) -> bool:
        """True if the class of the whole table makes something of its rows."""
        return self._code is not None

    def _coded(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return what the table's own class makes of its rows."""
        return rows if self._code is None else self._code(rows, ids, self.weight, self._buffers)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode.name}, w='{self.plan.w}'"


class PositionEmbedding(ShardedLayer):
    """A table of positions: all rows on every rank, the hidden dim split like the residual stream's."""

    def __init__(self, module: nn.Embedding, mesh: Mesh, mode: Mode, *, flat_tokens: bool, batch: BatchShape) -> None:
        """Args:
            module: the table it replaces; a subclass keeps its own forward (OPT's offset).
            flat_tokens: positions come as ``m``, one a token of the whole batch (models with ``flat_tokens``).
            batch: of the forward that runs; positions with as many rows are of all sequences, not of this rank's.

        Raises:
            LayoutError: for options that cannot be sharded, or a width that cannot be split.
        """
        super().__init__()
        refuse_options(module)
        residual = mode.layout("residual")
        self.mesh, self.mode, self.flat_tokens, self.tokens = mesh, mode, flat_tokens, residual["m"]
        split_evenly(module.embedding_dim, residual["h"], mesh, f"embedding_dim={module.embedding_dim}")
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        place = Placement(shape=tuple(module.weight.shape), axes=((), residual["h"]))
        self.weight = shard_parameter(module.weight, place, mesh)
        self._batch = batch
        self._enter = bind_enter(mesh, self.tokens)
        self._kind = type(module)
        self._settings = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}

    @property
    def reads_shapes(self) -> bool:
        """True if a forward of a class of its own makes the positions, so that a floating-point input says a shape (BART)."""
        return self._kind is not nn.Embedding

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look up positions ``s``, ``1 s``, ``b s`` or ``m`` -> ``.. h``: this rank's tokens and columns."""
        weight = self._enter(self.weight)
        if args and isinstance(args[0], Tensor):
            mine = self._mine(args[0])
            if mine.is_floating_point():  # one column of this rank's: whoever computes with it is to see
                mine = torch.full_like(mine, torch.nan)
            args = (mine, *args[1:])
        if self._kind is nn.Embedding:
            (ids,) = args or tuple(kwargs.values())
            return F.embedding(ids, weight, self._settings["padding_idx"])
        # A subclass computes positions itself and then looks them up in self.weight: give it a stand-in.
        stand_in = self._kind.__new__(self._kind)
        nn.Module.__init__(stand_in)
        for name, value in self._settings.items():
            setattr(stand_in, name, value)
        stand_in.__dict__["weight"] = weight
        return stand_in.forward(*args, **kwargs)

    def _mine(self, ids: Tensor) -> Tensor:
        if self.flat_tokens:
            return take_block(ids.reshape(-1), self.mesh, 0, self.tokens)
        of_all = ids.dim() > 1 and ids.shape[0] == self._batch.rows
        return take_block(ids, self.mesh, 0, self.tokens) if of_all else ids

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode.name}"


class HeadBias(ShardedLayer):
    """A table ``buckets heads`` of biases that attention adds to its scores (T5): all buckets, this rank's heads."""

    weight: nn.Parameter

    def __init__(self, module: nn.Embedding, mesh: Mesh, mode: Mode) -> None:
        """Raises:
        LayoutError: for options that cannot be sharded, or a number of heads that cannot be split.
        """
        super().__init__()
        refuse_options(module)
        hidden = mode.layout("hidden")
        self.mesh, self.mode = mesh, mode
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        split_evenly(module.embedding_dim, hidden["n"], mesh, f"{module.embedding_dim} heads")
        place = Placement(shape=tuple(module.weight.shape), axes=((), hidden["n"]))
        self.weight = shard_parameter(module.weight, place, mesh)
        self.summed = hidden["m"]
        self._enter = bind_enter(mesh, self.summed)

    def forward(self, buckets: Tensor) -> Tensor:
        """``q k`` int64, the same on every rank -> ``q k heads``, local heads."""
        return F.embedding(buckets, self._enter(self.weight))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def refuse_options(module: nn.Embedding) -> None:
    """Raise a LayoutError for options that a split table does not support."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option, None):
            raise LayoutError(
                f"nn.Embedding({option}={getattr(module, option)!r}) cannot be sharded: leave {option} out"
            )


class PatchEmbedding(ShardedLayer):
    """Embedding of images, whole on every rank, as patches in the residual layout: ``b c y x -> b h y/p x/p``, local b and h.

    The output keeps nn.Conv2d's order of dims, so that the model's own ``flatten(2).transpose(1, 2)`` still works.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    mode: Mode
    plan: MatmulPlan
    patch: tuple[int, ...]
    _take_rows: Primitive
    _enter_bias: Primitive
    _multiply: Product

    @classmethod
    def convert(cls, module: nn.Conv2d, mesh: Mesh, mode: Mode) -> PatchEmbedding:
        """Return the blocks of a convolution with kernel = stride and no padding; real or meta weights.

        Raises:
            LayoutError: for another convolution, or a number of channels that cannot be split.
        """
        plain = module.padding == "valid" or all(p == 0 for p in module.padding)
        if not is_patch(module) or not plain or any(d != 1 for d in module.dilation):
            raise LayoutError(
                f"{module} is not a patch embedding: kernel_size must equal stride, with padding=0, dilation=1 and groups=1"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.mesh, made.mode, made.plan, made.patch = mesh, mode, stem_plan(mode), module.kernel_size
        residual = mode.layout("residual")
        split_evenly(module.out_channels, residual["h"], mesh, f"out_channels={module.out_channels}")
        made._take_rows, made._enter_bias = bind_take(mesh, 0, residual["m"]), bind_enter(mesh, residual["m"])
        made._multiply = bind_matmul(made.plan, mesh)
        made.weight = _block(module.weight, residual["h"], mesh)
        if module.bias is None:
            made.register_parameter("bias", None)
        else:
            made.bias = _block(module.bias, residual["h"], mesh)
        made.train(module.training)
        return made

    def forward(self, images: Tensor) -> Tensor:
        (p, q), (b, c) = self.patch, images.shape[:2]
        height, width = images.shape[2] // p, images.shape[3] // q
        # As a convolution does, drop pixels that do not fill a patch.
        whole = images[:, :, : height * p, : width * q]
        patches = whole.reshape(b, c, height, p, width, q).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * q)
        mine = self._take_rows(patches)
        y = self._multiply(to_autocast_dtype(mine), to_autocast_dtype(self.weight.flatten(1)))
        if self.bias is not None:
            y = y + self._enter_bias(self.bias).to(y.dtype)
        return y.transpose(1, 2).reshape(mine.shape[0], -1, height, width)

    def extra_repr(self) -> str:
        return f"patch={self.patch}, mode={self.mode.name}"


def _block(parameter: Tensor, axes: tuple[str, ...], mesh: Mesh) -> nn.Parameter:
    shape = tuple(parameter.shape)
    return shard_parameter(parameter, Placement(shape=shape, axes=(axes, *((),) * (len(shape) - 1))), mesh)
