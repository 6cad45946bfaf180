"""A model that an engine refuses is what it was: modules, classes, attributes, hooks, parameters, values, forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import MeshfoldError
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini import Gemini

IDS = torch.arange(32).view(4, 8) % 12


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.self_attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc1, self.fc2, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(drop)
        self.fc1.register_forward_hook(halved)
        self.notes: list[str] = ["a list"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.self_attn(y, y, y, need_weights=False)[0]
        found: Tensor = x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return found


def halved(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5


class Model(nn.Module):
    """A tied head, a buffer, a hook, attention whose class changes, and blocks in a list or as attributes."""

    def __init__(self, *, listed: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        if listed:
            self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        else:
            self.first, self.second = Block(drop), Block(drop)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids) * self.scale
        for block in self.blocks if "blocks" in self._modules else (self.first, self.second):
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def model(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(**settings)


def compiled() -> nn.Module:
    made = model()
    made.compile()
    return made


def frozen() -> nn.Module:
    return model().requires_grad_(False)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=12, hidden=8, layers=2, heads=2, max_positions=16))


def of_two_windows() -> nn.Module:
    made = GPT(GPTConfig(vocab_size=12, hidden=8, layers=2, heads=2, max_positions=16, window=4))
    made.other = type(made.mask)(8)
    return made


def without_values() -> nn.Module:
    with torch.device("meta"):
        return gpt()


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    made: nn.Module = peft.get_peft_model(model(listed=False), peft.LoraConfig(target_modules=["fc1"], r=2))
    return made


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch.flatten())


class Fails(torch.optim.SGD):
    """Refuses more parameters than a check tries it with."""

    def __init__(self, parameters: Any) -> None:
        given = list(parameters)
        if len(given) > 2:
            raise RuntimeError("too many")
        super().__init__(given, lr=0.1)


class OfWhole(torch.optim.Optimizer):
    """Steps by the norm of a parameter's gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter -= parameter.grad / parameter.grad.norm()


def absent(optimizer: torch.optim.Optimizer) -> Any:
    raise KeyError("absent")


SGD = dict(name="sgd", lr=0.1)
TP: dict[str, Any] = dict(tensor=2)
STAGES: dict[str, Any] = dict(tensor=2, pipeline=dict(size=2, schedule="interleaved"))
Refusal = tuple[Callable[..., nn.Module], dict[str, Any], dict[str, Any], str]
REFUSALS: dict[str, Refusal] = {
    "no list of blocks": (lambda: model(listed=False), dict(tensor=2, pipeline=2), {}, "no nn.ModuleList"),
    "too few blocks": (model, STAGES, {}, "cannot be cut into 4 stages"),
    "compiled as a whole": (compiled, dict(tensor=2, pipeline=2), {}, "compiled as a whole"),
    "a wrong example": (
        model,
        dict(tensor=2, pipeline=2),
        dict(example=(torch.zeros(2, 3), 1.5)),
        "example|called with",
    ),
    "nothing to recompute": (lambda: model(listed=False), TP, dict(recompute="blocks"), "no repeated blocks"),
    "adapters and nothing to recompute": (adapted, TP, dict(recompute="blocks"), "no repeated blocks"),
    "masks of two windows": (
        of_two_windows,
        dict(tensor=2, sequence=dict(mode="ring", size=2)),
        dict(loss_fn=None),
        "masks have the windows",
    ),
    "more ranks than heads": (
        hugging_face,
        dict(sequence=dict(mode="ulysses", size=4)),
        dict(loss_fn=None),
        "heads",
    ),
    "no memory": (
        model,
        dict(tensor=2, zero=dict(stage=2, gpu_memory_limit="1KiB", host_memory_limit="1KiB")),
        {},
        "there are 1.00 KiB on the device",
    ),
    "a regime of Adam": (model, dict(tensor=2, zero=dict(stage=3, regime="B")), {}, "regime 'B'"),
    "shares that cannot be": (
        model,
        dict(zero=dict(stage=1, placement="static", offload_optim_frac=0.5, offload_param_frac=0.5)),
        {},
        "stage=1",
    ),
    "no folder for the disk": (
        model,
        dict(tensor=2, zero=dict(stage=3, placement="cpu", offload_path="/dev/null/folder")),
        dict(optimizer=dict(name="adamw"), precision="bf16"),
        "offload_path|Not a directory|/dev/null",
    ),
    "nothing to train": (frozen, dict(tensor=2, pipeline=2), {}, "all are frozen"),
    "an optimizer of whole matrices": (
        model,
        TP,
        dict(optimizer=OfWhole, precision="bf16"),
        "needs whole parameters",
    ),
    "an optimizer that fails": (model, dict(tensor=2), dict(optimizer=Fails, precision="bf16"), "too many"),
    "an optimizer of shards that fails": (model, dict(zero=dict(stage=3)), dict(optimizer=Fails), "too many"),
    "a scheduler that fails": (model, dict(tensor=2, pipeline=2), dict(lr_scheduler=absent), "absent"),
    "a scheduler of shards that fails": (
        model,
        dict(tensor=2, zero=dict(stage=3)),
        dict(lr_scheduler=absent),
        "absent",
    ),
    "one process, and dropout": (lambda: model(drop=0.1), dict(data=1), dict(lr_scheduler=absent), "absent"),
    "no values yet": (
        without_values,
        dict(tensor=2, zero=dict(stage=3)),
        dict(lr_scheduler=absent),
        "absent",
    ),
    "a loss of its own, and a regime": (
        gpt,
        dict(tensor=2, sequence=dict(mode="ring", size=2), zero=dict(stage=1, regime="C")),
        dict(loss_fn=None),
        "regime 'C'",
    ),
}


def ranks_of(parallel: dict[str, Any]) -> int:
    sizes = [entry if isinstance(entry, int) else entry.get("size", 1) for entry in parallel.values()]
    return int(torch.tensor(sizes).prod())


def consists_of(module: nn.Module) -> list[Any]:
    """What a module has, with what is in its containers; of tensors their memory, hooks and attributes."""
    found: list[Any] = []
    for name, one in module.named_modules(remove_duplicate=False):
        found += [name, one, type(one)]
        for key, value in vars(one).items():
            inside = [*value.items()] if isinstance(value, dict) else value
            found += (
                [key, value, *(leaf for leaf in inside if isinstance(value, dict | list))]
                if isinstance(value, dict | list)
                else [key, value]
            )
    for tensor in (*module.parameters(), *module.buffers()):
        hooks = [[*(kept or {})] for kept in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]
        memory = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        found += [tensor, *memory, tensor.requires_grad, tensor.grad, *vars(tensor), hooks]
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two things are one, or have one value without a tensor in it."""
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and not isinstance(one, Tensor | nn.Module) and bool(one == other)


def refuse(case: str) -> None:
    make, parallel, settings, message = REFUSALS[case]
    given = make()
    before, values = consists_of(given), copy.deepcopy(given.state_dict())
    meta = any(p.is_meta for p in given.parameters())
    output = None if meta or case.startswith("compiled") else run(given)
    kwargs: dict[str, Any] = {"optimizer": SGD, "loss_fn": loss, **settings}
    with pytest.raises((MeshfoldError, RuntimeError, KeyError), match=message):
        Engine(given, parallel, **kwargs)
    after = consists_of(given)
    changed = [(a, b) for a, b in zip(before, after, strict=False) if not same(a, b)]
    assert len(before) == len(after) and not changed, changed[:3]
    for name, value in given.state_dict().items():
        assert value.is_meta or torch.equal(value, values[name]), name
    assert output is None or torch.equal(run(given), output)


def run(module: nn.Module) -> Tensor:
    with torch.no_grad():
        output = module.eval()(IDS)
    module.train()
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.few(12)
@pytest.mark.parametrize("case", REFUSALS)
def test_a_model_that_is_refused_is_what_it_was(case: str) -> None:
    run_on_ranks(ranks_of(REFUSALS[case][1]), refuse, case)


def train_after_refusals() -> None:
    given, alone = model(), model()
    for parallel in (STAGES, dict(tensor=4, zero=dict(stage=3, regime="B"))):
        with pytest.raises(MeshfoldError):
            Engine(given, parallel, optimizer=SGD, loss_fn=loss)
    assert isinstance(given, Model)
    with Engine(given, dict(tensor=2, pipeline=2), optimizer=SGD, loss_fn=loss, precision="fp64") as engine:
        engine.train_step(IDS)
        found = engine.full_state_dict()
    alone.double()
    loss(alone(IDS), IDS).backward()
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name].double(), parameter - 0.1 * parameter.grad, atol=1e-12), name


def test_and_trains_like_any_other() -> None:
    run_on_ranks(4, train_after_refusals)


def test_weights_that_go_into_chunks_are_not_kept_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = model()
    kept = [StorageWeakRef(parameter.untyped_storage()) for parameter in given.parameters()]
    seen, fill = [], Gemini._fill

    def looking(held: Gemini, *args: Any) -> None:
        seen.append(sum(one.expired() for one in kept))
        fill(held, *args)

    monkeypatch.setattr(Gemini, "_fill", looking)
    with Engine(given, dict(zero=dict(stage=3)), optimizer=SGD, loss_fn=loss):
        assert seen[0] == 0 and seen == sorted(seen) and seen[-1] >= len(kept) - 2
        assert all(one.expired() for one in kept)
