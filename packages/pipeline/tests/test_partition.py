"""Where a model is cut, and what a rank then keeps. One process: a mesh of ranks that are not there."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from pipeline_checks import VOCAB, WIDTH, Block, Model, model
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh, SpecError, metadata
from meshfold.mesh.random.dropout import TokenShards, current_dropout_stream, dropout_stream
from meshfold.pipeline.runtime.blocks import balance_blocks, find_blocks
from meshfold.pipeline.runtime.microbatch import rows_of, split
from meshfold.pipeline.runtime.partition import Partition, PartitionConfig, estimate, partition_model
from meshfold.pipeline.runtime.placeholders import AbsentBlock, AbsentParameter
from meshfold.pipeline.runtime.stage import dropout_of


def of(rank: int, whole: nn.Module, stage_ranks: tuple[int, ...] = (0, 1, 2, 3), **settings: Any) -> Partition:
    return partition_model(
        whole, Mesh({"pipe": max(stage_ranks) + 1}, rank=rank), stage_ranks, PartitionConfig(**settings)
    )


def dearest(costs: list[float], counts: tuple[int, ...], before: float, after: float) -> float:
    stages, at = [], 0
    for count in counts:
        stages.append(sum(costs[at : at + count]))
        at += count
    stages[0] += before
    stages[-1] += after
    return max(stages)


def test_the_dearest_stage_is_as_cheap_as_can_be() -> None:
    chance = random.Random(0)
    for _ in range(200):
        costs = [chance.choice([1.0, 2.0, chance.random() * 5]) for _ in range(chance.randint(1, 8))]
        stages = chance.randint(1, len(costs))
        before, after = chance.random() * 3, chance.random() * 6
        found = balance_blocks(costs, stages, before=before, after=after)
        assert sum(found) == len(costs) and len(found) == stages and min(found) >= 1
        every = [
            tuple(b - a for a, b in itertools.pairwise((0, *ends, len(costs))))
            for ends in itertools.combinations(range(1, len(costs)), stages - 1)
        ]
        best = min(dearest(costs, counts, before, after) for counts in every)
        assert dearest(costs, tuple(found), before, after) == pytest.approx(best)


def test_equal_blocks_are_divided_evenly_and_a_dear_head_takes_some() -> None:
    assert sorted(balance_blocks([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert balance_blocks([1.0] * 8, 4) == [2, 2, 2, 2]
    assert balance_blocks([1.0] * 9, 4, after=2.0) == [3, 3, 2, 1] or balance_blocks([1.0] * 9, 4, after=2.0)[-1] == 1
    with pytest.raises(
        LayoutError,
        match=r"3 blocks cannot be cut into 4 stages.*or pipeline=3 with chunks=1",
    ):
        balance_blocks([1.0] * 3, 4)
    with pytest.raises(LayoutError, match="negative"):
        balance_blocks([1.0, -1.0], 1)


def test_the_repeated_block_is_found() -> None:
    assert find_blocks(model(3)).name == "layers"
    mixed = nn.Sequential(nn.Embedding(3, 4), *[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)], nn.Linear(4, 3))
    assert find_blocks(mixed).keys == ("1", "2", "3") and find_blocks(mixed).name == ""
    inside = nn.ModuleDict({"small": nn.ModuleList(nn.Linear(2, 2) for _ in range(9)), "large": mixed})
    assert find_blocks(inside).name == "large"
    assert len(find_blocks(inside, "small")) == 9
    with pytest.raises(LayoutError, match="blocks='nowhere'"):
        find_blocks(inside, "nowhere")
    assert find_blocks(model(3)).index_of("layers.2.up.weight") == 2
    assert find_blocks(model(3)).index_of("head.weight") is None


def test_a_head_costs_what_it_multiplies_and_a_table_nothing() -> None:
    for tie in (False, True):
        whole = model(2, tie=tie)
        matrices = WIDTH * WIDTH * (3 + 1 + 2 + 2)
        before = {"embed.weight", "positions.weight"}
        assert estimate(whole, find_blocks(whole), before) == [0, matrices, matrices, VOCAB * WIDTH]


def test_ranks_keep_their_stages_under_the_names_of_the_whole_model() -> None:
    names = [name for name, _ in model().named_parameters()]
    seen: list[str] = []
    for rank in range(4):
        mine = of(rank, model(), layers=[2, 3, 2, 1])
        kept = [name for name, _ in mine.named_parameters()]
        assert kept == list(mine.model.state_dict())
        assert mine.bounds == (0, 2, 5, 7, 8) and mine.stages == (rank,)
        seen += kept
        assert ("embed.weight" in kept) == (rank == 0) and ("head.weight" in kept) == (rank == 3)
        assert all(isinstance(block, Block | AbsentBlock) for block in mine.model.layers)
        assert isinstance(mine.model.embed, nn.Embedding)
        assert isinstance(mine.model.embed.weight, AbsentParameter) == (rank > 0)
        assert f"stage {rank} on rank {rank}" in str(mine)
    assert sorted(seen) == sorted(names)


def test_a_ghost_takes_no_memory_and_knows_its_shape() -> None:
    ghost: Any = of(1, model(tie=True)).model.embed.weight
    assert ghost.shape == (VOCAB, WIDTH) and ghost.dtype == torch.float64
    assert ghost.untyped_storage().nbytes() == 8
    assert bool(torch.isnan(nn.functional.embedding(torch.tensor([1]), ghost)).all())


def test_ties_are_marked_on_their_holders() -> None:
    for rank in range(4):
        mine = of(rank, model(tie=True))
        kept = dict(mine.named_parameters())
        assert [(tie.name, tie.ranks) for tie in mine.ties] == [("embed.weight", (0, 3))] * (rank in (0, 3))
        if rank in (0, 3):
            meta = metadata(kept["embed.weight"])
            assert meta is not None and meta.tie == "embed.weight"
    both = of(0, model(tie=True), (0, 1, 1, 0))
    assert both.ties == () and both.stages == (0, 3) and both.model.head.weight is both.model.embed.weight


def test_a_model_on_the_meta_device_stays_there() -> None:
    with torch.device("meta"):
        whole = Model(8)
    mine = of(2, whole)
    assert all(p.is_meta for p in mine.model.parameters())
    assert {name.split(".")[1] for name, _ in mine.named_parameters()} == {"4", "5"}


def test_cutting_leaves_training_and_random_states_alone() -> None:
    whole = model(p=0.5).train()
    whole.layers[1].eval()
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    mine = of(1, whole, layers=[1, 2, 3, 2])
    assert torch.equal(torch.rand(1), wanted)
    assert mine.model.training and not mine.model.layers[1].training and mine.model.layers[2].training


class Backwards(nn.Module):
    """What is registered first runs last, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(WIDTH, VOCAB), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.embed = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


def test_what_runs_before_the_blocks_is_seen_and_not_guessed() -> None:
    first, last = (dict(of(rank, Backwards()).named_parameters()) for rank in (0, 3))
    assert "embed.weight" in first and "embed.weight" not in last
    assert {
        "head.weight",
        "head.bias",
        "norm.weight",
        "norm.bias",
    } <= last.keys() and "norm.weight" not in first


def test_batches_in_parts() -> None:
    ids = torch.arange(40).view(5, 8)
    mask = torch.ones(1, 8)
    labels = ids.clone()
    labels[0] = -100
    parts = split({"input_ids": ids, "labels": labels, "mask": mask, "flag": True}, 3)
    assert [part.kwargs["input_ids"].shape[0] for part in parts] == [2, 2, 1]
    assert [part.first_row for part in parts] == [0, 2, 4] and [part.first_token for part in parts] == [
        0,
        16,
        32,
    ]
    assert all(part.kwargs["mask"] is mask and part.kwargs["flag"] for part in parts)
    assert [float(part.weight) for part in parts] == [7 / 28, 14 / 28, 7 / 28]
    pair = split((ids, labels), 2, own_loss=True)
    assert [float(part.weight) for part in pair] == [16 / 32, 16 / 32] and pair[0].args[0].shape == (3, 8)
    weighed = split((ids, None), 2, own_loss=True, weigh=lambda part: float(part[0].shape[0]) ** 2)
    assert [float(part.weight) for part in weighed] == [9 / 13, 4 / 13]
    assert float(split(ids, 5)[0].weight) == 0.2
    assert [part.given.shape[0] for part in split(ids, 3, unit=2)] == [2, 2, 1]
    assert [part.given.shape[0] for part in split(ids, 2, unit=2)] == [4, 1]
    assert [part.first_row for part in split(ids, 2, unit=2)] == [0, 4]
    assert [part.given.shape[0] for part in split(ids, 4, unit=2)] == [2, 1, 1, 1]  # too many for pairs
    assert [part.given.shape[0] for part in split(ids, 1, unit=8)] == [5]
    assert rows_of({"mask": mask, "labels": labels}) == 5 and rows_of(((), {"mask": mask, "input_ids": ids})) == 5
    with pytest.raises(SpecError, match="batch of 5 rows cannot be cut into 6"):
        split(ids, 6)
    with pytest.raises(SpecError, match="loss_fn"):
        split((ids, labels), 2)
    with pytest.raises(SpecError, match="without a tensor"):
        split({"flag": True}, 1)


def test_a_micro_batch_drops_what_its_rows_and_tokens_drop_in_the_whole_batch() -> None:
    work = split(torch.arange(32).view(4, 8), 2)[1]
    shards = TokenShards(length=16, index=torch.arange(8))
    with dropout_stream(1, 2, first_row=3, first_token=24, token_shards=shards), dropout_of(work):
        now = current_dropout_stream()
        assert (now.seed, now.step, now.first_row, now.first_token) == (1, 2, 5, 40)
        assert now.token_shards is shards
