"""What is sent equals the formula, to the byte; what overlaps is under way; what a mask empties is not computed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.mesh import Mesh, collectives
from meshfold.mesh.recording.comm_log import record
from meshfold.mesh.testing import fake_world, ranks
from meshfold.sequence import attention, kernels, traffic

CASES: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    ({"seq": 4}, "ring", {}),
    ({"seq": 4}, "ring", dict(causal=False)),
    ({"seq": 8}, "ring", dict(order="contiguous", window=3)),
    ({"seq": 4}, "ring", dict(documents=(0, 16, 32, 48, 64), order="contiguous")),
    ({"seq": 4}, "ulysses", {}),
    ({"seq": 8}, "ulysses", {}),
    ({"ring": 4, "ulysses": 2}, "ring_ulysses", {}),
    ({"ring": 2, "ulysses": 8}, "ring_ulysses", {}),
    ({"seq": 4}, "ring_self", {}),
    ({"data": 2, "seq": 2}, "ring", {}),
]


def send(axes: dict[str, int], mode: str, length: int, dtype: torch.dtype, **masks: Any) -> tuple[Any, ...]:
    """The recording of one forward and backward, with the mesh."""
    mesh = Mesh(axes)
    local = -(-length // mesh.size("seq", "ring", "ulysses"))
    q, k, v = (torch.zeros(2, local, heads, 16, dtype=dtype, requires_grad=True) for heads in (8, 4, 4))
    with record() as log:
        out = attention(q, k, v, mesh=mesh, mode=mode, **masks)
        log.phase = "backward"
        out.sum().backward()
    return log, mesh


@pytest.mark.parametrize(("axes", "mode", "masks"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_are_the_formula(axes: dict[str, int], mode: str, masks: dict[str, Any], dtype: torch.dtype) -> None:
    world = 1
    for size in axes.values():
        world *= size
    with fake_world(world, rank=1):
        log, mesh = send(axes, mode, 64, dtype, **masks)
        sent = log.bytes_by("phase")
        wanted = traffic(64, 8, 4, 16, mesh, mode, batch=2, dtype=dtype, **masks)
        assert (sent.get(("forward",), 0), sent.get(("backward",), 0)) == wanted


def test_the_formulas_as_the_papers_have_them() -> None:
    """n = elements of a rank's keys; arXiv 2105.13120: 2 (N - 1) n and 6 (N - 1) n; arXiv 2309.14509: 4 N h / P."""
    n, four = 2 * 16 * 8 * 16, Mesh({"seq": 4}, rank=0)
    given: dict[str, Any] = dict(batch=2, dtype=torch.float32)
    assert traffic(64, 8, 8, 16, four, "ring_self", **given) == (2 * 3 * n * 4, 6 * 3 * n * 4)
    assert traffic(64, 8, 8, 16, four, "ulysses", **given) == (4 * Fraction(3, 4) * n * 4,) * 2
    assert traffic(64, 8, 8, 16, four, "ring", **given) == (2 * 3 * n * 4, (2 * 3 + 2 * 4) * n * 4)
    assert traffic(64, 8, 8, 16, Mesh({}), "ring", **given) == (0, 0)


def test_one_packed_exchange_each_way() -> None:
    with fake_world(4):
        log, _ = send({"seq": 4}, "ulysses", 64, torch.float32)
        assert [(entry.kind, entry.phase) for entry in log.entries] == [
            ("all_to_all", "forward"),
            ("all_to_all", "forward"),
            ("all_to_all", "backward"),
            ("all_to_all", "backward"),
        ]


def test_the_next_block_is_on_its_way_while_a_tile_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of events: every message but the first waits for nothing that a tile of its step computes."""
    events: list[str] = []
    shift = collectives.shift

    class Watched(kernels.FlashCPU):
        def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            events.append("tile")
            return super().forward(*arguments)

        def backward(self, *arguments: Any) -> Any:
            events.append("tile")
            return super().backward(*arguments)

    def watched(x: Tensor, *arguments: Any, async_op: bool = False) -> Any:
        events.append("send")
        pending = shift(x, *arguments, async_op=async_op)
        if not async_op:
            return pending
        wait = pending.wait

        class Seen(collectives.Pending):
            def wait(self) -> Tensor:
                events.append("wait")
                return wait()

        return Seen(pending._tensor, None)

    monkeypatch.setitem(kernels._ON, ("flash", "cpu"), Watched())
    monkeypatch.setattr(collectives, "shift", watched)
    with fake_world(4, rank=1):
        q, k, v = (torch.zeros(1, 8, 2, 8, dtype=torch.float32, requires_grad=True) for _ in range(3))
        out = attention(q, k, v, mesh=Mesh({"seq": 4}))
        assert events == ["send", "tile", "wait", "send", "tile", "wait", "send", "tile", "wait", "tile"]
        events.clear()
        out.sum().backward()
        assert events == [
            "send",
            "tile",
            "send",  # the block sets out, its tile is computed, its sums follow
            "wait",
            "send",
            "tile",
            "wait",
            "send",
            "wait",
            "send",
            "tile",
            "wait",
            "send",
            "wait",
            "tile",
            "wait",
            "send",
            "wait",  # back where they came from
        ]


@ranks(4)
def test_only_the_neighbours_talk_under_a_short_window() -> None:
    """Contiguous, a window shorter than a share needs one hop, and dK and dV one hop back."""
    log, _ = send({"seq": 4}, "ring", 64, torch.float32, order="contiguous", window=4)
    assert [entry.kind for entry in log.entries] == ["shift"] * 4
