"""Under ``zero`` a kernel that steps master weights writes the 16-bit shards in the same pass, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.engine.zero import ZeroStates
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.optimizer.master_weights import Weights

WORDS, TOKENS = 64, 8


def trained(spec: dict[str, Any], name: str, writes: bool) -> tuple[list[float], int, bool]:
    """Return losses, the passes that only copy a shard, and whether all weights are their masters rounded."""
    copied: list[Chunk] = []
    with pytest.MonkeyPatch.context() as patch:
        show = Chunk.show
        patch.setattr(Chunk, "show", lambda chunk, values: (copied.append(chunk), show(chunk, values)))
        if not writes:
            patch.setattr(Weights, "has_shard_beside", False)
        with Engine(
            lambda: GPT(GPTConfig(vocab_size=WORDS, hidden=32, layers=2, heads=2, max_positions=TOKENS)),
            spec,
            optimizer=dict(name=name, lr=1e-2),
            precision="bf16",
            clip_grad_norm=1.0,
            device="cpu",
        ) as engine:
            optimizer: Any = engine.optimizer
            # As on a GPU: a host with numba has a kernel of its own for LAMB's direction, which writes no copies.
            optimizer.kernels = {key: kernel for key, kernel in optimizer.kernels.items() if key != "lamb_direction"}
            ids = torch.randint(WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(0))
            batch = engine.shard_batch(dict(input_ids=ids, labels=ids))
            copied.clear()
            losses = [float(engine.train_step(batch)) for _ in range(3)]
            count = len(copied)
            assert isinstance(engine.states, ZeroStates)
            gemini = engine.states.gemini
            rounded = all(
                torch.equal(weights.tensor.to(chunk.dtype), chunk.shard)
                for chunk, weights in gemini._stepper._weights.items()  # type: ignore[union-attr]
            )
    return losses, count, rounded


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lion", "lamb"])
def test_shards_on_the_device_are_written_by_the_step(name: str) -> None:
    for stage, place in ((1, "cuda"), (3, "cuda"), (3, "cpu")):
        spec = dict(data=2, zero=dict(stage=stage, placement=place))
        for fused, plain in zip(
            run_on_ranks(2, trained, spec, name, True), run_on_ranks(2, trained, spec, name, False), strict=True
        ):
            assert fused[0] == plain[0] and fused[2] and plain[2] and plain[1] > 0
            assert (fused[1] == 0) == (place == "cuda")
