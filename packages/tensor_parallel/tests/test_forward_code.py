"""Reading a forward: its parameters, the order of its calls, the sizes it takes from a configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from meshfold.tensor_parallel.convert.forward_code import children_called, config_size, parameters_of


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_heads=4, vocab_size=8)
        self.dropout, self.up, self.down = nn.Dropout(0.1), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = self.config.num_heads
        x = self.down(self.dropout(self.up(x)))
        return self.up(x).unflatten(-1, (heads, -1))


class Comments(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        # not self.config.num_heads: a rank has some of them
        return x * self.config.vocab_size


def test_children_are_listed_in_the_order_of_their_first_call() -> None:
    assert children_called(Reads()) == ("up", "dropout", "down")


@pytest.mark.parametrize(("module", "found"), [(Reads(), "config.num_heads"), (Comments(), "")])
def test_a_size_of_all_heads_is_found_in_code_and_not_in_comments(module: nn.Module, found: str) -> None:
    assert config_size(module) == found


def test_a_class_without_a_source_shows_nothing() -> None:
    space: dict[str, type[nn.Module]] = {}
    exec("class Typed(Base):\n    def forward(self, x): return self.up(x)", {"Base": nn.Module}, space)
    typed = space["Typed"]()
    assert children_called(typed) == ()
    assert config_size(typed) == ""
    assert list(parameters_of(typed)) == ["x"]
