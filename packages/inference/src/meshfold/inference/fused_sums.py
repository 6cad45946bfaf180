"""Sums over ranks in the step of running sequences: one kernel for the sum, the residual add and the norm after it.

Under tensor parallelism in 1d a block sums over ranks twice, after attention and after its MLP. Each sum is added to the stream,
and an RMSNorm follows. Rules find these modules by the names in our models and in transformers', so no model has a file here.
While :class:`FusedSums` is entered, a layer that ends with a sum computes its part, and the kernel returns the sum and the norm's
result, which the norm hands out when it is called. The model's own code adds the stream; in blocks of ours the kernel does. Names
prove nothing: a norm whose input is not the stream that the kernel had is found when the code that makes this compares logits
(``PagedForward``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.inference.row_kernels import (
    ENDS,
    gain_of,
    is_own_block,
    own_block,
    replaced_forwards,
    sharded_layer,
    submodule,
)
from meshfold.kernels import (
    PACKET_TRIES,
    OneShotMemory,
    RowWeight,
    one_shot_bytes,
    one_shot_rows,
    one_shot_slot,
    one_shot_sum,
    packet_bytes,
    packet_product,
    packet_rows,
    packet_sum,
    row_product,
    sum_add_norm,
)
from meshfold.mesh import Group, SpecError
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.collectives.push import peer_memory
from meshfold.tensor_parallel import Linear

_SUMS = (
    ("norm1", "attn.out", "norm2", "mlp.down"),
    ("input_layernorm", "self_attn.o_proj", "post_attention_layernorm", "mlp.down_proj"),
)
"""Modules of a block in the order of their calls: a norm of the stream, a layer with a sum, and both again."""


class SumNorm(Protocol):
    """Sums rows over ranks, adds the stream and normalises: :class:`OneShot`.

    Attributes:
        rows: that it takes at most.
    """

    rows: int

    def __call__(
        self, x: Tensor, stream: Tensor, gain: Tensor, eps: float, call: int, adds: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the sum, or stream + sum if it ``adds``, and the norm of stream + sum, ``rows h``; ``call``: of the token."""

    def of_product(
        self, x: Tensor, layer: RowWeight, stream: Tensor, gain: Tensor, eps: float, call: int, adds: bool
    ) -> tuple[Tensor, Tensor]:
        """Sum the product of one row ``.. k`` with a weight."""


class OneShot:
    """The kernels over memory that the ranks of a group share.

    Attributes:
        rows: that they take at most.
        packet_rows: that are summed by packets, data and flag in one word; more rows raise flags after their data.
        sends: the product that makes a single row sends its packets.
        without: why no rows take packets; empty if some do.
    """

    def __init__(
        self, group: Group, columns: int, dtype: torch.dtype, device: torch.device, *, packets: bool = True
    ) -> None:
        """Args:
        group: that sums; all its ranks must make one.
        columns: of the stream.
        dtype: of the rows.
        device: of this rank.
        packets: try packets, and take them if their sums are right on all ranks.

        Raises:
            SpecError: if the ranks do not reach each other's memory, or there are too many of them.
        """
        self.rows = one_shot_rows(columns, dtype.itemsize, group.size)
        if not self.rows:
            raise SpecError(f"{group.size} ranks with rows of {columns} elements sum faster in another way")
        length = one_shot_bytes(self.rows, columns, dtype.itemsize, group.size)
        found = peer_memory(group, f"one-shot sums of {self.rows} x {columns} {dtype}", length, device)
        if isinstance(found, str):
            raise SpecError(found)
        self._peers = [found]  # keeps the memory
        self._memory = OneShotMemory(found.addresses, group.index, self.rows, columns, dtype)
        self.packet_rows = packet_rows(columns, dtype.itemsize, group.size) if packets else 0
        self._packets: OneShotMemory | None = None
        self.without = "" if self.packet_rows else "not asked for" if not packets else "rows are too long"
        if not self.without:
            self._packets, self.without = self._opened(group, self.packet_rows, device)
        if self.without:
            self.packet_rows = 0
        # Those of products are in a memory of their own: a try that fails leaves epochs that differ.
        self._sent, problem = (None, "") if self.without else self._opened(group, 1, device, sends=True)
        self.sends = self._sent is not None and not problem

    def __call__(
        self, x: Tensor, stream: Tensor, gain: Tensor, eps: float, call: int, adds: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sum by a kernel."""
        slot = one_shot_slot(call)
        if x.shape[0] <= self.packet_rows:
            assert self._packets is not None
            return packet_sum(x, stream, gain, eps, self._packets, slot, adds=adds)
        return one_shot_sum(x, stream, gain, eps, self._memory, slot, adds=adds)

    def of_product(
        self, x: Tensor, layer: RowWeight, stream: Tensor, gain: Tensor, eps: float, call: int, adds: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sum the product of one row, which sends it where it can."""
        if self._sent is None or not self.sends or x.dtype != self._sent.dtype:
            return self(row_product(x, layer).view(1, -1), stream, gain, eps, call, adds)
        slot = one_shot_slot(call)
        packet_product(x, layer, self._sent, slot)
        return packet_sum(None, stream, gain, eps, self._sent, slot, adds=adds)

    def _opened(
        self, group: Group, rows: int, device: torch.device, *, sends: bool = False
    ) -> tuple[OneShotMemory | None, str]:
        """Open memory for packets of so many rows, and try sums over it; return it, and why it is not taken.

        ``sends``: products send them.
        """
        columns, dtype = self._memory.columns, self._memory.dtype
        length = packet_bytes(rows, columns, dtype.itemsize, group.size)
        found = peer_memory(group, f"packets of {rows} x {columns} {dtype}", length, device)
        if isinstance(found, str):
            return None, found
        self._peers.append(found)
        memory = OneShotMemory(found.addresses, group.index, rows, columns, dtype)
        # Its product with any row is the row.
        same = RowWeight(torch.eye(columns, dtype=dtype, device=device)) if sends else None
        return memory, _tried(partial(_summed, memory, same), group, sorted({1, rows}), columns, dtype, device)


def _summed(
    memory: OneShotMemory,
    same: RowWeight | None,
    x: Tensor,
    stream: Tensor,
    gain: Tensor,
    eps: float,
    *,
    slot: int,
    waits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Sum rows by packets; a kernel that does not wait is of the same compiled code."""
    if same is not None:
        packet_product(x, same, memory, slot)
    return packet_sum(x if same is None else None, stream, gain, eps, memory, slot, tries=PACKET_TRIES if waits else 16)


def _tried(
    compute: Callable[..., tuple[Tensor, Tensor]],
    group: Group,
    rows: Sequence[int],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Compile on all ranks, then compare as :func:`wrong_sums` does; ``compute`` takes ``waits`` too. Return what is wrong."""
    # Ranks compile at their own pace: each does so, and all meet, before one waits for another's packets.
    reason = ""
    try:
        row = torch.zeros(1, columns, dtype=dtype, device=device)
        compute(row, row, row[0], 1e-5, slot=one_shot_slot(0), waits=False)
    except Exception as problem:  # of Triton's compiler
        reason = _first_line(problem)
    reason = next(filter(None, all_gather_object(reason, group, device)), "")
    return reason or wrong_sums(compute, group, rows, columns, dtype, device)


def wrong_sums(
    compute: Callable[..., tuple[Tensor, Tensor]],
    group: Group,
    rows: Sequence[int],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Compare sums of random rows with their reference in every slot; return why they are not right, the same on all ranks.

    Ranks exchange nothing but their sums until the end: one that fails does not keep others from it.

    Args:
        compute: called as ``compute(x, stream, gain, eps, slot=slot)``.
        group: that sums.
        rows: that are tried.
        columns, dtype, device: of the rows.
    """

    def drawn(seed: int, *shape: int) -> Tensor:
        random = torch.Generator(device).manual_seed(seed)
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    reason, limit = "", 1e-4 if dtype.itemsize > 2 else 2e-2
    try:
        for call in range(3 * len(rows)):
            if reason:
                break  # each further call would wait for peers that have stopped
            shape = (rows[call % len(rows)], columns)
            parts = [drawn(1000 * call + rank, *shape) for rank in range(group.size)]
            stream, gain = drawn(call + 1_000_000, *shape), drawn(call + 2_000_000, columns)
            found = compute(parts[group.index], stream, gain, 1e-5, slot=one_shot_slot(call))
            for mine, exact in zip(found, sum_add_norm(parts, stream, gain, 1e-5), strict=True):
                error = float((mine.float() - exact.float()).norm() / exact.float().norm())
                if not error < limit:
                    reason = f"sums of {shape[0]} rows differ from their reference by {error:.1%}"
    except Exception as problem:
        reason = _first_line(problem)
    return next(filter(None, all_gather_object(reason, group, device)), "")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().split("\n")[0]


class FusedSums:
    """The layers of a model that end with a sum over ranks which a norm of the stream follows.

    Attributes:
        group: that sums.
        columns: of the stream.
        dtype: of the layers.
        sites: how many sums there are.
    """

    def __init__(self, model: nn.Module) -> None:
        """Args:
        model: split in 1d.

        Raises:
            SpecError: if there are fewer than two such layers, or their groups differ.
        """
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
        """Context manager: layers and norms compute in this way."""
        try:
            with replaced_forwards(self._forwards):
                yield
        finally:
            self._stream = self._ready = None
            self._added.clear()

    def begin(self) -> None:
        """Begin a token. Call it before each forward of the model."""
        self._stream, self._ready, self._calls = None, None, 0

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        self._stream, ready, self._ready = x, self._ready, None
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
        if rows == 1:
            total, normed = self._sums.of_product(x, known, *options)
        else:
            total, normed = self._sums(F.linear(x, known.weight).reshape(rows, -1), *options)
        self._calls += 1
        self._ready = (norm, normed)
        return total.view(*x.shape[:-1], -1)


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
