"""A model's own calls are redirected, those of sharded layers are not looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import Mesh, dropout_stream
from meshfold.mesh.testing import fake_world
from meshfold.tensor_parallel import parallelize
from meshfold.tensor_parallel.convert.functional_dropout import FunctionalDropout


class Block(nn.Module):
    """A norm and an MLP; the dropout is a call of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


@pytest.fixture
def block() -> Iterator[nn.Module]:
    with fake_world(4):
        model = Block()
        parallelize(model, Mesh({"row": 2, "col": 2}), "2d")
        with dropout_stream(0, 0):
            model(torch.ones(4, 2, 8))  # tracked
            yield model


def test_only_the_models_own_calls_are_looked_at(block: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    redirect = FunctionalDropout.__torch_function__

    def look(mode: FunctionalDropout, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return redirect(mode, func, types, args, kwargs)

    monkeypatch.setattr(FunctionalDropout, "__torch_function__", look)
    block(torch.ones(4, 2, 8))
    assert [name for name in seen if name in ("gelu", "dropout", "add")] == ["gelu", "dropout", "add"]
    assert not {"var_mean", "rsqrt", "matmul", "view_as"} & set(seen)  # calls of the layers


def test_a_layer_that_fails_leaves_no_mode_behind(block: nn.Module) -> None:
    up = block.get_submodule("up")
    with FunctionalDropout() as mode:
        with pytest.raises(RuntimeError):
            up(torch.ones(2, 3))  # three features instead of four
        assert torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1) is mode
    assert torch._C._len_torch_function_stack() == 0
