"""The one-shot sum in Triton: each rank's kernel alone, its peers' rows and flags given, against the reference.

On a GPU, or in Triton's interpreter (``test_triton_interpreter.py``). For several GPUs at once there is
``packages/inference/tests/one_shot_checks.py``.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch

from meshfold.kernels import (
    OneShotMemory,
    RowWeight,
    largest_magnitudes,
    one_shot_bytes,
    one_shot_sum,
    pack_weight,
    packet_bytes,
    packet_product,
    packet_sum,
    row_product,
    sum_add_norm,
)
from meshfold.kernels.one_shot_packets import PARTS, epoch_bytes, packet_parts, packets_of, rows_of
from meshfold.kernels.row_tiles import RowCall, Tile, take_row_tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("no GPU; test_triton_interpreter.py runs this file in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_sum_and_uses_up_the_flags(ranks: int) -> None:
    rows, most, columns, eps = 3, 4, 40, 1e-5
    random = torch.Generator().manual_seed(ranks)
    held = [
        torch.zeros(one_shot_bytes(most, columns, 4, ranks), dtype=torch.uint8, device=DEVICE) for _ in range(ranks)
    ]
    addresses = torch.tensor([one.data_ptr() for one in held], device=DEVICE)
    memories = [OneShotMemory(addresses, rank, most, columns, torch.float32) for rank in range(ranks)]
    start = memories[0].flag_bytes
    for slot in (0, 2, 1):
        parts = [torch.randn(rows, columns, generator=random).to(DEVICE) for _ in range(ranks)]
        stream, gain = torch.randn(rows, columns, generator=random).to(DEVICE), torch.rand(columns).to(DEVICE)
        adds = slot == 2
        wanted = sum_add_norm(parts, stream, gain, eps, adds=adds)
        found = []
        for rank in range(ranks):
            for peer in range(ranks):  # as far as peers get before they wait
                there = held[peer][start:].view(torch.float32).view(3, most, columns)
                there[slot, :rows] = parts[peer] if peer != rank else torch.nan
                flags = held[rank][: 4 * 3 * most * ranks].view(torch.int32).view(3, most, ranks)
                flags[slot, :rows, peer] = int(peer != rank)
            found.append(one_shot_sum(parts[rank], stream, gain, eps, memories[rank], slot, adds=adds))
            flags = held[rank][: 4 * 3 * most * ranks].view(torch.int32).view(3, most, ranks)
            assert not flags.any()
            for peer in range(ranks):
                raised = held[peer][: 4 * 3 * most * ranks].view(torch.int32).view(3, most, ranks)
                assert raised.sum() == (rows if peer != rank else 0)
                assert peer == rank or raised[slot, :rows, rank].tolist() == [1] * rows
                raised.zero_()
        for total, y in found:
            assert torch.equal(total, found[0][0]) and torch.equal(y, found[0][1])
            assert torch.allclose(total, wanted[0], atol=1e-6) and torch.allclose(y, wanted[1], atol=1e-5)


class Packets:
    """Memory of every rank for packets, and what stands in it."""

    def __init__(self, ranks: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.shape = (3, ranks, rows, columns * dtype.itemsize // 4)
        length = packet_bytes(rows, columns, dtype.itemsize, ranks)
        self.held = [torch.zeros(length, dtype=torch.uint8, device=DEVICE) for _ in range(ranks)]
        addresses = torch.tensor([one.data_ptr() for one in self.held], device=DEVICE)
        self.memories = [OneShotMemory(addresses, rank, rows, columns, dtype) for rank in range(ranks)]

    def of(self, rank: int) -> torch.Tensor:
        """Packets in a rank's memory, ``slots ranks rows words``."""
        start = epoch_bytes(self.shape[2])
        return self.held[rank][start:].view(torch.int64).view(self.shape)

    def epochs(self, rank: int) -> torch.Tensor:
        """Epochs of a rank, ``slots rows``: those of all parts that programs sum agree."""
        slots, _, rows, words = self.shape
        each = self.held[rank][: 4 * slots * rows * PARTS].view(torch.int32).view(slots, rows, PARTS)
        assert (each[..., : packet_parts(words)] == each[..., :1]).all()
        return each[..., 0]


@pytest.mark.parametrize(
    ("ranks", "dtype", "stream_dtype"), [(2, torch.bfloat16, None), (4, torch.float32, torch.bfloat16)]
)
def test_packets_are_sent_read_and_summed(ranks: int, dtype: torch.dtype, stream_dtype: torch.dtype | None) -> None:
    rows, most, columns, eps = 2, 3, 40, 1e-5
    random, packets = torch.Generator().manual_seed(ranks), Packets(ranks, most, columns, dtype)
    calls = [0, 0, 0]
    rounding = 2e-2 if torch.bfloat16 in (dtype, stream_dtype) else 1e-5  # the interpreter truncates
    near = dict(rtol=rounding, atol=rounding)
    for slot in (0, 2, 2):
        calls[slot] += 1
        parts = [torch.randn(rows, columns, generator=random).to(DEVICE, dtype) for _ in range(ranks)]
        stream = torch.randn(rows, columns, generator=random).to(DEVICE, stream_dtype or dtype)
        gain, adds = torch.rand(columns, generator=random).to(DEVICE), slot == 2
        wanted = sum_add_norm(parts, stream, gain, eps, adds=adds)
        found = []
        for rank, memory in enumerate(packets.memories):
            for peer in range(ranks):
                if peer != rank:  # as peers have sent
                    packets.of(rank)[slot, peer, :rows] = packets_of(parts[peer], calls[slot])
                    packets.of(peer)[slot, rank] = -1
            found.append(packet_sum(parts[rank], stream, gain, eps, memory, slot, adds=adds))
            assert packets.epochs(rank)[slot].tolist() == [calls[slot]] * rows + [0] * (most - rows)
            for peer in range(ranks):
                if peer != rank:
                    sent = rows_of(packets.of(peer)[slot, rank, :rows], calls[slot], dtype)
                    assert sent is not None and torch.equal(sent, parts[rank])
                    assert (packets.of(peer)[slot, rank, rows:] == -1).all()  # rows that are not there
        for total, y in found:
            assert torch.equal(total, found[0][0]) and torch.equal(y, found[0][1])
            for mine, exact in ((total, wanted[0]), (y, wanted[1])):
                assert torch.allclose(mine.float(), exact.float(), **near)


@pytest.mark.parametrize(
    ("ranks", "dtype", "form", "words"),
    [
        (3, torch.float32, "", False),
        (2, torch.bfloat16, "int8", True),
    ],
)
def test_products_send_their_row(
    ranks: int, dtype: torch.dtype, form: str, words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's product writes to all memories; the sums are those of products and sums apart, and the same on all ranks."""
    n, k = 60, 64
    random, packets = torch.Generator().manual_seed(ranks), Packets(ranks, 3, n, dtype)
    most = 3e-2 if dtype == torch.bfloat16 else 1e-5
    monkeypatch.setattr("meshfold.kernels.row_tiles._measured", {})
    for call, slot in enumerate((0, 2, 2)):
        parts, stream = [], torch.randn(1, n, generator=random).to(DEVICE, dtype)
        gain, adds = torch.rand(n, generator=random).to(DEVICE, dtype), call == 2
        for memory in packets.memories:
            x, w = torch.randn(1, k, generator=random).to(DEVICE, dtype), torch.randn(n, k, generator=random).to(DEVICE)
            layer = RowWeight(w.to(dtype))
            if form:
                packed = pack_weight(w, form, k, largest_magnitudes(w, form, k))
                layer = RowWeight(packed.codes, None, packed.scale, packed.zero)
            take_row_tiles({RowCall(layer).kind(dtype): Tile(8, 64, 2, words=words)})
            packet_product(x, layer, memory, slot)
            parts.append(row_product(x.cpu(), RowWeight(*(None if each is None else each.cpu() for each in layer))))
        wanted = sum_add_norm(parts, stream.cpu(), gain.cpu(), 1e-5, adds=adds)
        found = [packet_sum(None, stream, gain, 1e-5, memory, slot, adds=adds) for memory in packets.memories]
        for total, y in found:
            assert torch.equal(total, found[0][0]) and torch.equal(y, found[0][1])
        for mine, exact in zip(found[0], wanted, strict=True):
            error = float((mine.cpu().float() - exact.float()).norm() / exact.float().norm())
            assert error < most, (call, error)
        assert [int(packets.epochs(rank)[slot, 0]) for rank in range(ranks)] == [max(call, 1)] * ranks
    with pytest.raises(ValueError, match="the memory is for"):
        packet_product(x, layer.part(0, n - 2), packets.memories[0], 1)


@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 1400), (torch.float32, 300)])
def test_programs_share_a_row_without_its_norm(dtype: torch.dtype, columns: int) -> None:
    """The sums have the bits of those with the norm, which may come before and after in the same slot."""
    ranks, most = 3, 2
    random, packets = torch.Generator().manual_seed(columns), Packets(ranks, most, columns, dtype)
    assert packet_parts(columns * dtype.itemsize // 4) > 1
    gain = torch.rand(columns, generator=random).to(DEVICE)
    for call, norm in enumerate((False, True, False), 1):
        parts = [torch.randn(most, columns, generator=random).to(DEVICE, dtype) for _ in range(ranks)]
        stream, adds = torch.randn(most, columns, generator=random).to(DEVICE, dtype), call > 1
        found = []
        for rank, memory in enumerate(packets.memories):
            for peer in range(ranks):
                packets.of(rank)[1, peer] = packets_of(parts[peer], call)
            given = None if rank else parts[0]  # the first rank sends by the sum, others have sent by products
            found.append(
                packet_sum(
                    given, stream[: most if given is not None else 1], gain, 1e-5, memory, 1, adds=adds, norm=norm
                )
            )
            rows = most if given is not None else 1
            assert packets.epochs(rank)[1, :rows].tolist() == [call] * rows
        wanted = sum_add_norm(parts, stream, gain, 1e-5, adds=adds)[0]
        for total, y in found:
            assert (y is None) != norm and torch.equal(total, found[0][0][: len(total)])
            assert torch.allclose(total.float(), wanted[: len(total)].float(), rtol=2e-2, atol=2e-2)


def test_a_rank_waits_for_packets_that_come_one_by_one() -> None:
    """Those of the call before in the same slot do not count."""
    if not INTERPRETED:
        pytest.skip(
            "a GPU's kernel does not see what the host writes meanwhile; one_shot_checks.py has ranks that are late"
        )
    packets, parts = Packets(2, 1, 8, torch.bfloat16), torch.arange(32.0).bfloat16().view(4, 1, 8)
    stream, gain = torch.zeros(1, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    there = packets.of(0)[1, 1]
    there.copy_(packets_of(parts[0], 1))
    packet_sum(parts[1], stream, gain, 1e-5, packets.memories[0], 1)

    def send() -> None:
        for word in range(4):
            threading.Event().wait(0.02)
            there[0, word] = packets_of(parts[2], 2)[0, word]

    peer = threading.Thread(target=send)
    peer.start()
    try:
        total, _ = packet_sum(parts[3], stream, gain, 1e-5, packets.memories[0], 1, tries=1 << 22)
    finally:
        peer.join()
    assert torch.equal(total, parts[2] + parts[3])


def test_a_check_gives_up_where_packets_do_not_come() -> None:
    packets = Packets(2, 1, 8, torch.float32)
    ones = torch.ones(1, 8, device=DEVICE)
    total, _ = packet_sum(ones, ones, ones[0], 1e-5, packets.memories[1], 0, tries=5)
    assert torch.equal(total, ones)  # its peer's part is missing
