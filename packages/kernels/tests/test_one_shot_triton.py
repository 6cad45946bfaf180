"""The one-shot sum in Triton: each rank's kernel alone, its peers' rows and flags given, against the reference.

On a GPU, or in Triton's interpreter (``test_triton_interpreter.py``). For several GPUs at once there is
``packages/inference/tests/one_shot_checks.py``.
"""

from __future__ import annotations

import os

import pytest
import torch

from meshfold.kernels import OneShotMemory, one_shot_bytes, one_shot_sum, sum_add_norm

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
