"""On one rank nothing is split: layers launch what torch's own would, so that the step of a small model is no longer."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.mesh import Mesh, TokenError
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import Mode, find_mode
from meshfold.tensor_parallel.layers.embedding import Embedding
from meshfold.tensor_parallel.layers.linear import Linear


class Launches(TorchDispatchMode):
    """Counts operations, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "view" not in str(func):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def launches(run: Callable[[], Tensor]) -> Counter[str]:
    with Launches() as counted:
        run().sum().backward()
    return counted.found


def one_rank(mode: Mode) -> None:
    mesh = Mesh(dict.fromkeys(mode.axes, 1))
    plain = nn.Linear(6, 4, dtype=torch.float64)
    ours = Linear.convert(plain, mesh, mode, "column")
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    assert launches(lambda: ours(x)) == launches(lambda: plain(x))
    # Not to the bit: a weight that is stored transposed takes another kernel of BLAS on some processors.
    close = partial(torch.testing.assert_close, rtol=1e-14, atol=1e-14)
    close(ours(x), plain(x))
    close(*(torch.autograd.grad(layer(x).square().sum(), [layer.weight, layer.bias]) for layer in (ours, plain)))

    table = nn.Embedding(11, 4, padding_idx=3, dtype=torch.float64)
    split = Embedding.convert(table, mesh, mode)
    ids = torch.tensor([[1, 3, 10], [0, 0, 5]])
    assert torch.equal(split(ids), table(ids))
    found = [torch.autograd.grad(layer(ids).square().sum(), [layer.weight]) for layer in (split, table)]
    assert all(map(torch.equal, *found))
    with pytest.raises(TokenError, match="token id 11 is not in the vocabulary of 11 words"):
        split(torch.tensor([[11]]))


@pytest.mark.parametrize("name", ["1d", "2d", "3d"])
def test_a_layer_on_one_rank_is_torchs_own(name: str) -> None:
    run_on_ranks(1, one_rank, find_mode(name))
