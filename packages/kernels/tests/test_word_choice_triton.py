"""Choice of tokens in Triton, on a GPU or in Triton's interpreter (``test_triton_interpreter.py``), against the reference."""

from __future__ import annotations

import os

import pytest
import torch

from meshfold.kernels import TokenState, merge_words, random_bits, table_rows, word_parts
from meshfold.kernels.random_bits import stream

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("no GPU; test_triton_interpreter.py runs this file in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize(("dtype", "noisy"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
def test_kernels_choose_as_the_reference(dtype: torch.dtype, noisy: bool) -> None:
    from meshfold.kernels.word_choice_triton import launch_choice, launch_merge, launch_parts

    random = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(3, 5000, generator=random)).to(dtype)
    logits[0, [700, 4100]] = 20.0
    divisor = torch.tensor([1.0, 0.7, 1.3])
    states = stream(random_bits(5, 6, torch.arange(3)), 9) if noisy else None
    draws = torch.tensor([False, True, True]) if noisy else None
    wanted = merge_words(torch.stack([word_parts(logits, divisor, 10, states, draws)]))  # type: ignore[arg-type]
    given = [None if x is None else x.to(DEVICE) for x in (states, draws)]  # type: ignore[union-attr]
    parts = launch_parts(logits.to(DEVICE), divisor.to(DEVICE), 10, *given)
    assert parts.shape == (3, 3, 5)
    for found in (launch_choice(parts), launch_choice(launch_merge(parts)[None])):
        assert torch.equal(found[0].cpu(), wanted[0]) and found[0][0] == 710
        assert torch.allclose(found[1].cpu(), wanted[1], atol=1e-5)


def test_a_token_is_recorded_and_is_what_the_next_one_begins_with() -> None:
    from meshfold.kernels.token_state_triton import launch_record

    def made() -> TokenState:
        numbers = (torch.tensor(values) for values in ([7, 8, 9], [4, 0, 11], [1, 0, 1], [2]))
        return TokenState(*numbers, torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3, dtype=torch.float64))

    wanted, found = made(), TokenState(*(part.to(DEVICE) for part in made()))
    for turn in range(2):
        tokens, logprobs = torch.tensor([3, 1 << 40, 5]) + turn, torch.tensor([-0.5, -1e-8, -3.0])
        wanted.record(tokens, logprobs, 12)  # the last position: the third row would be at 13
        launch_record(tokens.to(DEVICE), logprobs.to(DEVICE), found, 12)
    assert wanted.positions.tolist() == [6, 0, 12] and wanted.step.item() == 4 and wanted.tokens[3, 1] == (1 << 40) + 1
    for mine, exact in zip(found, wanted, strict=True):
        assert torch.equal(mine.cpu(), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_parts_of_a_table_sum_to_its_rows(dtype: torch.dtype) -> None:
    from meshfold.kernels.token_state_triton import launch_rows

    table, ids = torch.randn(12, 1100).to(dtype), torch.tensor([0, 11, 5, 6, 5])
    total = torch.zeros(5, 1100, dtype=dtype)
    for first in (0, 6):
        part = table[first : first + 6]
        found = launch_rows(ids.to(DEVICE), part.to(DEVICE), first).cpu()
        assert torch.equal(found, table_rows(ids, part, first)) and not found[(ids - first) // 6 != 0].any()
        total += found
    assert torch.equal(total, table[ids])
