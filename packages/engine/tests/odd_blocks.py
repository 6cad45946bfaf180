"""Models whose blocks are not a plain chain of equal modules, and their training in one process to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine

VOCABULARY, WIDTH, ROWS, LENGTH = 13, 8, 8, 6
RATE = 0.5
Make = Callable[[], nn.Module]


class Block(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), act or nn.Tanh()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, the blocks in a chain, a head."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), blocks
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.chain(self.embed(ids)))
        return out

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = block(x)
        return x


# -- modules that stand several times -----------------------------------------------------------------------------------


def order(*places: int, block: Callable[[], nn.Module] = Block) -> Model:
    """Blocks by number in their list; a number that is there twice is one module."""
    made = [block() for _ in range(max(places) + 1)]
    return Model(nn.ModuleList(made[place] for place in places))


def sequential(act: nn.Module) -> Model:
    """One activation between all layers."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return Model(nn.Sequential(*[module for layer in layers for module in (layer, act)]))


def alone() -> Model:
    """Of three stages the one in the middle has an activation alone."""
    return Model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()))


class Attending(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return super().forward(x + self.out(y.transpose(1, 2).flatten(2)))


class ActOutside(Model):
    """The activation between the layers is also called before and behind them."""

    def __init__(self) -> None:
        act = nn.Tanh()
        super().__init__(sequential(act).blocks)
        self.act = act

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.blocks(self.act(self.embed(ids)))))
        return out


def one_inside() -> Model:
    """Different blocks with one inner layer."""
    model = order(0, 1, 2, 3)
    for block in model.blocks:  # type: ignore[attr-defined]
        block.down = model.blocks[0].down  # type: ignore[index]
    return model


class OneNorm(Model):
    """One norm in all blocks, before and behind them; and twice in the model under two names."""

    def __init__(self) -> None:
        super().__init__(order(0, 1, 2, 3).blocks)
        self.first = self.last = nn.LayerNorm(WIDTH)
        for block in self.blocks:  # type: ignore[attr-defined]
            block.norm = self.first

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.last(self.chain(self.first(self.embed(ids)))))
        return out


class Between(Model):
    """A layer of the model itself is called between the blocks."""

    def __init__(self) -> None:
        super().__init__(order(0, 1, 2, 3).blocks)
        self.norm = nn.LayerNorm(WIDTH)

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = self.norm(block(x))
        return x


class Aliased(Model):
    """A second name for the list of blocks and for one of them."""

    def __init__(self) -> None:
        super().__init__(order(0, 1, 2, 3).blocks)
        self.layers, self.last = self.blocks, self.blocks[3]  # type: ignore[index]


class OutsideToo(Model):
    """The first block is called once more behind the list."""

    def __init__(self) -> None:
        super().__init__(order(0, 1, 2, 3).blocks)
        self.closing = self.blocks[0]  # type: ignore[index]

    def chain(self, x: Tensor) -> Tensor:
        out: Tensor = self.closing(super().chain(x))
        return out


# -- in place -----------------------------------------------------------------------------------------------------------


class InPlace(Block):
    def __init__(self, kind: str) -> None:
        super().__init__(nn.ReLU(inplace=True) if kind == "relu" else None)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "output":
            y: Tensor = self.down(self.act(self.up(self.norm(x))))
            y += x
            return y
        if self.kind == "middle":
            y = self.up(self.norm(x))
            y.mul_(0.5)
            return x + self.down(y)
        if self.kind == "input":
            x += self.norm.bias
        if self.kind == "first":
            x.mul_(0.5)
        return super().forward(x)


class InPlaceOutside(Model):
    """What blocks are given is changed in place by the model."""

    def __init__(self) -> None:
        super().__init__(order(0, 1, 2, 3).blocks)
        self.act = nn.ReLU(inplace=True)

    def chain(self, x: Tensor) -> Tensor:
        x *= 2.0
        for block in self.blocks:  # type: ignore[attr-defined]
            x = self.act(block(x))
        return x


# -- how blocks are called ------------------------------------------------------------------------------------------------


class Computed(Model):
    """Calls its blocks with weights that it computes."""

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.func.functional_call(block, {name: p * 0.5 for name, p in block.named_parameters()}, (x,))
        return x


class ComputedInside(Block):
    """Calls a layer with weights that it computes."""

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * 0.5 for name, p in self.up.named_parameters()}
        return x + self.down(self.act(torch.func.functional_call(self.up, weights, (self.norm(x),))))


class Phases(Model):
    """A parameter in no module, which is seen as complex numbers."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__(blocks)
        self.phases = nn.Parameter(torch.randn(WIDTH // 2, 2))

    def chain(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.view_as_complex(self.phases)
        return super().chain(torch.view_as_real(turned).flatten(-2))


class Widening(Block):
    """May return a wider tensor than it gets."""

    def __init__(self, widens: bool) -> None:
        super().__init__()
        self.widens = widens

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y, x], -1) if self.widens else y


def widening(before: int) -> Model:
    """Its last block returns what no other block gets."""
    model = Model(nn.ModuleList([*(Widening(False) for _ in range(before)), Widening(True)]))
    model.head = nn.Linear(2 * WIDTH, VOCABULARY)
    return model


class Keyword(Block):
    def forward(self, *, hidden: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) * scale


class Keywords(Model):
    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = block(scale=0.5, hidden=x)
        return x


class Looping(Model):
    """Each block is called three times in a row."""

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            for _ in range(3):
                x = block(x)
        return x


class Twice(Model):
    """The whole list is gone through twice."""

    def chain(self, x: Tensor) -> Tensor:
        return super().chain(super().chain(x))


class Backwards(Model):
    def chain(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):  # type: ignore[call-overload]
            x = block(x)
        return x


class Skipping(Model):
    """Some blocks are never called."""

    left_out: tuple[int, ...] = ()

    def chain(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):  # type: ignore[arg-type]
            x = x if number in self.left_out else block(x)
        return x


class Training(Model):
    """Another way in training than in evaluation."""

    def chain(self, x: Tensor) -> Tensor:
        x = super().chain(x)
        return x * 2.0 if self.training else x


class FewerInEvaluation(Model):
    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.training else [*self.blocks][:2]:  # type: ignore[misc]
            x = block(x)
        return x


class Named(Model):
    """Blocks in an nn.ModuleDict."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({name: Block() for name in ("first", "second", "third", "fourth")}))

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():  # type: ignore[operator]
            x = block(x)
        return x


def nested() -> Model:
    return Model(nn.Sequential(*[nn.Sequential(nn.Sequential(Block()), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]))


class Stems(Model):
    """Modules beside the blocks in containers that are not called themselves."""

    def __init__(self) -> None:
        super().__init__(order(0, 1, 2, 3).blocks)
        self.stems = nn.ModuleDict({"a": nn.Embedding(VOCABULARY, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.ends = nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.chain(self.stems["b"](self.embed(ids) + self.stems["a"](ids)))
        for end in self.ends:
            x = end(x)
        out: Tensor = self.head(x)
        return out


# -- what blocks return -------------------------------------------------------------------------------------------------


class Pair(Block):
    """Two streams, in and out."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x) + 0.1 * y, y + torch.tanh(x)


class Pairs(Model):
    def chain(self, x: Tensor) -> Tensor:
        y = x * 0.5
        for block in self.blocks:  # type: ignore[attr-defined]
            x, y = block(x, y)
        return x + y


class Mapped(Block):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(x)}


class Maps(Model):
    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = block(x)["hidden"]
        return x


@dataclass
class Answer:
    hidden: Tensor


class Answering(Block):
    def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
        return Answer(super().forward(x))


class Answers(Model):
    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = block(x).hidden
        return x


class Wanting(Block):
    def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + 0.1 * more


class Asking(Model):
    """Asks which class a block has."""

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = block(x, x) if isinstance(block, Wanting) else block(x)
        return x


class Sums(Block):
    """Returns a number to be added to the loss beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y.square().mean()


class Summing(Model):
    def chain(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:  # type: ignore[attr-defined]
            x, more = block(x)
            total = total + more
        return x + total


class Skips(Model):
    """What an early block makes is used by the model behind a late one."""

    def chain(self, x: Tensor) -> Tensor:
        seen = []
        for block in self.blocks:  # type: ignore[attr-defined]
            x = block(x)
            seen.append(x)
        return x + seen[0]


# -- what is trained ----------------------------------------------------------------------------------------------------


def frozen(*places: int, ends: bool = False) -> Model:
    """Some blocks, or what is before and behind them, are not trained."""
    model = order(0, 1, 2, 3)
    for place in places:
        model.blocks[place].requires_grad_(False)  # type: ignore[index]
    if ends:
        model.embed.requires_grad_(False)
        model.head.requires_grad_(False)
    return model


class Unused(Model):
    """A layer that nobody calls, beside the blocks and in one of them."""

    def __init__(self) -> None:
        super().__init__(order(0, 1, 2, 3).blocks)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].spare = nn.Linear(WIDTH, WIDTH)  # type: ignore[index]


class Running(Block):
    """Keeps a running mean, which its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean((0, 1)), alpha=0.5)
        return super().forward(x) - 0.1 * self.mean


class Shifted(Block):
    """Has a buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0.0, 1.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


class Encoder(Model):
    """torch's own encoder, which looks at its first layer before it calls any."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        super().__init__(nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH)))
        for p in self.blocks.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, ids: Tensor) -> Tensor:
        """What is padded counts as zero: torch's fast path makes it so, in evaluation."""
        padded = ids == 0
        x = self.blocks(self.embed(ids), src_key_padding_mask=padded)
        out: Tensor = self.head(x.masked_fill(padded[..., None], 0.0))
        return out


class Decoder(Model):
    def __init__(self) -> None:
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        super().__init__(nn.TransformerDecoder(layer, 4))
        self.memory = nn.Linear(WIDTH, WIDTH)

    def chain(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x, self.memory(x))
        return out


class Both(Model):
    def __init__(self) -> None:
        super().__init__(nn.Transformer(WIDTH, 2, 2, 4, 2 * WIDTH, dropout=0.0, batch_first=True))
        self.target = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.embed(ids), self.target(ids.flip(1))))
        return out


def kind(of: type[Model], block: Callable[[], nn.Module] = Block, **attributes: Any) -> Model:
    model = of(order(0, 1, 2, 3, block=block).blocks)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


MODELS: dict[str, Make] = {
    "plain": partial(order, 0, 1, 2, 3),
    "0101": partial(order, 0, 1, 0, 1),
    "0120": partial(order, 0, 1, 2, 0),
    "0000": partial(order, 0, 0, 0, 0),
    "0011": partial(order, 0, 0, 1, 1),
    "one act": lambda: sequential(nn.Tanh()),
    "one act in place": lambda: sequential(nn.ReLU(inplace=True)),
    "act outside": ActOutside,
    "alone": alone,
    "0101 attending": partial(order, 0, 1, 0, 1, block=Attending),
    "one inside": one_inside,
    "one norm": OneNorm,
    "between": Between,
    "aliased": Aliased,
    "outside too": OutsideToo,
    "relu": lambda: order(0, 1, 2, 3, block=partial(InPlace, "relu")),
    "output": lambda: order(0, 1, 2, 3, block=partial(InPlace, "output")),
    "middle": lambda: order(0, 1, 2, 3, block=partial(InPlace, "middle")),
    "input": lambda: order(0, 1, 2, 3, block=partial(InPlace, "input")),
    "first": lambda: order(0, 1, 2, 3, block=partial(InPlace, "first")),
    "in place outside": InPlaceOutside,
    "keywords": partial(kind, Keywords, Keyword),
    "computed": partial(kind, Computed),
    "computed inside": lambda: order(0, 1, 2, 3, block=ComputedInside),
    "phases": partial(kind, Phases),
    "widening": partial(widening, 1),
    "widening last": partial(widening, 3),
    "looping": partial(kind, Looping),
    "twice": partial(kind, Twice),
    "backwards": partial(kind, Backwards),
    "skipping 1": partial(kind, Skipping, left_out=(1,)),
    "skipping 2": partial(kind, Skipping, left_out=(2,)),
    "skipping half": partial(kind, Skipping, left_out=(2, 3)),
    "training": partial(kind, Training),
    "fewer in evaluation": partial(kind, FewerInEvaluation),
    "named": Named,
    "nested": nested,
    "stems": Stems,
    "pairs": partial(kind, Pairs, Pair),
    "maps": partial(kind, Maps, Mapped),
    "answers": partial(kind, Answers, Answering),
    "asking": partial(kind, Asking, Wanting),
    "summing": partial(kind, Summing, Sums),
    "skips": partial(kind, Skips),
    "frozen first": partial(frozen, 0, 1),
    "frozen all blocks": partial(frozen, 0, 1, 2, 3),
    "frozen ends": partial(frozen, ends=True),
    "frozen last": partial(frozen, 2, 3),
    "frozen first and embedding": partial(frozen, 0, 1, ends=True),
    "unused": Unused,
    "running": lambda: order(0, 1, 2, 3, block=Running),
    "running shared": lambda: order(0, 1, 0, 1, block=Running),
    "shifted shared": lambda: order(0, 1, 0, 1, block=Shifted),
    "encoder": Encoder,
    "decoder": Decoder,
    "both": Both,
}


def loss_of(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
    return ids, ids.flip(1)


def made(name: str) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return MODELS[name]().double()


def check(name: str, parallel: dict[str, Any], *, microbatches: int = 1, **settings: Any) -> None:
    """Two steps of gradient descent under a spec: losses, norms and all weights are those of a plain loop."""
    whole = made(name)
    model = copy.deepcopy(whole)
    seen = []
    optimizer = dict(name="sgd", lr=RATE)
    with Engine(model, parallel, optimizer=optimizer, precision="fp64", loss_fn=loss_of, **settings) as engine:
        for step in range(2):
            seen.append(engine.train_step(engine.shard_batch(batch_of(step))))
            assert engine.last is not None and engine.last.grad_norm is not None
            seen.append(engine.last.grad_norm)
        seen.append(engine.eval_step(engine.shard_batch(batch_of(2))))
        found = engine.full_state_dict()
    wanted = []
    for step in range(2):
        parts = zip(*(part.chunk(microbatches) for part in batch_of(step)), strict=True)
        loss = sum(loss_of(whole(part[0]), part) / microbatches for part in parts)
        assert isinstance(loss, Tensor)
        loss.backward()
        trained = [p for p in whole.parameters() if p.grad is not None]
        squares = [p.grad.square().sum() for p in trained if p.grad is not None]
        wanted += [float(loss.detach()), float(torch.stack(squares).sum().sqrt())]
        with torch.no_grad():
            for p in trained:
                assert p.grad is not None
                p -= RATE * p.grad
                p.grad = None
    whole.eval()
    with torch.no_grad():
        wanted.append(float(loss_of(whole(batch_of(2)[0]), batch_of(2))))
    torch.testing.assert_close(seen, wanted, rtol=1e-9, atol=1e-9, msg=lambda told: f"{name}: {told}")
    state = whole.state_dict()
    assert list(found) == list(state), f"{name}: {set(found) ^ set(state)}"
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=f"{name}: {key} differs")
