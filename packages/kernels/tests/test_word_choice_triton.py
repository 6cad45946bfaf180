"""Choice of tokens in Triton, on a GPU or in Triton's interpreter (``test_triton_interpreter.py``), against the reference."""

from __future__ import annotations

import os

import pytest
import torch

from meshfold.kernels import merge_words, random_bits, word_parts
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
