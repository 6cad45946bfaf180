"""Dropout keys: one a call, the same under every layout, and again when a forward is recomputed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshfold.mesh import MeshfoldError
from meshfold.mesh.random import uniform
from meshfold.mesh.random.dropout import (
    TokenShards,
    checkpoint_contexts,
    current_dropout_stream,
    dropout_stream,
    next_dropout_draw,
    set_token_shards,
)


def keys(seed: int, step: int, names: list[str]) -> list[int]:
    with dropout_stream(seed, step):
        return [next_dropout_draw(name).key for name in names]


def test_keys_repeat_and_differ_by_call_name_and_step() -> None:
    names = ["", "", "a", "b", "a"]
    assert keys(0, 1, names) == keys(0, 1, names)
    assert len({*keys(0, 1, names), *keys(0, 2, names)}) == 10
    assert all(0 <= key < 2**63 for key in keys(0, 1, names))


def test_a_named_call_does_not_depend_on_the_calls_before_it() -> None:
    first, second = keys(0, 1, ["layers.0.drop", "layers.1.drop"])
    assert keys(0, 1, ["layers.1.drop"]) == [second]
    assert keys(0, 1, ["layers.1.drop", "layers.0.drop"]) == [second, first]


def test_streams_nest_and_end() -> None:
    with dropout_stream(3, 1) as outer:
        assert current_dropout_stream().seed == 3 and outer.step == 1
        before = next_dropout_draw().key
        with dropout_stream(4, 1):
            assert current_dropout_stream().seed == 4
            assert next_dropout_draw().key == before  # the seed is another, the key is that of the first call again
        assert next_dropout_draw().key != before
    with pytest.raises(MeshfoldError, match=r"with dropout_stream\(seed, step\)"):
        next_dropout_draw()
    with pytest.raises(ZeroDivisionError), dropout_stream(0, 0):
        1 / 0  # noqa: B018
    with pytest.raises(MeshfoldError):
        next_dropout_draw()


def test_a_stream_knows_its_place_in_the_global_batch() -> None:
    with dropout_stream(0, 1, first_row=3, first_token=24) as stream:
        assert (stream.first_row, stream.first_token) == (3, 24)
        _, recompute = checkpoint_contexts()
    with recompute:
        again = current_dropout_stream()
        assert (again.first_row, again.first_token) == (3, 24)
    with dropout_stream(0, 1) as stream:
        assert (stream.first_row, stream.first_token) == (0, 0)


def test_every_thread_has_its_own() -> None:
    seen: list[object] = []

    def work() -> None:
        try:
            next_dropout_draw()
        except MeshfoldError:
            seen.append("none")
        with dropout_stream(5, 0):
            seen.append(current_dropout_stream().seed)

    with dropout_stream(1, 0):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert current_dropout_stream().seed == 1
    assert seen == ["none", 5]


class Drop(nn.Module):
    """x with half of its elements dropped, each time it is called; keeps the keys it took."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 64))
        self.taken: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            made = next_dropout_draw()
            self.taken.append(made.key)
            x = x * self.weight * (uniform(made.seed, made.key, torch.arange(64)) < 0.5)
        return x


OWN = dict(use_reentrant=False, context_fn=checkpoint_contexts, preserve_rng_state=False)
WAYS: dict[str, dict[str, Any]] = {
    "with our contexts": OWN,
    "as a model writes it": dict(use_reentrant=False),
    "reentrant": dict(use_reentrant=True),
}


def gradient(checkpointed: dict[str, Any] | None, backwards: int = 1) -> tuple[Tensor, list[int]]:
    blocks = [Drop(), Drop()]
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    with dropout_stream(0, 7):
        y = x
        for block in (*blocks, blocks[0]):  # one of them twice
            y = block(y) if checkpointed is None else checkpoint(block, y, **checkpointed)
    for turn in range(backwards):  # the stream has ended: the recomputation brings its own
        y.square().sum().backward(retain_graph=turn < backwards - 1)
    return torch.cat([x.grad, *(block.weight.grad for block in blocks)]), [k for b in blocks for k in b.taken]


@pytest.mark.parametrize(("way", "backwards"), [*((way, 1) for way in WAYS), ("as a model writes it", 2)])
def test_recomputation_drops_the_same_elements(way: str, backwards: int) -> None:
    state = torch.get_rng_state()
    expected, taken = gradient(None, backwards)
    got, again = gradient(WAYS[way], backwards)
    assert torch.equal(got, expected)
    assert len(set(taken)) == 6
    assert set(again) == set(taken) and len(again) > len(taken)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn of what others draw from


def test_recomputation_without_the_state_that_the_forward_had_is_refused() -> None:
    with dropout_stream(0, 8):
        y = checkpoint(Drop(), torch.ones(64), use_reentrant=False, preserve_rng_state=False).sum()
        with pytest.raises(MeshfoldError, match="preserve_rng_state=True"):
            y.backward()


def test_checkpointing_without_dropout_needs_no_stream() -> None:
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(torch.sin, x, use_reentrant=False, context_fn=checkpoint_contexts)
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_tokens_of_split_sequences_have_the_numbers_of_whole_sequences() -> None:
    """Two sequences of 5 tokens, of which this rank has the first, the last and a third that is padding."""
    shards = TokenShards(length=5, index=torch.tensor([0, 4, 4]))
    assert shards.numbers(torch.arange(6)).tolist() == [0, 4, 4, 5, 9, 9]
    set_token_shards(shards)  # without a stream there is nobody to tell
    with dropout_stream(0, 0):
        assert current_dropout_stream().token_shards is None
        set_token_shards(shards)
        _, again = checkpoint_contexts()
    with again:
        assert current_dropout_stream().token_shards is shards
    old: Any = dict(dealt=shards)
    with pytest.warns(DeprecationWarning, match="token_shards"), dropout_stream(0, 0, **old):
        assert current_dropout_stream().token_shards is shards
