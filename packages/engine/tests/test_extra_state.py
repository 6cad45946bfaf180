"""Extra state of modules (get_extra_state) is in checkpoints and in the whole state dict, under every spec."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Checkpoint, CheckpointError, Engine
from meshfold.mesh.testing import ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from checkpoint_edits import edit_state


class Counting(nn.Module):
    """Keeps something that is no parameter."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.layer, self.kind, self.seen = nn.Linear(4, 4), kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return torch.relu(self.layer(x)) + x

    def get_extra_state(self) -> Any:
        return {
            "plain": {"seen": self.seen, "names": ["a", None]},
            "tensor": torch.tensor([self.seen, 7]),
            "mixed": {"seen": (self.seen, torch.tensor(1.5))},
            "odd": Path("x"),
        }[self.kind]

    def set_extra_state(self, state: Any) -> None:
        match self.kind:
            case "plain":
                assert state["names"] == ["a", None]
                self.seen = state["seen"]
            case "tensor":
                self.seen = int(state[0])
            case _:
                self.seen = state["seen"][0]
        if self.seen == 99:
            raise ValueError("99 is too many")


def model_of(*kinds: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(Counting, kinds))


def engine_of(model: nn.Module, parallel: dict[str, Any] | None = None) -> Engine:
    return Engine(
        model,
        parallel or {},
        optimizer=dict(name="sgd", lr=0.1),
        loss_fn=lambda out, batch: out.square().mean(),
        precision="fp64",
    )


def rows() -> Tensor:
    return torch.ones(4, 4, dtype=torch.float64)


def seen(model: nn.Module) -> list[int]:
    return [layer.seen for layer in model.modules() if isinstance(layer, Counting)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_comes_back(asynchronous: bool, tmp_path: Path) -> None:
    kinds = ("plain", "tensor", "mixed")
    engine = engine_of(model := model_of(*kinds))
    engine.train_step(rows())
    engine.save(tmp_path / "ckpt", asynchronous=asynchronous)
    engine.train_step(rows())
    engine.close()
    found = Checkpoint(tmp_path / "ckpt")
    assert found.state["extra_state"] == {"0._extra_state": {"seen": 1, "names": ["a", None]}}
    assert found.extra_state["2._extra_state"] == {"seen": (1, torch.tensor(1.5))}
    assert seen(model) == [2, 2, 2]
    other = engine_of(second := model_of(*kinds))
    other.load(tmp_path / "ckpt")
    assert seen(second) == [1, 1, 1]
    whole = other.full_state_dict()
    assert whole.keys() == model_of(*kinds).state_dict().keys()
    plain = model_of(*kinds).double()
    plain.load_state_dict(whole)  # strict: torch asks for every name
    assert seen(plain) == [1, 1, 1]
    whole["0._extra_state"]["seen"] = 5
    other.load_state_dict(whole)
    assert seen(second) == [5, 1, 1]
    other.close()


def test_what_needs_code_to_be_read_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    engine = engine_of(model_of("plain", "odd"))
    said = r"'1._extra_state' cannot be saved: Counting.get_extra_state\(\) returns a PosixPath, which cannot be loaded without"
    for asynchronous in (False, True):
        with pytest.raises(CheckpointError, match=said):
            engine.save(tmp_path / "ckpt", asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match=said):
        engine.full_state_dict()
    assert [*tmp_path.iterdir()] == []
    engine.close()


def test_a_module_that_does_not_take_it_leaves_all_as_it_was(tmp_path: Path) -> None:
    engine = engine_of(model := model_of("plain", "plain"))
    engine.train_step(rows())
    engine.save(tmp_path / "ckpt")
    edit_state(tmp_path / "ckpt", lambda state: state["extra_state"]["1._extra_state"].update(seen=99))
    engine.train_step(rows())
    before = engine.full_state_dict()
    with pytest.raises(
        CheckpointError, match=r"set_extra_state does not take the state of '1._extra_state' \(ValueError: 99"
    ):
        engine.load(tmp_path / "ckpt")
    after = engine.full_state_dict()
    assert seen(model) == [2, 2] and engine.steps == 2
    assert all(torch.equal(before[name], after[name]) for name in before if "extra" not in name)
    engine.close()


def test_a_checkpoint_from_before_it_was_kept_is_read(tmp_path: Path) -> None:
    """A tensor was among the model's tensors then, and anything else was left out."""
    engine = engine_of(model_of("plain", "tensor"))
    engine.train_step(rows())
    engine.save(tmp_path / "ckpt")
    engine.close()

    def without(state: dict[str, Any]) -> None:
        del state["extra_state"], state["files"]["extra_state.pt"], state["sums"]["extra_state.pt"]

    edit_state(tmp_path / "ckpt", without)
    other = engine_of(second := model_of("plain", "tensor"))
    other.train_step(rows())
    with pytest.warns(UserWarning, match=r"it has no '0._extra_state', '1._extra_state'; the model keeps its own"):
        other.load(tmp_path / "ckpt")
    assert seen(second) == [1, 1]
    state = {name: value for name, value in other.full_state_dict().items() if name != "0._extra_state"}
    with pytest.warns(UserWarning, match="it has no '0._extra_state'"):
        other.load_state_dict({**state, "1._extra_state": torch.tensor([3, 7])})
    assert seen(second) == [1, 3]
    other.close()


@pytest.mark.few(1)
@ranks(2)
@pytest.mark.parametrize(
    "parallel", [dict(data=2), dict(data=2, zero=dict(stage=3, placement="cpu"))], ids=["data", "zero"]
)
def test_ranks_share_that_of_the_first(parallel: dict[str, Any], tmp_path: Path) -> None:
    engine = engine_of(model := model_of("plain", "mixed"), parallel)
    engine.train_step(rows()[:2])
    for layer in model.modules():
        if isinstance(layer, Counting):
            layer.seen += 10 * engine.mesh.rank
    whole: dict[str, Any] = engine.full_state_dict()
    assert whole["0._extra_state"]["seen"] == whole["1._extra_state"]["seen"][0] == 1
    engine.save(tmp_path / "ckpt")
    engine.load(tmp_path / "ckpt")
    assert seen(model) == [1, 1]
    engine.close()


class Deep(nn.Module):
    """A first layer, and blocks that can be cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = (
            nn.Embedding(8, 4),
            nn.ModuleList(map(Counting, ("plain", "plain", "mixed", "plain"))),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@ranks(2)
def test_stages_have_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = engine_of(model := Deep(), dict(pipeline=dict(size=2, microbatches=2)))

    def number() -> None:
        for place, layer in enumerate(model.blocks):
            if isinstance(layer, Counting):  # others are on the other rank
                layer.seen = 10 * engine.mesh.rank + place

    def kept() -> list[int]:
        whole: dict[str, Any] = engine.full_state_dict()
        found = [whole[f"blocks.{place}._extra_state"]["seen"] for place in range(4)]
        return [value[0] if isinstance(value, tuple) else value for value in found]

    number()
    assert kept() == [0, 1, 12, 13]  # of the rank that runs it
    engine.save(tmp_path / "ckpt")
    engine.train_step(torch.arange(8).view(4, 2))
    engine.load(tmp_path / "ckpt")
    assert kept() == [0, 1, 12, 13]
    assert seen(model) == ([12, 13] if engine.mesh.rank else [0, 1])
    engine.close()


# -- checkpoints that an earlier version has written ------------------------------------------------------------------

SAVED = Path(__file__).parent / "saved_before"


@pytest.mark.parametrize("name", ["whole", "rectangles"])
def test_a_checkpoint_of_an_earlier_version_loads(name: str, tmp_path: Path) -> None:
    """Neither its files nor its index have checksums of themselves."""
    shutil.copytree(SAVED / name, tmp_path / "ckpt")
    assert "sums" not in json.loads((tmp_path / "ckpt" / "state.json").read_text())
    engine = Engine(
        nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)),
        optimizer=dict(name="adamw", lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        loss_fn=lambda out, batch: out.square().mean(),
    )
    engine.load(tmp_path / "ckpt")
    expected = torch.load(SAVED / "state_dict.pt", weights_only=True)
    found = engine.full_state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert engine.steps == 2 and engine.optimizer is not None
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    engine.save(tmp_path / "ckpt")  # over it
    Checkpoint(tmp_path / "ckpt").verify()
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "scheduler.pt",
        "state.json",
    ]
    engine.close()
