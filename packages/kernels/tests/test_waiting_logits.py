"""Logits that wait for their loss: each use has the value and gradients of logits that were computed at once, or is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshfold.kernels.fuse.heads import defer_logits

WORDS = 50
IDS = torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.embed(ids)))
        y: Tensor = self.head(x)
        if not torch.is_grad_enabled():
            self.rows = x
        return y


Loss = Callable[[Model], Tensor]


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, WORDS), IDS.flatten())


def gradients(loss: Loss, *, waits: bool, until_expired: bool = True) -> tuple[float, list[Tensor]]:
    model = Model()
    heads = defer_logits(model, always=waits)
    with heads.waiting(until_expired=until_expired):
        found = loss(model)
    found.backward()
    return float(found.detach()), [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def accuracy_first(model: Model) -> Tensor:
    logits = model(IDS)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == IDS).double().mean()
    return loss_of(logits) * (1 + accuracy)


def loss_first_without_gradient(model: Model) -> Tensor:
    logits = model(IDS)
    with torch.no_grad():
        weight = loss_of(logits)
    return loss_of(logits) * weight


def accuracy_in_inference_mode(model: Model) -> Tensor:
    logits = model(IDS)
    with torch.inference_mode():
        accuracy = float((logits.argmax(-1) == IDS).double().mean())
    return loss_of(logits) * (1 + accuracy)


def teacher(model: Model) -> Tensor:
    with torch.no_grad():
        target = model(IDS)
    logits = model(IDS)
    return loss_of(logits) - (target.softmax(-1) * logits.log_softmax(-1)).mean()


def teacher_in_inference_mode(model: Model) -> Tensor:
    with torch.inference_mode():
        target = model(IDS)
    return loss_of(model(IDS)) * float(target.std())


def loss_of_a_teacher(model: Model) -> Tensor:
    with torch.no_grad():
        target = model(IDS)
    return loss_of(model(IDS)) - 0.5 * loss_of(target)


def view_without_gradient(model: Model) -> Tensor:
    logits = model(IDS)
    with torch.no_grad():
        part = logits[:, 1:]
    return loss_of(logits) + part.square().mean() + F.cross_entropy(part.reshape(-1, WORDS), IDS[:, 1:].flatten())


def more_terms(model: Model) -> Tensor:
    logits = model(IDS)
    return loss_of(logits) + 0.1 * logits.square().mean()


def written_before_views(model: Model) -> Tensor:
    logits = model(IDS)
    logits[:, :, 3] = 0.0
    return loss_of(logits)


def written_slice(model: Model) -> Tensor:
    logits = model(IDS)[:, 1:]
    logits *= 2.0
    return F.cross_entropy(logits.reshape(-1, WORDS), IDS[:, 1:].flatten())


def halved_by_a_hook(model: Model) -> Tensor:
    model.head.register_forward_hook(lambda module, args, output: output * 0.5)
    return loss_of(model(IDS))


def changed_before_the_head(model: Model) -> Tensor:
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    return loss_of(model(IDS))


def seen_by_a_hook(model: Model) -> Tensor:
    seen: list[Tensor] = []
    model.head.register_forward_hook(lambda module, args, output: seen.append(output))
    loss = loss_of(model(IDS))
    return loss + seen[0].square().mean()


def halved_in_backward(model: Model) -> Tensor:
    model.head.register_full_backward_hook(lambda module, inner, outer: (outer[0] @ model.head.weight * 0.5,))
    return loss_of(model(IDS))


def hooked_once(model: Model) -> Tensor:
    handle = model.head.register_forward_hook(lambda module, args, output: output * 0.5)
    first = loss_of(model(IDS))
    handle.remove()
    return first + loss_of(model(IDS))


@pytest.mark.parametrize(
    "loss",
    [
        accuracy_first,
        loss_first_without_gradient,
        accuracy_in_inference_mode,
        teacher,
        teacher_in_inference_mode,
        loss_of_a_teacher,
        view_without_gradient,
        more_terms,
        written_before_views,
        written_slice,
        halved_by_a_hook,
        changed_before_the_head,
        seen_by_a_hook,
        halved_in_backward,
        hooked_once,
    ],
)
def test_loss_and_gradients_are_those_of_logits_computed_at_once(loss: Loss) -> None:
    (want, wanted), (got, found) = gradients(loss, waits=False), gradients(loss, waits=True)
    assert got == pytest.approx(want, rel=1e-12)
    for one, other in zip(wanted, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def checkpointed_loss(model: Model) -> Tensor:
    loss: Tensor = checkpoint(loss_of, model(IDS), use_reentrant=False)
    return loss


def checkpointed_parts(model: Model) -> Tensor:
    """The logits of some rows at a time, as people write it to save memory."""

    def part(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(x).view(-1, WORDS), labels.flatten(), reduction="sum")

    x = torch.tanh(model.body(model.embed(IDS)))
    parts = [checkpoint(part, one, labels, use_reentrant=False) for one, labels in zip(x, IDS, strict=True)]
    return torch.stack(parts).sum() / IDS.numel()


@pytest.mark.parametrize("until_expired", [False, True])
@pytest.mark.parametrize("loss", [checkpointed_loss, checkpointed_parts])
def test_a_backward_computes_again_what_was_checkpointed(loss: Loss, until_expired: bool) -> None:
    (want, wanted), (got, found) = (gradients(loss, waits=w, until_expired=until_expired) for w in (False, True))
    assert got == pytest.approx(want, rel=1e-12)
    for one, other in zip(wanted, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_outside_of_a_backward_they_cannot_be_read_once_they_waited() -> None:
    model = Model()
    heads = defer_logits(model, always=True)
    with heads.waiting():
        logits = model(IDS)
        loss_of(logits).backward()
    with pytest.raises(RuntimeError, match="logits of head are read after their loss was computed"):
        logits.sum()


class OwnLoss(torch.autograd.Function):
    """A loss with a backward of its own, as kernels of other packages have."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits.softmax(-1))
        return loss_of(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (shares,) = ctx.saved_tensors
        return grad * (shares - F.one_hot(IDS, WORDS)) / IDS.numel()


def loss_with_its_own_backward(model: Model) -> Tensor:
    loss: Tensor = OwnLoss.apply(model(IDS).float().double())
    return loss


def reentrant_checkpoint(model: Model) -> Tensor:
    loss: Tensor = checkpoint(loss_of, model(IDS), use_reentrant=True)
    return loss


@pytest.mark.parametrize("loss", [loss_with_its_own_backward, reentrant_checkpoint])
def test_a_gradient_that_would_reach_no_parameter_is_an_error(loss: Loss) -> None:
    """A stand-in is no function of anything for code below torch's functions."""
    with pytest.raises(RuntimeError, match=r"was given the logits of head, .* Give it logits.clone\(\)"):
        gradients(loss, waits=True)


def test_a_clone_of_logits_has_a_gradient_for_a_loss_with_its_own_backward() -> None:
    wanted, found = (
        gradients(lambda model: OwnLoss.apply(model(IDS).clone()), waits=waits)[1]  # type: ignore[no-any-return]
        for waits in (False, True)
    )
    assert any(float(one.abs().max()) > 0 for one in wanted)
    for one, other in zip(wanted, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def hooked_first(model: Model) -> Tensor:
    logits = model(IDS)
    logits.register_hook(lambda gradient: gradient * 2.0)
    return loss_of(logits)


def hooked_behind_a_view(model: Model) -> Tensor:
    logits = model(IDS)
    rows = logits.view(-1, WORDS)
    logits.register_hook(lambda gradient: gradient * 2.0)
    return F.cross_entropy(rows, IDS.flatten())


def kept_behind_a_loss(model: Model) -> Tensor:
    logits = model(IDS)
    loss = loss_of(logits)
    logits.retain_grad()
    return loss


def test_a_hook_of_a_gradient_is_called_or_is_an_error() -> None:
    wanted, found = (gradients(hooked_first, waits=waits)[1] for waits in (False, True))
    assert all(torch.allclose(one, other) for one, other in zip(wanted, found, strict=True))
    for loss in (hooked_behind_a_view, kept_behind_a_loss):
        with pytest.raises(RuntimeError, match="of the logits of head after a view or a loss of them was taken"):
            gradients(loss, waits=True)


def written_view(model: Model) -> Tensor:
    logits = model(IDS)
    logits.view(-1, WORDS)[0] = 0.0
    return loss_of(logits)


def written_under_a_view(model: Model) -> Tensor:
    logits = model(IDS)
    rows = logits.view(-1, WORDS)
    logits /= 2.0
    return F.cross_entropy(rows, IDS.flatten())


def written_through_a_column(model: Model) -> Tensor:
    logits = model(IDS)
    later = logits[:, 1:]
    logits[:, :, 3].zero_()
    return later.square().mean()


@pytest.mark.parametrize("loss", [written_view, written_under_a_view, written_through_a_column])
def test_a_write_that_a_view_would_not_see_is_an_error(loss: Loss) -> None:
    with pytest.raises(RuntimeError, match="logits of head were changed in place, and are read through a view"):
        gradients(loss, waits=True)


def test_a_write_to_the_input_of_the_head_is_an_error() -> None:
    model = Model()
    with torch.no_grad(), defer_logits(model, always=True).waiting(until_expired=True):
        for read in (loss_of, torch.sum):
            logits = model(IDS)
            model.rows.zero_()
            with pytest.raises(RuntimeError, match="the input of head was changed in place after the call"):
                read(logits)
