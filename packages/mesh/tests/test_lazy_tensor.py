"""A tensor that is put together when it is read is the whole one, values and gradients, whatever reads it."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshfold.mesh import CollectiveError, Mesh, all_reduce, record
from meshfold.mesh.collectives.primitives import gather_blocks, take_block
from meshfold.mesh.model_io.lazy_tensor import LazyTensor, ShardedOutput, lazy_gather, local_shard
from meshfold.mesh.testing import close_pools, ranks, run_on_ranks
from meshfold.mesh.watchdog import diagnosis, monitor

ROWS, COLUMNS = 3, 8
TARGETS = torch.tensor([1, 5, 7])


def values(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, COLUMNS, dtype=dtype, generator=torch.Generator().manual_seed(1))


def pieces(mesh: Mesh, what: str = "the scores") -> ShardedOutput:
    return ShardedOutput(
        what=what,
        mesh=mesh,
        axes=("tensor",),
        shape=(ROWS, COLUMNS),
        whole=lambda x: gather_blocks(x, mesh, 1, ("tensor",)),
        piece=lambda g: take_block(g, mesh, 1, ("tensor",)),
    )


def of(x: Tensor, mesh: Mesh) -> Tensor:
    """``2 x`` that is put together of its columns when it is read; and so is its gradient."""
    return lazy_gather(take_block(x, mesh, 1, ("tensor",)) * 2, pieces(mesh))


def test_nothing_is_exchanged_before_values_are_needed() -> None:
    run_on_ranks(2, look_without_reading)


def look_without_reading() -> None:
    mesh = Mesh(dict(tensor=2))
    x = values().requires_grad_()
    with record() as log:
        found = of(x, mesh)
        assert isinstance(found, Tensor) and found.requires_grad and not found.is_leaf
        assert found.shape == (ROWS, COLUMNS) and found.size(-1) == COLUMNS and found.stride() == (COLUMNS, 1)
        assert found.dim() == found.ndim == 2 and found.numel() == 24 and len(found) == ROWS
        assert found.dtype == torch.float64 and found.device.type == "cpu" and found.is_floating_point()
        for other in (found.float(), found.to(torch.bfloat16).double(), found.detach(), found.data.half()):
            assert isinstance(other, LazyTensor) and not other.held.read
        assert not found.detach().requires_grad and found.float().requires_grad
        text = f"{found} {found.detach()!r}"
        assert "the scores: a piece on each of 2 ranks, put together when they are read" in text
        assert local_shard(found).shape == local_shard(found.float()).shape == (ROWS, COLUMNS // 2)
        found.register_hook(lambda g: g)
        assert not log.entries
        found.argmax(-1)
    assert [(entry.kind, entry.axes) for entry in log.entries] == [("all_gather", ("tensor",))]
    assert torch.equal(local_shard(found), 2 * values()) and "tensor([[" in repr(found)


def masked(z: Tensor) -> Tensor:
    z[:, 2] = -1.0
    return z.square().sum()


def scaled(z: Tensor) -> Tensor:
    part = z.view(-1)[3:]
    part.mul_(3.0)
    z.div_(2.0)
    return z.square().sum() + part.sum()


class CrossEntropy(torch.autograd.Function):
    """A user's own, in which autograd sees nothing."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(z, targets)
        return F.cross_entropy(z, targets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        z, targets = ctx.saved_tensors
        return grad * (z.softmax(-1) - F.one_hot(targets, COLUMNS)) / ROWS, None


def through_the_gradient(z: Tensor) -> Tensor:
    """It has a gradient of its own, which can be asked for."""
    loss = z.exp().sum()
    (grad,) = torch.autograd.grad(loss, z, create_graph=True)
    return loss + grad.detach().square().sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda z: F.cross_entropy(z, TARGETS),
    "in float32": lambda z: F.cross_entropy(z.float(), TARGETS).double(),
    "cast twice": lambda z: z.float().double().square().sum() + z.sum(),
    "slices": lambda z: z[:-1, 1:].exp().sum() + z.flatten()[3] + torch.stack([z, z]).sum(),
    "in place": masked,
    "in place, in a view": scaled,
    "a function of its own": lambda z: CrossEntropy.apply(z, TARGETS),  # type: ignore[no-any-return]
    "checkpoint": lambda z: checkpoint(torch.logsumexp, z, -1, use_reentrant=False).sum(),  # type: ignore[no-untyped-call]
    "autograd.grad": through_the_gradient,
    "copied": lambda z: (z.clone() * z.detach()).sum() + z.to("cpu").sum() + z.contiguous().sum(),
}


def compare_gradients(name: str) -> None:
    mesh, loss_of = Mesh(dict(tensor=2)), LOSSES[name]
    x, y = (values().requires_grad_() for _ in range(2))
    wanted, found = loss_of(y * 2), loss_of(of(x, mesh))
    assert type(found) is Tensor
    wanted.backward()
    found.backward()
    grad = all_reduce(x.grad, mesh.group("tensor"))  # each rank's piece
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    tolerance = 1e-6 if "float" in name or "cast" in name else 1e-12
    torch.testing.assert_close(grad, y.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_gradient_of_the_whole(name: str) -> None:
    run_on_ranks(2, compare_gradients, name)


READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda z: z.tolist(),
    "numpy": lambda z: z.numpy().tolist(),
    "asarray": lambda z: __import__("numpy").asarray(z).tolist(),
    "item": lambda z: z[0, 0].item(),
    "iterate": lambda z: [float(row.max()) for row in z],
    "deepcopy": lambda z: copy.deepcopy([z, z])[1].tolist(),
    "pickle": lambda z: pickle.loads(pickle.dumps(z)).tolist(),
    "dlpack": lambda z: torch.from_dlpack(z).tolist(),
    "save": lambda z: saved(z).tolist(),
    "cpu": lambda z: type(z.clone().cpu()).__name__ + str(z.cpu().tolist()),
    "out": lambda z: torch.mul(z, 2.0, out=z).tolist() + z.tolist(),
    "argmax": lambda z: z.argmax(-1).tolist(),
    "compare": lambda z: bool((z == z).all()) and z.topk(2).indices.tolist(),
    "autocast": lambda z: autocast(z).tolist(),
}


def saved(z: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(z, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


def autocast(z: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (z.float() @ z.float().t()).float()


def compare_reads() -> None:
    mesh = Mesh(dict(tensor=2))
    for name, read in READS.items():
        for guard in (torch.no_grad, torch.inference_mode):
            if (name, guard) in (("deepcopy", torch.inference_mode), ("dlpack", torch.inference_mode)):
                continue
            with guard():
                assert read(of(values(), mesh)) == read(values() * 2), (name, guard)
    found = of(values().requires_grad_(), mesh)
    with pytest.raises(RuntimeError, match="requires grad"):
        found.numpy()
    assert found.detach().numpy().shape == (ROWS, COLUMNS)


def test_every_way_to_read_gives_the_whole() -> None:
    run_on_ranks(2, compare_reads)


def read_first_without_gradients() -> None:
    mesh = Mesh(dict(tensor=2))
    x = values().requires_grad_()
    found = of(x, mesh)
    with torch.inference_mode():
        found.argmax(-1)
    F.cross_entropy(found, TARGETS).backward()
    assert x.grad is not None


def test_what_was_read_first_without_gradients_can_be_trained_on() -> None:
    run_on_ranks(2, read_first_without_gradients)


def pieces_of_pieces() -> None:
    """Of rows over one axis, each of whose pieces is one of columns over another."""
    mesh = Mesh(dict(rows=2, tensor=2))
    x, y = (torch.randn(4, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    x.requires_grad_()
    y.requires_grad_()
    inner = ShardedOutput(
        what="inner",
        mesh=mesh,
        axes=("tensor",),
        shape=(2, COLUMNS),
        whole=partial(gather_blocks, mesh=mesh, dim=1, axes=("tensor",)),
        piece=partial(take_block, mesh=mesh, dim=1, axes=("tensor",)),
    )
    outer = ShardedOutput(
        what="outer",
        mesh=mesh,
        axes=("rows",),
        shape=(4, COLUMNS),
        whole=partial(gather_blocks, mesh=mesh, dim=0, axes=("rows",)),
        piece=partial(take_block, mesh=mesh, dim=0, axes=("rows",)),
    )
    mine = take_block(take_block(x, mesh, 0, ("rows",)), mesh, 1, ("tensor",))
    found = lazy_gather(lazy_gather(mine, inner), outer)
    assert local_shard(found).shape == (2, COLUMNS // 2)
    loss = found.float().double().exp().sum() + found.exp().sum()
    loss.backward()
    (2 * y.exp().sum()).backward()
    grad = all_reduce(x.grad, mesh.group("rows", "tensor"))
    torch.testing.assert_close(grad, y.grad, rtol=1e-6, atol=1e-6)


def test_pieces_may_be_of_pieces() -> None:
    run_on_ranks(4, pieces_of_pieces)


# -- one rank alone -------------------------------------------------------------------------------------------------


def one_reads_alone(then: str) -> tuple[str, float]:
    diagnosis._BEAT_S = 0.2  # of this pool's ranks, which end with the test
    monitor.watch(100.0)
    mesh = Mesh(dict(tensor=2))
    group = mesh.group("tensor")
    first, second = of(values(), mesh), lazy_gather(torch.ones(ROWS, 4), pieces(mesh, "others"))
    all_reduce(torch.ones(1), group)
    began = time.monotonic()
    try:
        if mesh.rank == 0:
            first.argmax(-1)
        elif then == "a collective":
            all_reduce(torch.ones(4), group)
        elif then == "one that it does not wait for":  # as over NCCL
            all_reduce(torch.ones(4), group, async_op=True)
            time.sleep(10)
        elif then == "another":
            second.argmax(-1)
        elif then == "its end":
            monitor._running[1]._at_exit()  # type: ignore[index]  # what runs when Python ends
            time.sleep(10)
    except CollectiveError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.few(1)
@pytest.mark.parametrize("then", ["a collective", "one that it does not wait for", "another", "its end"])
def test_a_rank_that_reads_alone_is_told_so_within_seconds(then: str) -> None:
    close_pools()
    try:
        found = run_on_ranks(2, one_reads_alone, then)
    finally:
        close_pools()
    text, seconds = found[0]
    assert seconds < 80.0
    assert text.startswith("the scores cannot be read at test_lazy_tensor.py:")
    assert "in one_reads_alone: ranks 0, 1 have one shard each, so all of them must read it" in text
    said = {
        "a collective": "waits in all_reduce of (4,) float32",
        "one that it does not wait for": "its last collective was all_reduce of (4,) float32",
        "another": "waits in a meeting to read others",
        "its end": "its program has ended",
    }
    [line] = [line for line in text.splitlines() if line.startswith("  rank 1: ")]
    assert said[then] in line
    if then in ("a collective", "another"):
        assert "cannot be read" in found[1][0]  # it was told


@ranks(2)
def test_a_rank_that_comes_late_is_waited_for() -> None:
    mesh = Mesh(dict(tensor=2))
    with_watch = monitor.watch(100.0)
    try:
        for late in (0.0, 1.5, 0.0):  # a rank looks round after a second
            found = of(values(), mesh)
            if mesh.rank == 1:
                time.sleep(late)
            assert torch.equal(found.detach().clone(), 2 * values())
            all_reduce(torch.ones(1), mesh.group("tensor"))
    finally:
        with_watch.close()
