"""HybridAdam and CPUAdam on plain tensors: torch's own Adam and AdamW, and the bits of our float32 kernel."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.kernels import AdamSettings, WholeState, adam_step
from meshfold.zero_gemini.optimizers import CPUAdam, FlatAdam, HybridAdam

SHAPES = ((17, 30), (), (0, 3), (300,), (5, 4, 3, 2))
STEPS = 20


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made.append(torch.randn(40, 30, generator=generator).t())  # its rows are not one behind the other
    made.append(torch.randn(8, 12, generator=generator)[:, 2:7])  # nor are these, and there are gaps
    return [nn.Parameter(x.to(device, dtype)) for x in made]


def give_gradients(found: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for place, p in enumerate(found):
        gradient = torch.randn(p.shape, generator=generator)
        p.grad = None if (place + step) % 7 == 3 else gradient.to(p.device, p.dtype)


def train(optimizer: torch.optim.Optimizer, found: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(found, step)
        optimizer.step()


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x.detach(), y.detach()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("cls", [CPUAdam, HybridAdam])
@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_is_torchs_adam(cls: type[FlatAdam], adamw_mode: bool, decay: float) -> None:
    ours, theirs = parameters(), parameters()

    def groups(found: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": found[:3]}, {"params": found[3:], "lr": 3e-3, "betas": (0.8, 0.99)}]

    optimizer = cls(groups(ours), lr=1e-2, weight_decay=decay, adamw_mode=adamw_mode)
    plain = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    reference = plain(groups(theirs), lr=1e-2, weight_decay=decay)
    train(optimizer, ours, range(STEPS))
    train(reference, theirs, range(STEPS))
    for p, q in zip(ours, theirs, strict=True):
        # 1e-6 of a weight of ordinary size; those that pass through zero have lost their leading digits in both
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq", "step") if p.numel() else ():
            torch.testing.assert_close(optimizer.state[p][key], reference.state[q][key], rtol=2e-6, atol=1e-7)
    assert ours[-2].stride() == theirs[-2].stride() == (1, 30)


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_bfloat16_has_an_exact_float32_master(adamw_mode: bool) -> None:
    ours = parameters(torch.bfloat16)
    optimizer = CPUAdam(ours, lr=1e-2, weight_decay=0.1, adamw_mode=adamw_mode)
    settings = AdamSettings(lr=1e-2, weight_decay=0.1, adamw_mode=adamw_mode)
    wide = [WholeState.of(p.detach().float().reshape(-1).clone()) for p in ours]
    counts = [0] * len(ours)
    for step in range(STEPS):
        give_gradients(ours, step)
        optimizer.step()
        for place, (p, state) in enumerate(zip(ours, wide, strict=True)):
            if p.grad is not None and p.numel():
                counts[place] += 1
                adam_step(state, p.grad.reshape(-1).contiguous(), settings, step=counts[place])
    for p, state in zip(ours, wide, strict=True):
        assert torch.equal(optimizer.master(p).view(-1), state.parameter)
        torch.testing.assert_close(p.float().reshape(-1), state.parameter, rtol=2**-8, atol=0.0)
        assert not p.numel() or optimizer.state[p]["master_lo"].dtype == torch.int16
    assert any((optimizer.master(p) != p.float()).any() for p in ours)


def test_float16_keeps_a_whole_master() -> None:
    ours, wide = parameters(torch.float16), [nn.Parameter(p.float()) for p in parameters(torch.float16)]
    optimizer, reference = CPUAdam(ours, lr=1e-4), CPUAdam(wide, lr=1e-4)
    for step in range(STEPS):
        give_gradients(ours, step)
        for p, q in zip(ours, wide, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        reference.step()
    assert equal([optimizer.master(p) for p in ours], wide)
    assert equal(ours, [q.half() for q in wide])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_others_write_to_a_parameter_counts(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.linspace(1.0, 2.0, 8).to(dtype))
    optimizer = CPUAdam([p], lr=1e-4)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = optimizer.master(p)
    with torch.no_grad():
        p[:4] = 7.0
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    after = optimizer.master(p)
    assert torch.equal(after[4:], before[4:])
    torch.testing.assert_close(after[:4], torch.full((4,), 7.0), rtol=2**-8, atol=0.0)
    assert torch.equal(p[:4].detach(), torch.full((4,), 7.0, dtype=dtype))


@pytest.mark.parametrize("regime", ["B", "C"])
def test_low_precision_moments_stay_near(regime: str) -> None:
    ours, wide = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = HybridAdam(ours, lr=1e-2, regime=regime, seed=3)
    reference = HybridAdam(wide, lr=1e-2)
    again = parameters(torch.bfloat16)
    train(optimizer, ours, range(STEPS))
    train(reference, wide, range(STEPS))
    train(HybridAdam(again, lr=1e-2, regime=regime, seed=3), again, range(STEPS))
    assert equal(ours, again)
    for p, q in zip(ours, wide, strict=True):
        error = (optimizer.master(p) - reference.master(q)).norm()
        assert error <= 0.05 * (STEPS * 1e-2) * p.numel() ** 0.5
    assert optimizer.state[ours[0]]["exp_avg"].dtype == (torch.bfloat16 if regime == "B" else torch.uint8)
    assert not equal([optimizer.master(p) for p in ours], [reference.master(q) for q in wide])


def test_noise_is_of_the_seed_and_the_place() -> None:
    def run(seed: int, alone: bool) -> list[Tensor]:
        found = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = CPUAdam(found, lr=1e-2, regime="B", seed=seed)
        for step in range(3):
            for p in found:
                p.grad = torch.linspace(0.1, 1.0, 64).bfloat16() * (step + 1)
            if alone:
                found[0].grad = None
            optimizer.step()
        return [optimizer.state[p]["exp_avg"] for p in found if optimizer.state[p]]

    first, second = run(0, False)
    assert not torch.equal(first, second)  # equal parameters, rounded on their own
    assert torch.equal(run(0, True)[0], second)  # whatever others do
    assert not torch.equal(run(1, False)[0], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hybrid_is_cpu_adam_on_the_cpu(dtype: torch.dtype) -> None:
    a, b = parameters(dtype), parameters(dtype)
    train(HybridAdam(a, lr=1e-2, weight_decay=0.1), a, range(5))
    train(CPUAdam(b, lr=1e-2, weight_decay=0.1), b, range(5))
    assert equal(a, b)


def test_without_bias_correction() -> None:
    p, q = nn.Parameter(torch.ones(5)), torch.ones(5)
    m, v = torch.zeros(5), torch.zeros(5)
    optimizer = CPUAdam([p], lr=1e-2, bias_correction=False)
    for step in range(3):
        p.grad = torch.linspace(-1.0, 1.0, 5) + step
        m, v = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2
        q = q - 1e-2 * m / (v.sqrt() + 1e-8)
        optimizer.step()
    torch.testing.assert_close(p.detach(), q, rtol=1e-6, atol=1e-7)


# -- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "regime"),
    [
        (torch.float32, "A"),
        (torch.float16, "A"),
        (torch.bfloat16, "A"),
        (torch.bfloat16, "B"),
        (torch.bfloat16, "C"),
    ],
)
def test_resumes_to_the_bit(dtype: torch.dtype, regime: str) -> None:
    ours, other = parameters(dtype), parameters(dtype)
    optimizer = CPUAdam(ours, lr=1e-2, weight_decay=0.1, regime=regime)
    train(optimizer, ours, range(4))
    file = io.BytesIO()
    torch.save({"weights": [p.detach() for p in ours], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = HybridAdam(other, lr=0.5, regime=regime)
    resumed.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for p, value in zip(other, saved["weights"], strict=True):
            p.copy_(value)
    assert resumed.param_groups[0]["lr"] == 1e-2
    assert equal([optimizer.master(p) for p in ours], [resumed.master(p) for p in other])
    train(optimizer, ours, range(4, 8))
    train(resumed, other, range(4, 8))
    assert equal([optimizer.master(p) for p in ours], [resumed.master(p) for p in other])
    for p, q in zip(ours, other, strict=True):
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, resumed.state[q][key]), key


def test_hooks_see_the_state_as_of_any_optimizer() -> None:
    ours = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = CPUAdam(ours)
    ours[0].grad = torch.ones_like(ours[0])
    optimizer.step()
    saved, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["state"][0]["exp_avg"].dtype))
    optimizer.register_load_state_dict_post_hook(lambda made: seen.append(made.state[ours[0]]["exp_avg"].dtype))
    optimizer.load_state_dict(saved)
    assert seen == [torch.float32, torch.float32]


@pytest.mark.parametrize("regime", ["A", "B", "C"])
def test_takes_the_state_of_torchs_adamw(regime: str) -> None:
    theirs, ours = parameters(torch.bfloat16), parameters(torch.bfloat16)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.3, betas=(0.7, 0.9))
    train(reference, theirs, range(3))
    optimizer = CPUAdam(ours, lr=1.0, adamw_mode=False, regime=regime)
    optimizer.load_state_dict(reference.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (1e-2, 0.3, (0.7, 0.9))
    assert group["adamw_mode"] is True
    for p, q in zip(ours, theirs, strict=True):
        if reference.state[q] and regime != "C":
            assert torch.equal(optimizer.state[p]["exp_avg_sq"].float(), reference.state[q]["exp_avg_sq"].float())
    train(optimizer, ours, range(3, 5))


def test_other_state_is_refused_and_nothing_changes() -> None:
    ours = [nn.Parameter(torch.ones(300, dtype=torch.bfloat16))]
    optimizer = CPUAdam(ours, regime="C", lr=0.5)
    ours[0].grad = torch.ones_like(ours[0])
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    exact = CPUAdam([nn.Parameter(torch.ones(300, dtype=torch.bfloat16))])
    exact.param_groups[0]["params"][0].grad = torch.ones(300, dtype=torch.bfloat16)
    exact.step()
    with pytest.raises(ValueError, match=r"regime 'A'.*keeps regime 'C': make it with regime='A'"):
        optimizer.load_state_dict(exact.state_dict())
    shorter = copy.deepcopy(before)
    shorter["state"][0]["exp_avg"] = shorter["state"][0]["exp_avg"][:7]
    with pytest.raises(ValueError, match=r"shape \[7\] where \[300\]"):
        optimizer.load_state_dict(shorter)
    momentum = torch.optim.SGD(ours, lr=0.1, momentum=0.9)
    momentum.step()
    with pytest.raises(ValueError, match="lacks 'step'"):
        optimizer.load_state_dict(momentum.state_dict())
    largest = torch.optim.AdamW(ours, amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.load_state_dict(largest.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][0][key], value) for key, value in before["state"][0].items())


def test_true_values_can_be_given() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p = nn.Parameter(torch.zeros(6, 5, dtype=dtype).t())
        optimizer = CPUAdam([p])
        value = torch.randn(5, 6)
        optimizer.set_master(p, value)
        assert torch.equal(optimizer.master(p), value)
        assert torch.equal(p.detach(), value.to(dtype)) or dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"shape \[5\]"):
            optimizer.set_master(p, value[:, 0])
        with pytest.raises(ValueError, match="in no group"):
            optimizer.set_master(nn.Parameter(value), value)


def test_copies_and_pickles() -> None:
    model = nn.Linear(4, 3)
    optimizer = CPUAdam(model.parameters(), lr=1e-2)
    train(optimizer, list(model.parameters()), range(2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    train(optimizer, list(model.parameters()), range(2, 4))
    train(twin, list(twin_model.parameters()), range(2, 4))
    assert equal(list(model.parameters()), list(twin_model.parameters()))


# -- in other hands -----------------------------------------------------------------------------------------------


def test_schedulers_groups_and_closures() -> None:
    p, q = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))
    optimizer = HybridAdam([p], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.add_param_group({"params": [q], "weight_decay": 0.5, "adamw_mode": False, "regime": "A"})

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p**2).sum() + (q**2).sum()
        loss.backward()
        return float(loss.detach())

    losses = []
    for _ in range(4):
        losses.append(optimizer.step(closure))
        scheduler.step()
    assert losses == sorted(losses, reverse=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
    cycle = torch.optim.lr_scheduler.OneCycleLR(HybridAdam([p]), max_lr=0.1, total_steps=5)
    assert cycle.get_last_lr()[0] < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_scale(dtype: torch.dtype) -> None:
    """With torch's scaler, which hands us the scale, gradients in float16 need no pass of their own."""
    scaled, plain = ([nn.Parameter(torch.linspace(0.5, 1.0, 6).to(dtype))] for _ in range(2))
    optimizer, reference = HybridAdam(scaled, lr=1e-2), HybridAdam(plain, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(4):
        scaler.scale(torch.zeros(()))
        gradient = torch.linspace(-1.0, 1.0, 6).to(dtype) * (step + 1)
        scaled[0].grad, plain[0].grad = gradient * scaler.get_scale(), gradient.clone()
        if step == 2:
            scaled[0].grad[1] = float("inf")
            plain[0].grad = None
        if step == 1 and dtype == torch.float32:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        reference.step()
    assert scaler.get_scale() == 512.0
    assert torch.equal(scaled[0].detach(), plain[0].detach())
    assert optimizer.state[scaled[0]]["step"] == 3
    plain[0].grad, scaled[0].grad = gradient, gradient * 8
    optimizer.step(div_scale=8.0)
    reference.step()
    assert torch.equal(scaled[0].detach(), plain[0].detach())
    optimizer.step(div_scale=torch.tensor(8.0))
    with pytest.raises(ValueError, match="div_scale is -1"):
        optimizer.step(div_scale=-1)


def test_backward_notices_that_weights_changed() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = CPUAdam([p])
        loss = (p * p).sum()
        p.grad = torch.ones_like(p)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        (torch.float64, "AdamW computes in float64"),
        (torch.complex64, "view_as_real"),
        (torch.int64, "leave it out"),
    ],
)
def test_other_dtypes_are_refused(dtype: torch.dtype, hint: str) -> None:
    wrong = torch.zeros(2, 3, dtype=dtype, requires_grad=dtype.is_floating_point or dtype.is_complex)
    with pytest.raises((TypeError, ValueError), match=hint):
        HybridAdam([wrong])
    optimizer = HybridAdam([nn.Parameter(torch.zeros(1))])
    with pytest.raises((TypeError, ValueError), match=hint):
        optimizer.add_param_group({"params": [wrong]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"betas": (0.9, 1.0)}, "beta2 is 1.0"),
        ({"eps": -1e-8}, "eps is"),
        ({"weight_decay": -0.1}, "weight_decay is"),
        ({"regime": "D"}, "regime is 'D'"),
        ({"amsgrad": True}, "amsgrad=True: .*torch.optim.AdamW"),
        ({"maximize": True}, "maximize=True: .*negate the loss"),
        ({"nvme_offload_fraction": 0.5}, "offload_path"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CPUAdam([nn.Parameter(torch.zeros(1))], **settings)
    if "nvme_offload_fraction" not in settings:
        with pytest.raises(ValueError, match=match):
            CPUAdam([{"params": [nn.Parameter(torch.zeros(1))], **settings}])


def test_sparse_gradients_and_foreign_regimes_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradient.*sparse=False"):
        CPUAdam(table.parameters()).step()
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(TypeError, match=r"regime 'B' is for parameters in bfloat16.*float32"):
        CPUAdam([p], regime="B").step()


# -- on a GPU -----------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="steps on CUDA tensors: needs a GPU")


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "regime"),
    [
        (torch.float32, "A"),
        (torch.float16, "A"),
        (torch.bfloat16, "A"),
        (torch.bfloat16, "B"),
        (torch.bfloat16, "C"),
    ],
)
def test_the_gpu_has_the_bits_of_the_cpu(dtype: torch.dtype, regime: str) -> None:
    there, here = parameters(dtype, "cuda"), parameters(dtype)
    mixed = [
        p if i % 2 else q for i, (p, q) in enumerate(zip(parameters(dtype, "cuda"), parameters(dtype), strict=True))
    ]
    for found in (there, here, mixed):
        train(HybridAdam(found, lr=1e-2, weight_decay=0.1, regime=regime), found, range(6))
    for a, b, c in zip(there, here, mixed, strict=True):
        assert torch.equal(a.detach().cpu(), b.detach())
        assert torch.equal(c.detach().cpu(), b.detach())


@needs_cuda
def test_a_moved_parameter_takes_its_state_along() -> None:
    model, still = nn.Linear(7, 5).bfloat16(), nn.Linear(7, 5).bfloat16()
    still.load_state_dict(model.state_dict())
    optimizer, reference = HybridAdam(model.parameters(), lr=1e-2), HybridAdam(still.parameters(), lr=1e-2)
    for step in range(4):
        model.to("cuda" if step % 2 else "cpu")
        for found, made in ((model, optimizer), (still, reference)):
            train(made, list(found.parameters()), range(step, step + 1))
    assert equal([p.cpu() for p in model.parameters()], list(still.parameters()))


@needs_cuda
def test_cpu_adam_refuses_the_gpu() -> None:
    with pytest.raises(ValueError, match="is on cuda:0: use HybridAdam"):
        CPUAdam([nn.Parameter(torch.zeros(2, device="cuda"))])
