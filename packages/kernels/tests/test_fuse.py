"""Fused kernels put into models: which modules each rule finds and leaves alone, and that results stay the same."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from meshfold.kernels.fuse import LazyLogits, fuse
from meshfold.kernels.fuse import heads as heads_module
from meshfold.kernels.fuse import norms as norms_module
from meshfold.kernels.fuse.sums import Branch, Sum

ALWAYS: dict[str, Any] = dict(norm=True, gated=True, activation=True, rotary=True, residual=True, loss=True)
WORDS, WIDTH = 50, 16


class ScaledNorm(nn.Module):
    """RMSNorm as Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class OffsetNorm(ScaledNorm):
    """RMSNorm as Gemma has it."""

    def forward(self, x: Tensor) -> Tensor:
        return (1.0 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class CentredNorm(ScaledNorm):
    """LayerNorm without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.weight, None, self.variance_epsilon)


class UnlikeNorm(ScaledNorm):
    """RMSNorm that adds eps to the root: off by little, and only where rows are small."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class NamedNorm(nn.Module):
    """LayerNorm as Annotated Transformers have it, its parameters under other names."""

    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        self.beta, self.gamma = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.tiny, self.biased = 1e-5, biased

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(-1, keepdim=True, unbiased=not self.biased)
        return self.gamma * (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + self.tiny) + self.beta


class Stream(nn.Module):
    """A block: attention and an MLP, each behind a norm and added to the stream."""

    def __init__(self, norm: Callable[[], nn.Module] = ScaledNorm) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.mixer, self.mlp = nn.Linear(WIDTH, WIDTH), ModuleGate(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class TupleStream(Stream):
    """Attention that returns a tuple, the sum the other way round, in a method."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.LayerNorm(WIDTH))
        self.mixer = Pair()

    def mix(self, x: Tensor) -> Tensor:
        y, _ = self.mixer(self.norm1(x))
        return y + x  # type: ignore[no-any-return]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.mix(x)
        return self.mlp(self.norm2(x)) + x  # type: ignore[no-any-return]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), None


class BehindStream(nn.Module):
    """The norm behind the sum, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), NamedNorm(biased=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dense(x) + x)  # type: ignore[no-any-return]


class ScaledStream(Stream):
    """Something between sum and norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(2 * x))  # type: ignore[no-any-return]


class CheckpointedStream(Stream):
    """A sum that may leave a checkpoint of the block's own."""

    reentrant: bool | None = None

    def mix(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm1(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x) if self.reentrant is None else checkpoint(self.mix, x, use_reentrant=self.reentrant)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Gate(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        if activation is not None:
            self.activation = activation


class ModuleGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class TurnedGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.activation(self.gate(x)))  # type: ignore[no-any-return]


class FunctionGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class ImportedGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class NamespaceGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * torch.nn.functional.silu(self.gate(x)))  # type: ignore[no-any-return]


class GeluGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class TanhGeluGate(Gate):
    """A call with more arguments is left as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))  # type: ignore[no-any-return]


class NnGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class TwiceUsed(Gate):
    """The activation is read once more, so nothing would be saved."""

    def forward(self, x: Tensor) -> Tensor:
        gated = F.silu(self.gate(x))
        return self.down(gated * self.up(x) + gated)  # type: ignore[no-any-return]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def interleaved_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def turn(x: Tensor) -> Tensor:
        return x * cos.unsqueeze(1) + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin.unsqueeze(1)

    return turn(q), turn(k)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = (torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.3, 0.7])).repeat(1, 2)[None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = apply_rotary_pos_emb(q, k, *self.tables(x))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class InterleavedAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = interleaved_rotary(q, k, *self.tables(x))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = [x, *model.parameters()]
    for each in leaves:
        each.grad = None
    y = model(x)
    y.square().sum().backward()  # not torch.autograd.grad, which reentrant checkpoints do not know
    return [y, *(each.grad for each in leaves if each.grad is not None)]


STREAMS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "block": (Stream, ("1.norm2",)),
    "block with LayerNorm": (lambda: Stream(lambda: nn.LayerNorm(WIDTH, bias=False)), ("1.norm2",)),
    "tuple, other way round, a method": (TupleStream, ("1.norm2",)),
    "norm behind the sum": (BehindStream, ("1.norm",)),
    "scaled between": (ScaledStream, ()),
    "in a method": (CheckpointedStream, ("1.norm2",)),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_sum_is_made_by_the_norm_behind_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, names = STREAMS[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), make())
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    want, state = gradients(model, x), list(model.state_dict())
    seen: list[type] = []
    for child in model[1].children():  # hooks are called with tensors
        child.register_forward_hook(lambda module, args, output: seen.extend((type(args[0]), type(output))))
    for each in names:
        model.get_submodule(each)._forward_hooks.clear()
    found = fuse(model, norm=False, gated=False, loss=False, residual=True)
    assert found.modules == ({"residual": names} if names else {})
    sums: list[Tensor] = []
    for kernel in ("add_rms_norm", "add_layer_norm"):
        own = getattr(norms_module, kernel)
        monkeypatch.setattr(
            norms_module, kernel, lambda x, *rest, own=own, **given: sums.append(x) or own(x, *rest, **given)
        )
    for got, expected in zip(gradients(model, x), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert len(sums) == len(names) and list(model.state_dict()) == state
    assert set(seen) <= {Tensor, tuple}
    fuse(model, **ALWAYS)  # other rules beside it
    for got, expected in zip(gradients(model, x), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


class GatedNorm(ScaledNorm):
    """Mamba 2's: a norm that may also be given a gate."""

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden if gate is None else hidden * torch.sigmoid(gate))


class ScaledSwish(nn.Module):
    """An activation of several operations that may also be given a scale."""

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return hidden * torch.sigmoid(hidden) * scale


@pytest.mark.parametrize("more", [dict(gate=torch.ones(WIDTH)), {}])
def test_a_norm_that_is_given_more_than_its_input_runs_its_own_code(more: dict[str, Tensor]) -> None:
    """A gate by its place or its name, or the input by its name."""
    model = nn.Sequential(GatedNorm())
    x = torch.randn(2, 3, WIDTH)
    want = model[0](x, **more)
    assert fuse(model, **ALWAYS).modules["norm"] == ("0",)
    for got in (model[0](x, *more.values()), model[0](x, **more), model[0](hidden=x, **more)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_an_activation_that_is_given_more_than_its_input_runs_its_own_code() -> None:
    model = nn.Sequential(ScaledSwish())
    x = torch.randn(2, 3, WIDTH)
    want = model[0](x, 2.0)
    fuse(model, **ALWAYS)
    assert "forward" in model[0].__dict__
    for got in (model[0](x, 2.0), model[0](hidden=x, scale=2.0), 2 * model[0](x)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class CountingStream(Stream):
    """Changes its buffers in every mode: one in place, one by another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("decay", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.decay = self.decay * 0.5
        return super().forward(x * self.decay)


def test_a_trial_changes_no_buffer() -> None:
    model = nn.Sequential(nn.Identity(), CountingStream())
    buffers = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    fuse(model, **ALWAYS)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name] and torch.equal(buffer, values[name]), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_sum_waits_beyond_a_checkpoint(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), CheckpointedStream())
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    want = gradients(model, x)
    assert fuse(model, **ALWAYS).modules["residual"] == ("1.norm2",)
    model[1].reentrant = reentrant  # type: ignore[assignment]
    for got, expected in zip(gradients(model, x), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_block_keeps_its_signature_and_copies_use_their_own_weights() -> None:
    model = TupleStream()
    signature = inspect.signature(model.forward)
    assert fuse(model, **ALWAYS).modules["residual"] == ("norm2",)
    assert inspect.signature(model.forward) == signature and "mask" in signature.parameters
    x, other = torch.randn(2, 3, WIDTH), copy.deepcopy(model)
    with torch.no_grad():
        other.norm2.weight.mul_(2)  # type: ignore[union-attr, operator]
        other.mixer.layer.bias.add_(1)  # type: ignore[union-attr, operator]
    got = other(x)
    assert not torch.allclose(got, model(x))
    own = TupleStream()
    own.load_state_dict(other.state_dict())
    assert torch.allclose(got, own(x), atol=1e-5)


def test_a_norm_with_hooks_is_called_and_a_sum_that_changed_is_not_made() -> None:
    model = nn.Sequential(nn.Identity(), Stream())
    found = fuse(model, norm=False, gated=False, loss=False, residual=True)
    called: list[str] = []
    model[1].norm2.register_forward_hook(lambda module, args, output: called.append("norm2"))
    model(torch.randn(2, WIDTH))
    assert found.modules and called == ["norm2"]
    residual, branch = torch.zeros(3), torch.ones(3)
    waiting = residual + Branch(branch, "mlp")
    assert isinstance(waiting, Sum) and torch.equal(waiting - 1, torch.zeros(3)) and not waiting.waits()
    waiting = Branch(branch, "mlp") + residual
    residual.add_(1)
    with pytest.raises(RuntimeError, match=r"what mlp returned, .* changed in place .* kernels=dict\(residual=False\)"):
        waiting.sum()


class NewGELU(nn.Module):
    """As nanoGPT and Hugging Face's GPT-2 write it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class PlainGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class QuickGELU(nn.Module):
    """CLIP's: another function."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


FOUND: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "norm": (ScaledNorm, "norm"),
    "norm of one plus the weight": (OffsetNorm, "norm"),
    "torch's RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-6), "norm"),
    "LayerNorm without a bias": (CentredNorm, "norm"),
    "torch's LayerNorm": (lambda: nn.LayerNorm(WIDTH), "norm"),
    "torch's LayerNorm without a bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "norm"),
    "LayerNorm with other names": (lambda: NamedNorm(biased=True), "norm"),
    "a norm by the unbiased variance": (NamedNorm, None),
    "LayerNorm over two dims": (lambda: nn.LayerNorm((5, WIDTH)), None),
    "a norm with another eps": (UnlikeNorm, None),
    "gate with nn.SiLU": (lambda: ModuleGate(nn.SiLU()), "gated"),
    "gate, the other way round": (lambda: TurnedGate(nn.SiLU()), "gated"),
    "gate with F.silu": (FunctionGate, "gated"),
    "gate with torch.nn.functional": (NamespaceGate, "gated"),
    "gate with nn.functional": (NnGate, "gated"),
    "gate with an imported silu": (ImportedGate, "gated"),
    "gate with GELU": (lambda: ModuleGate(nn.GELU()), "gated"),
    "gate with GELU by tanh": (lambda: TurnedGate(nn.GELU(approximate="tanh")), "gated"),
    "gate with F.gelu": (GeluGate, "gated"),
    "gate with F.gelu by tanh": (TanhGeluGate, None),
    "gate with ELU": (lambda: ModuleGate(nn.ELU()), None),
    "activation used twice": (TwiceUsed, None),
    "mere SiLU between layers": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()), None),
    "GELU of nanoGPT's own": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), NewGELU()), "activation"),
    "SiLU of one's own": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Swish()), "activation"),
    "a GELU that is one operation": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), PlainGELU()), None),
    "another function": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), QuickGELU()), None),
    "rotary": (Attention, "rotary"),
    "rotary of neighbours": (InterleavedAttention, None),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_rule_finds_its_modules_and_changes_no_result(case: str) -> None:
    make, rule = FOUND[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), make())
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    want = gradients(model, x)
    names, state = [n for n, _ in model.named_modules()], list(model.state_dict())
    found = fuse(model, **ALWAYS)
    assert list(found.modules) == ([] if rule is None else [rule])
    for got, expected in zip(gradients(model, x), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert ([n for n, _ in model.named_modules()], list(model.state_dict())) == (names, state)
    found.close()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), want, strict=True))
    assert not any("forward" in module.__dict__ for module in model.modules())


class ImageNorm(nn.LayerNorm):
    """LayerNorm over the channels of tokens, or of images: ConvNeXt's."""

    def __init__(self, data_format: str) -> None:
        super().__init__(WIDTH)
        self.data_format = data_format

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if self.data_format == "first" else super().forward(x)


class OneGELU(nn.Module):
    """GELU by one of two formulas."""

    def __init__(self, quick: bool) -> None:
        super().__init__()
        self.quick = quick

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x) if self.quick else NewGELU.forward(self, x)  # type: ignore[arg-type]


@pytest.mark.parametrize(("one", "other"), [(ImageNorm("last"), ImageNorm("first")), (OneGELU(False), OneGELU(True))])
def test_modules_of_one_class_with_other_settings_are_tried_apart(one: nn.Module, other: nn.Module) -> None:
    x = torch.randn(2, WIDTH, 3, WIDTH)
    want = [one(x), other(x)]
    found = fuse(nn.Sequential(one, other), **ALWAYS)
    assert [len(names) for names in found.modules.values()] == [1]
    assert all(
        torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
        for got, expected in zip((one(x), other(x)), want, strict=True)
    )


@pytest.mark.parametrize("rule", ["norm", "gated", "activation", "rotary"])
def test_the_kernel_is_what_runs(rule: str) -> None:
    """A result that is the same to rounding does not show which code made it: its autograd node does."""
    model, node = {
        "norm": (ScaledNorm(), "_NormBackward"),
        "gated": (nn.Sequential(ModuleGate(nn.SiLU())), "_SeparateBackward"),
        "activation": (nn.Sequential(NewGELU()), "GeluBackward0"),
        "rotary": (nn.Sequential(Attention()), "_RotaryBackward"),
    }[rule]
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    for asked, runs in ((None, False), (True, True)):  # None: on a GPU alone
        found = fuse(model, **{rule: asked})
        nodes, stack = set(), [model(x).grad_fn]
        while stack:
            each = stack.pop()
            if each is not None and each not in nodes:
                nodes.add(each)
                stack += [before for before, _ in each.next_functions]
        assert any(each.name() == node for each in nodes) is runs
        found.close()


def test_weights_in_another_dtype_keep_the_modules_own_result() -> None:
    model, x = ScaledNorm(), torch.randn(3, WIDTH, dtype=torch.bfloat16)
    want = model(x)
    fuse(model, norm=True)
    assert model(x).dtype is want.dtype is torch.float32 and torch.equal(model(x), want)


def test_compiled_modules_are_left_alone() -> None:
    model = nn.Sequential(ModuleGate(nn.SiLU()), ScaledNorm())
    model[0].compile(backend="eager")
    assert list(fuse(model, **ALWAYS).modules) == ["norm"]
    assert not fuse(torch.compile(nn.Sequential(ScaledNorm()), backend="eager"), **ALWAYS).modules  # type: ignore[arg-type]


class LanguageModel(nn.Module):
    """Embedding, a layer, a head; ``finish`` makes of logits and labels what the model returns."""

    def __init__(self, finish: Callable[[Tensor, Tensor], Any], *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.finish = finish

    def forward(self, ids: Tensor) -> Any:
        return self.finish(self.head(self.layer(self.embed(ids))), ids)


def shifted(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].flatten())


def by_class(logits: Tensor, ids: Tensor, **options: Any) -> Tensor:
    weights = torch.arange(1.0, WORDS + 1).to(logits.dtype)
    return F.cross_entropy(logits.view(-1, WORDS), ids.view(-1), weight=weights, **options)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nanoGPT": lambda z, ids: F.cross_entropy(z.view(-1, z.size(-1)), ids.view(-1), ignore_index=-1),
    "shifted slices": lambda z, ids: F.cross_entropy(
        z[..., :-1, :].contiguous().double().view(-1, WORDS), ids[..., 1:].reshape(-1)
    ),
    "criterion": lambda z, ids: nn.CrossEntropyLoss(label_smoothing=0.1)(z.flatten(0, 1), ids.flatten()),
    "sum": lambda z, ids: F.cross_entropy(z.reshape(-1, WORDS), ids.reshape(-1), reduction="sum"),
    "rows": lambda z, ids: F.cross_entropy(z.view(-1, WORDS), ids.view(-1), reduction="none").square().mean(),
    "soft cap": lambda z, ids: shifted(torch.tanh(z / 2.0) * 2.0, ids),
    "scale": lambda z, ids: shifted(z * 0.3, ids),
    "double": lambda z, ids: shifted(z.to(torch.float64), ids),
    "weights of classes": lambda z, ids: by_class(z, ids, ignore_index=int(ids[0, 0])),
    "weights of classes, sum": lambda z, ids: by_class(z, ids, reduction="sum"),
    "weights of classes, rows": lambda z, ids: by_class(z, ids, reduction="none").square().mean(),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights of smoothed classes": lambda z, ids: by_class(z, ids, label_smoothing=0.1),
    "words left out": lambda z, ids: F.cross_entropy(z[..., :40].reshape(-1, 40), ids.view(-1) % 40),
    "words in the middle": lambda z, ids: F.cross_entropy(z.transpose(1, 2), ids),
    "probabilities": lambda z, ids: F.cross_entropy(z.view(-1, WORDS), F.one_hot(ids.view(-1), WORDS).to(z.dtype)),
    "two steps": lambda z, ids: F.nll_loss(F.log_softmax(z, -1).view(-1, WORDS), ids.view(-1)),
    "in place": lambda z, ids: shifted(z.add_(1.0), ids),
    "mean of logits": lambda z, ids: z.float().mean() + shifted(z, ids),
    "norm": lambda z, ids: torch.linalg.vector_norm(z) + z.max(),
    "picked": lambda z, ids: z.logsumexp(-1).mean() - z[0, 0, 3],
}


@pytest.mark.few(20)
@pytest.mark.parametrize("layer", [{}, dict(bias=True), dict(tied=True)], ids=["plain", "bias", "tied"])
@pytest.mark.parametrize("case", [*LOSSES, *OTHERS])
def test_logits_that_wait_give_the_same_loss_and_gradients(case: str, layer: dict[str, bool]) -> None:
    finish = {**LOSSES, **OTHERS}[case]
    torch.manual_seed(1)
    model = LanguageModel(finish, **layer).double()
    ids = torch.randint(0, WORDS, (2, 6))
    parameters = [*model.parameters()]
    want = [loss := model(ids).double(), *torch.autograd.grad(loss, parameters)]
    found = fuse(model, loss=True)
    assert found.modules == {"loss": ("head",)} and found.logits is not None
    calls: list[Tensor] = []

    def note(module: nn.Module, args: object, output: Tensor) -> None:
        calls.append(output)

    note.__module__ = "meshfold.hooks"  # a user's hook gets logits
    model.head.register_forward_hook(note)
    with found.logits.waiting():
        got = [loss := model(ids).double(), *torch.autograd.grad(loss, parameters)]
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    # The hook ran round what was computed with the head: one loss, or whole logits, never both at first.
    whole = [output for output in calls if output.shape[-1:] == (WORDS,)]
    assert (not whole and len(calls) == 1) if case in LOSSES else whole


def test_logits_wait_only_where_that_is_asked_and_worth_while() -> None:
    model = LanguageModel(lambda z, ids: z)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    found = fuse(model, loss=True)
    assert found.logits is not None and type(model(ids)) is Tensor
    with found.logits.waiting():
        assert type(model(ids)) is LazyLogits
    assert type(model(ids)) is Tensor
    found.close()
    assert type(model.head) is nn.Linear
    found = fuse(model)  # few logits: at once
    assert found.logits is not None
    with found.logits.waiting():
        assert type(model(ids)) is Tensor
        many = torch.zeros(heads_module.WORTHWHILE // WORDS + 1, 1, WIDTH, device="meta")
        model.to("meta")
        assert type(model.head(many)) is LazyLogits


def test_a_stand_in_knows_its_facts_and_becomes_a_tensor_when_it_is_read() -> None:
    model = LanguageModel(lambda z, ids: z)
    ids = torch.randint(0, WORDS, (2, 3))
    want = model(ids)
    found = fuse(model, loss=True)
    assert found.logits is not None
    with found.logits.waiting():
        z = model(ids)
        assert (z.shape, z.dtype, z.device, z.ndim, z.requires_grad) == (
            (2, 3, WORDS),
            torch.float32,
            want.device,
            3,
            True,
        )
        assert z.size(-1) == WORDS and len(z) == 2 and z.numel() == want.numel() and isinstance(z, Tensor)
        assert repr(z) == "LazyLogits(size=(2, 3, 50), dtype=torch.float32)"
        assert torch.equal(z.argmax(-1), want.argmax(-1)) and z.tolist() == want.tolist()
        assert torch.equal(copy.deepcopy(model(ids).detach()), want)
        assert torch.equal(torch.stack([model(ids), model(ids)])[1], want) and "grad_fn" in repr(z)


def test_logits_that_nobody_read_cannot_be_read_later() -> None:
    """The weights may have changed: what would come out is not what the model made."""
    model = LanguageModel(lambda z, ids: z)
    ids = torch.randint(0, WORDS, (2, 3))
    found = fuse(model, loss=True)
    assert found.logits is not None
    with found.logits.waiting():
        unread, read = model(ids), model(ids)
        want = read.sum()
        with found.logits.waiting():  # as another call inside
            pass
        unread.float()
    assert torch.equal(read.sum(), want) and unread.shape == (2, 3, WORDS)
    for use in (lambda: unread.sum(), lambda: F.cross_entropy(unread.view(-1, WORDS), ids.view(-1))):
        with pytest.raises(RuntimeError, match=r"logits of head are read after .* kernels=dict\(loss=False\)"):
            use()


def test_a_module_that_is_no_head_is_none() -> None:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS + 1))
    assert not fuse(model, **ALWAYS).modules
    assert str(fuse(model)) == "fused: nothing"


def test_what_is_fused_can_be_printed() -> None:
    model = nn.ModuleDict(dict(a=ScaledNorm(), b=ScaledNorm(), model=LanguageModel(shifted)))
    assert str(fuse(model)).splitlines() == [
        "fused: RMSNorm or LayerNorm in one launch: a and 1 more",
        "fused: linear + cross entropy, without whole logits: model.head",
    ]
