"""Adam against torch.optim, its twins against one another, and its regimes against the float32 parameter."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from adam_cases import STATES, assert_same, normal, state, tensors, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K

every_state = pytest.mark.parametrize("kind", STATES)


@pytest.mark.parametrize("implementation", ["reference", "numba"])
@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)], ids=str)
def test_twenty_steps_agree_with_torch(
    implementation: str, adamw_mode: bool, weight_decay: float, betas: tuple[float, float]
) -> None:
    n, kind = 10_007, torch.optim.AdamW if adamw_mode else torch.optim.Adam
    p = torch.nn.Parameter(normal(n, 0))
    optimizer = kind([p], lr=1e-2, betas=betas, eps=1e-8, weight_decay=weight_decay)
    chosen = K.AdamSettings(lr=1e-2, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, adamw_mode=adamw_mode)
    with K.use(implementation):
        made = K.SplitState.of(p.detach())
        for step in range(1, 21):
            p.grad = normal(n, step)
            optimizer.step()
            K.adam_step(made, p.grad, chosen, step=step)
    wanted = p.detach()
    assert float((made.master() - wanted).abs().max()) < 1e-6 * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(made.exp_avg, optimizer.state[p]["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.exp_avg_sq, optimizer.state[p]["exp_avg_sq"], rtol=1e-5, atol=0)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Numba compiles a kernel for each state and dtype: seconds each. These are the ones that other tests train with.
_COMPILED = {("whole", torch.float32), ("B", torch.bfloat16)}


def _usual(kind: str) -> torch.dtype:
    """Return the dtype of gradients for which another test has Numba compile this state's kernel, too."""
    return torch.bfloat16 if kind in ("A", "B", "C") else torch.float32


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if (kind, dtype) in _COMPILED else pytest.mark.slow)
        for kind in STATES
        for dtype in _DTYPES
    ],
)
@settings(max_examples=12, deadline=None)
@given(
    n=st.one_of(st.integers(0, 700), st.integers(65_000, 140_000)),
    start=st.one_of(st.integers(0, 600), st.integers(0, 1 << 33)),
    adamw_mode=st.booleans(),
    seed=st.integers(0, 99),
)
def test_numba_gives_the_bits_of_the_reference(
    kind: str, dtype: torch.dtype, n: int, start: int, adamw_mode: bool, seed: int
) -> None:
    start = start // 256 * 256 if kind == "C" else start
    got, wanted = (
        train(kind, name, n, steps=2, dtype=dtype, start=start, seed=seed, adamw_mode=adamw_mode)
        for name in ("numba", "reference")
    )
    assert_same(got, wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_split_master_steps_as_the_float32_parameter_does(dtype: torch.dtype) -> None:
    whole, split = (train(kind, "auto", 100_003, steps=8, dtype=dtype) for kind in ("whole", "A"))
    assert torch.equal(split.master(), whole.master())
    assert torch.equal(split.exp_avg, whole.exp_avg) and torch.equal(split.exp_avg_sq, whole.exp_avg_sq)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_the_copy_is_the_parameter_rounded_to_nearest(dtype: torch.dtype) -> None:
    made = train(f"whole+{str(dtype).removeprefix('torch.')}", "auto", 70_001, dtype=_usual("whole"))
    assert isinstance(made, K.WholeState) and made.copy is not None
    assert torch.equal(made.copy, made.parameter.to(dtype)) and made.weights is made.copy


@every_state
@pytest.mark.parametrize("implementation", ["reference", "numba"])
def test_shards_step_as_the_whole_does(kind: str, implementation: str) -> None:
    n, cuts, chosen = 140_000, (0, 768, 65_536, 66_048, 131_328, 140_000), K.AdamSettings(lr=1e-2)
    master, base = normal(n, 1), 256 * 1001
    with K.use(implementation):
        whole = state(kind, master)
        shards = [state(kind, master[a:z]) for a, z in pairwise(cuts)]
        for step in (1, 2):
            grad = normal(n, 5 + step, _usual(kind))
            K.adam_step(whole, grad, chosen, step=step, start=base, seed=3)
            for a, z, shard in zip(cuts[:-1], cuts[1:], shards, strict=True):
                K.adam_step(shard, grad[a:z], chosen, step=step, start=base + a, seed=3)
    parts = [tensors(shard) for shard in shards]
    joined = type(whole)(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    assert_same(joined, whole)


@every_state
@pytest.mark.parametrize("implementation", ["reference", "numba"])
def test_two_halves_are_one_step(kind: str, implementation: str) -> None:
    once, twice = (
        train(kind, implementation, 70_001, dtype=_usual(kind), start=512, halves=halves) for halves in (False, True)
    )
    assert_same(twice, once)


def test_each_half_writes_its_own() -> None:
    made = state("A", normal(1000, 0))
    before = {name: x.clone() for name, x in tensors(made).items()}
    grad, chosen = normal(1000, 1), K.AdamSettings()
    K.adam_update_parameters(made, grad, chosen, step=1)
    assert torch.equal(made.exp_avg, before["exp_avg"]) and not torch.equal(made.lo, before["lo"])
    middle = {name: x.clone() for name, x in tensors(made).items()}
    K.adam_update_moments(made, grad, chosen, step=1)
    assert torch.equal(made.hi, middle["hi"]) and torch.equal(made.lo, middle["lo"])
    assert not torch.equal(made.exp_avg_sq, middle["exp_avg_sq"])
    for half in (K.adam_update_parameters, K.adam_update_moments):
        with pytest.raises(ValueError, match=r"weight_decay is 0\.1 with adamw_mode=False"):
            half(made, grad, K.AdamSettings(weight_decay=0.1, adamw_mode=False), step=1)


@every_state
def test_the_scale_may_lie_in_a_tensor(kind: str) -> None:
    scale, dtype = torch.tensor([0.3]), _usual(kind)
    got = train(kind, "auto", 3000, dtype=dtype, grad_scale=scale)
    assert_same(got, train(kind, "auto", 3000, dtype=dtype, grad_scale=float(scale)))
    assert_same(got, train(kind, "reference", 3000, dtype=dtype, grad_scale=scale))


@pytest.mark.parametrize("kind", ["whole", "A", "B"])
@pytest.mark.parametrize("implementation", ["reference", "numba"])
def test_what_is_not_finite_stays_where_it_is(kind: str, implementation: str) -> None:
    with K.use(implementation):
        made, grad = state(kind, normal(300, 0)), normal(300, 1, _usual(kind))
        grad[7], grad[200] = math.nan, math.inf
        K.adam_step(made, grad, K.AdamSettings(), step=1)
        for x in (made.master(), made.exp_avg, made.exp_avg_sq, made.weights):
            assert torch.equal((~x.isfinite()).nonzero().flatten(), torch.tensor([7, 200]))


@pytest.mark.parametrize("implementation", ["reference", "numba"])
def test_what_is_not_finite_spoils_its_block_of_8_bit_moments(implementation: str) -> None:
    with K.use(implementation):
        made, grad = state("C", normal(700, 0)), normal(700, 1, _usual("C"))
        grad[300] = math.nan
        for step in (1, 2):
            K.adam_step(made, grad, K.AdamSettings(), step=step)
        assert made.exp_avg_scale.isnan().tolist() == [False, True, False]
        assert made.master().isnan().nonzero().flatten().tolist() == list(range(256, 512))


def test_parameters_may_require_gradients_and_a_saved_one_is_missed() -> None:
    p = torch.nn.Parameter(normal(50, 0))
    made = K.WholeState.of(p)
    assert made.parameter is p
    y = (p * p).sum()
    K.adam_step(made, normal(50, 1), K.AdamSettings(), step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_another_step_or_seed_is_other_noise() -> None:
    def after(step: int, seed: int) -> Tensor:
        made = state("B", normal(5000, 0))
        K.adam_step(made, normal(5000, 1), K.AdamSettings(), step=step, seed=seed)
        return made.exp_avg

    first = after(1, 0)
    assert torch.equal(after(1, 0), first)
    assert not torch.equal(after(2, 0), first) and not torch.equal(after(1, 1), first)


def test_wrong_arguments_are_refused() -> None:
    made, grad, chosen = state("A", torch.zeros(8)), torch.zeros(8), K.AdamSettings()
    with pytest.raises(ValueError, match="grad has 9 elements where 8 belong"):
        K.adam_step(made, torch.zeros(9), chosen, step=1)
    with pytest.raises(TypeError, match="grad is float64, it must be float32 or bfloat16 or float16"):
        K.adam_step(made, grad.double(), chosen, step=1)
    with pytest.raises(ValueError, match=r"grad has shape \[2, 4\]"):
        K.adam_step(made, grad.view(2, 4), chosen, step=1)
    with pytest.raises(ValueError, match="grad is on meta, the others on cpu"):
        K.adam_step(made, torch.zeros(8, device="meta"), chosen, step=1)
    with pytest.raises(ValueError, match="step is 0"):
        K.adam_step(made, grad, chosen, step=0)
    with pytest.raises(ValueError, match="start is -1"):
        K.adam_step(made, grad, chosen, step=1, start=-1)
    with pytest.raises(ValueError, match=r"grad_scale has shape \[2\]"):
        K.adam_step(made, grad, chosen, step=1, grad_scale=torch.ones(2))
    with pytest.raises(TypeError, match="grad_scale is float64"):
        K.adam_step(made, grad, chosen, step=1, grad_scale=torch.ones((), dtype=torch.float64))
    with pytest.raises(ValueError, match="start is 300, 44 elements past the start of a block of 256"):
        K.adam_step(state("C", torch.zeros(8)), grad, chosen, step=1, start=300)
    with pytest.raises(ValueError, match=r"beta2 is 1\.0; it must be at least 0 and below 1"):
        K.AdamSettings(beta2=1.0)
    with pytest.raises(ValueError, match="lr is -1"):
        K.AdamSettings(lr=-1)


def test_wrong_states_are_refused() -> None:
    x = torch.zeros(600)
    with pytest.raises(TypeError, match="copy is float32, it must be bfloat16 or float16"):
        K.WholeState(parameter=x, exp_avg=x, exp_avg_sq=x, copy=x)
    split = tensors(K.SplitState.of(x))
    with pytest.raises(TypeError, match="exp_avg_sq is bfloat16, it must be float32"):
        K.SplitState(**{**split, "exp_avg_sq": x.bfloat16()})
    with pytest.raises(TypeError, match="hi is float16, it must be bfloat16"):
        K.SplitState(**{**split, "hi": x.half()})
    with pytest.raises(ValueError, match="lo has 599 elements where 600 belong"):
        K.SplitState(**{**split, "lo": split["lo"][1:]})
    with pytest.raises(ValueError, match="exp_avg_scale has 2 elements where 3 belong"):
        K.QuantizedState(**{**tensors(K.QuantizedState.of(x)), "exp_avg_scale": torch.zeros(2)})


@pytest.mark.parametrize(
    ("kind", "size"), [("whole", 12.0), ("whole+float16", 14.0), ("A", 12.0), ("B", 8.0), ("C", 6.03125)]
)
def test_bytes_a_parameter(kind: str, size: float) -> None:
    made = state(kind, torch.zeros(1024))
    assert sum(x.numel() * x.element_size() for x in tensors(made).values()) / 1024 == size


def test_threads_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    from meshfold.kernels._numba import torch_threads

    before = numba.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with torch_threads():
        assert numba.get_num_threads() == 1
    assert numba.get_num_threads() == before


_INTO_ANOTHER = [
    pytest.param(kind, name, dtype, l2, marks=() if diagonal else pytest.mark.slow)
    for place, kind in enumerate(STATES)
    for at, dtype in enumerate(_DTYPES)
    for name in ("reference", "numba")
    for l2 in (False, True)
    # Numba compiles a kernel for each state and dtype, of which speculative steps in other tests take these two.
    for diagonal in [
        at == {"A": 1, "B": 0, "C": 1}.get(kind, place % 3)
        and l2 == (place == 0)
        and (name == "reference" or kind in "AB")
    ]
]


@pytest.mark.parametrize(("kind", "implementation", "dtype", "l2"), _INTO_ANOTHER)
def test_a_step_may_be_made_into_another_state(kind: str, implementation: str, dtype: torch.dtype, l2: bool) -> None:
    n, start = 70_001, 256 * 300
    chosen = K.AdamSettings(lr=1e-2, weight_decay=0.1, adamw_mode=not l2)
    with K.use(implementation):
        before = train(kind, implementation, n, dtype=_usual(kind), start=start)
        kept, wanted = copy.deepcopy(before), copy.deepcopy(before)
        into = state(kind, normal(n, 9))
        for made, was in ((wanted, None), (into, before)):
            K.adam_step(made, normal(n, 77, dtype), chosen, step=4, grad_scale=0.3, start=start, seed=7, before=was)
    assert_same(into, wanted)
    assert_same(before, kept, "what was stepped from")


def test_another_state_must_be_one_of_the_same_kind_elsewhere() -> None:
    made, grad, chosen = state("A", normal(300, 0)), normal(300, 1), K.AdamSettings(lr=1e-2)
    with pytest.raises(TypeError, match=r"before is a WholeState of parameter.*one of the same kind"):
        K.adam_step(made, grad, chosen, step=1, before=state("whole", normal(300, 0)))
    with pytest.raises(TypeError, match=r"before\.exp_avg is bfloat16"):
        K.adam_step(made, grad, chosen, step=1, before=state("B", normal(300, 0)))
    with pytest.raises(ValueError, match="299 elements where 300"):
        K.adam_step(made, grad, chosen, step=1, before=state("A", normal(299, 0)))
    with pytest.raises(ValueError, match=r"before\.hi is the tensor of state"):
        K.adam_step(made, grad, chosen, step=1, before=made)
