"""Adam and the gradient pass in Triton give the bits of the reference: on a GPU, or in Triton's interpreter.

Without a GPU ``test_triton_interpreter.py`` runs this file in a process of its own, as it does ``test_triton_twins.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch
from adam_cases import STATES, assert_same, normal, raw, state, train
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfold import kernels as K

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("no GPU; test_triton_interpreter.py runs this file in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXAMPLES = 3 if INTERPRETED else 25


@pytest.fixture(autouse=True)
def triton(automatic: None) -> Iterator[None]:
    """Everything here runs in Triton unless a test says otherwise; no silent reference."""
    with K.use("triton"):
        yield


@pytest.mark.parametrize("kind", STATES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    n=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    start=st.one_of(st.integers(0, 1 << 33), st.integers(65_536 - 1000, 65_536)),
    adamw_mode=st.booleans(),
    in_memory=st.booleans(),
    seed=st.integers(0, 99),
)
def test_steps(kind: str, n: int, dtype: torch.dtype, start: int, adamw_mode: bool, in_memory: bool, seed: int) -> None:
    start = start // 256 * 256 if kind == "C" else start
    scale = torch.tensor(0.3, device=DEVICE) if in_memory else 0.3
    got, wanted = (
        train(
            kind,
            name,
            n,
            steps=2,
            dtype=dtype,
            start=start,
            seed=seed,
            device=DEVICE,
            grad_scale=scale,
            adamw_mode=adamw_mode,
        )
        for name in ("triton", "reference")
    )
    assert_same(got, wanted, kind)


@pytest.mark.parametrize("kind", STATES)
def test_halves(kind: str) -> None:
    got = train(kind, "triton", 2100, start=512, halves=True, device=DEVICE)
    assert_same(got, train(kind, "reference", 2100, start=512, device=DEVICE), kind)


@pytest.mark.parametrize("kind", STATES)
def test_what_is_not_finite(kind: str) -> None:
    results = []
    for implementation in ("triton", "reference"):
        with K.use(implementation):
            made = state(kind, normal(1100, 0, device=DEVICE))
            grad = normal(1100, 1, device=DEVICE)
            grad[7], grad[600], grad[601] = math.nan, math.inf, -math.inf
            for step in (1, 2):
                K.adam_step(made, grad, K.AdamSettings(), step=step)
            results.append(made)
    assert bool(results[0].master()[7].isnan())
    assert torch.equal(raw(results[0].master()), raw(results[1].master()))


def test_masters() -> None:
    upper = torch.arange(0, 1 << 16, 7).unsqueeze(1) << 16
    patterns = (upper + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).view(-1)
    patterns = torch.cat((patterns, torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])))
    x = patterns.to(torch.int32).view(torch.float32).to(DEVICE)
    hi, lo = K.split_master(x)
    with K.use("reference"):
        wanted = K.split_master(x)
    assert torch.equal(hi.view(torch.int16), wanted[0].view(torch.int16)) and torch.equal(lo, wanted[1])
    assert torch.equal(raw(K.join_master(hi, lo)), raw(x))


@settings(max_examples=3 * EXAMPLES, deadline=None)
@given(
    n=st.integers(0, 5000),
    dtype=st.sampled_from(DTYPES),
    norm=st.sampled_from([1.0, 2.0, math.inf]),
    block=st.sampled_from([1024, 2048]),
    start=st.integers(0, 1 << 40),
    bad=st.sampled_from([0.0, math.inf, -math.inf, math.nan]),
)
def test_gradients(n: int, dtype: torch.dtype, norm: float, block: int, start: int, bad: float) -> None:
    x = normal(n, 3, dtype, DEVICE)
    if n:
        x[n // 2] = bad
    sums = {2.0: K.sum_of_squares, 1.0: K.sum_of_magnitudes, math.inf: K.largest_magnitude}[norm]
    results = []
    for implementation in ("triton", "reference"):
        with K.use(implementation):
            results.append(sums(x, block, start))
    assert torch.equal(raw(results[0]), raw(results[1]))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    n=st.integers(0, 5000),
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    add=st.booleans(),
    bad=st.sampled_from([0.0, math.inf, math.nan]),
)
def test_written_gradients(n: int, dtype: torch.dtype, out_dtype: torch.dtype, add: bool, bad: float) -> None:
    x = normal(n, 4, dtype, DEVICE)
    if n:
        x[n // 2] = bad
    results = []
    for implementation in ("triton", "reference"):
        out = normal(n, 5, out_dtype, DEVICE)
        with K.use(implementation):
            K.write_gradient(x, out, add=add)
        results.append(out)
    assert torch.equal(raw(results[0]), raw(results[1]))


def test_gradients_in_whole_blocks() -> None:
    x = normal(70_000, 8, torch.bfloat16, DEVICE)
    got = K.sum_of_squares(x, start=65_536 - 100)
    with K.use("reference"):
        assert got.shape == (3,) and torch.equal(got, K.sum_of_squares(x, start=65_536 - 100))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: Triton's interpreter would take minutes")
@pytest.mark.parametrize("kind", STATES)
def test_a_large_shard_on_a_gpu_and_on_a_cpu(kind: str) -> None:
    n, start = 3_000_001, (1 << 33) + 256
    there = train(kind, "triton", n, steps=2, start=start, device=DEVICE)
    here = train(kind, "numba", n, steps=2, start=start)
    with K.use("numba"):
        wanted = raw(here.master())
    assert torch.equal(raw(there.master().cpu()), wanted)
