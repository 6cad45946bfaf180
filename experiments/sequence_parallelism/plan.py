"""The plan: memory of table 4's stages from closed forms, the largest that fits a card, and a clock for tokens per second.

What one layer keeps for backward, in half precision, a byte for each element of a dropout mask (arXiv 2205.05198, and
``counting.py`` counts the same): with N ranks, BL tokens, hidden size H, Z heads and 5 bytes for a score (its softmax,
its mask and what is left of it),

    tensor parallelism      BLH (10 + 24 / N) + 5 BZL² / N
    ring self-attention     BLH 34 / N        + 5 BZL² / N
    our ring                BLH 34 / N

What else a rank holds is two numbers that were not published, taken from two rows of the table itself: bytes that do
not grow with the batch (``fixed``, split by tensor parallelism and not by sequence parallelism) and bytes a token
beyond the layers (``extra``, the other way round).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.report import read_csv
from experiments.sequence_parallelism.bert import BASE, LARGE, Shape
from experiments.sequence_parallelism.counting import RING, RING_SELF, STAGE_LAYERS, TENSOR

FOLDER = Path(__file__).parent
MB = 2**20
CARD = 16 * 1024 * MB  # a P100's memory
CONTEXT = 512 * MB  # of it for CUDA's context and the libraries, which torch does not count
SCORE = 5  # bytes
WORD = 6  # bytes a token and word of the head: logits in half precision and their softmax in float32
HALF = 2  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What table 4 says besides its closed form.

    Attributes:
        fixed: bytes of a stage that do not grow with the batch.
        extra: bytes a token and hidden element of a stage beyond its layers.
    """

    fixed: float
    extra: float

    @property
    def a_parameter(self) -> float:
        """``fixed`` for each parameter of a first stage: three layers and the embeddings of BERT-Large."""
        return self.fixed / (STAGE_LAYERS * LARGE.layer_parameters + LARGE.embedding_parameters)

    @property
    def a_layer(self) -> float:
        """``extra`` for each layer."""
        return self.extra / STAGE_LAYERS


def published() -> list[dict[str, Any]]:
    """Table 4; None where it says OOM."""

    def number(text: str) -> float | None:
        return None if text == "OOM" else float(text)

    return [
        {name: int(text) if name in ("N", "batch", "length") else number(text) for name, text in row.items()}
        for row in read_csv(FOLDER / "published_table4.csv")
    ]


def layer_bytes(scheme: str, ranks: int, batch: int, length: int, shape: Shape) -> float:
    """What a layer keeps, as above."""
    tokens = batch * length * shape.hidden
    scores = 0 if scheme == RING else SCORE * batch * shape.heads * length**2 / ranks
    return tokens * (10 + 24 / ranks if scheme == TENSOR else 34 / ranks) + scores


def fit(rows: Sequence[Mapping[str, Any]]) -> Fit:
    """From the two rows of sequence parallelism with one rank."""
    (first, second) = (row for row in rows if row["N"] == 1)
    tokens = [row["batch"] * row["length"] * LARGE.hidden for row in (first, second)]
    rest = [
        row["sp_mb"] * MB - STAGE_LAYERS * layer_bytes(RING_SELF, 1, row["batch"], row["length"], LARGE)
        for row in (first, second)
    ]
    extra = (rest[0] - rest[1]) / (tokens[0] - tokens[1])
    return Fit(fixed=rest[0] - extra * tokens[0], extra=extra)


def stage_bytes(scheme: str, ranks: int, batch: int, length: int, found: Fit) -> float:
    """Bytes of a rank of table 4."""
    kept = STAGE_LAYERS * layer_bytes(scheme, ranks, batch, length, LARGE)
    extra = found.extra * batch * length * LARGE.hidden
    if scheme == TENSOR:
        return found.fixed / ranks + extra + kept
    return found.fixed + extra / ranks + kept


def model_bytes(scheme: str, ranks: int, batch: int, length: int, shape: Shape, found: Fit) -> float:
    """Bytes of a rank that has all layers and the head: figures 3 and 5, without a pipeline."""
    tokens = batch * length
    parameters = shape.layers * shape.layer_parameters + shape.embedding_parameters
    kept = shape.layers * layer_bytes(scheme, ranks, batch, length, shape)
    extra = found.a_layer * shape.layers * tokens * shape.hidden
    head = (
        WORD * tokens * shape.vocabulary / ranks
    )  # tensor parallelism splits the words, sequence parallelism the tokens
    if scheme == TENSOR:
        return found.a_parameter * parameters / ranks + extra + kept + head
    return found.a_parameter * parameters + extra / ranks + kept + head


def most(fits: Callable[[int], bool]) -> int:
    """The largest number from 0 up that fits, where all below it do."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(
    scheme: str, ranks: int, shape: Shape, found: Fit, *, batch: int | None = None, length: int | None = None
) -> int:
    """The largest batch for a length, or the longest sequence for a batch, that fits the card."""

    def fits(size: int) -> bool:
        rows, tokens = (size if batch is None else batch), (size if length is None else length)
        return model_bytes(scheme, ranks, rows, tokens, shape, found) <= CARD - CONTEXT

    return most(fits)


def sizes(found: Fit) -> list[dict[str, Any]]:
    """The largest batch at 512 tokens and the longest sequence at batch 64, by scheme and ranks."""
    rows = []
    for shape in (BASE, LARGE):
        for scheme in (TENSOR, RING_SELF, RING):
            for ranks in (1, 2, 4, 8, 12, 16, 32, 64):
                if scheme == TENSOR and shape.heads % ranks:
                    continue  # a head is on one rank
                rows.append(
                    {
                        "model": shape.name,
                        "scheme": scheme,
                        "N": ranks,
                        "batch": largest(scheme, ranks, shape, found, length=512),
                        "length": largest(scheme, ranks, shape, found, batch=64),
                    }
                )
    return rows


def sent_bytes(row: Mapping[str, Any]) -> float:
    """Bytes that a rank of table 4 sends in its layers, forward and backward; the same for both schemes, in half precision."""
    block = row["batch"] * row["length"] / row["N"] * LARGE.hidden
    return float(STAGE_LAYERS * 8 * (row["N"] - 1) * block * HALF)


def computed(row: Mapping[str, Any], first: Mapping[str, Any], column: str) -> float:
    """Seconds a step computes: those of one rank, which sends nothing, grown like the operations a token needs."""
    tokens = first["batch"] * first["length"]
    grown = (1 + row["length"] / (6 * LARGE.hidden)) / (1 + first["length"] / (6 * LARGE.hidden))
    return float(tokens / first[column] * grown)


def seconds(row: Mapping[str, Any], column: str) -> float:
    """Seconds of a step as published."""
    return float(row["batch"] * row["length"] / row[column])


def clock(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens per second if a step is computing and then sending, with one bandwidth for all, fitted to one row."""
    firsts = {row["batch"] * row["length"]: row for row in rows if row["N"] == 1}

    def first_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
        return firsts[row["batch"] * row["length"] // row["N"]]

    fitted = max((row for row in rows if row["length"] == 512), key=lambda row: row["N"])
    spent = seconds(fitted, "sp_tokens_s") - computed(fitted, first_of(fitted), "sp_tokens_s")
    bandwidth = sent_bytes(fitted) / spent
    found = [
        {
            **{name: row[name] for name in ("N", "batch", "length")},
            **{
                column: row["batch"]
                * row["length"]
                / (computed(row, first_of(row), column) + sent_bytes(row) / bandwidth)
                for column in ("tp_tokens_s", "sp_tokens_s")
            },
        }
        for row in rows
    ]
    return {"bandwidth": bandwidth, "fitted": [fitted["N"], fitted["batch"], fitted["length"]], "rows": found}


def memory(rows: Sequence[Mapping[str, Any]], found: Fit) -> list[dict[str, Any]]:
    """Table 4 by the plan, in MB; our ring beside."""
    columns = {"tp_mb": TENSOR, "sp_mb": RING_SELF, "ring_mb": RING}
    return [
        {
            **{name: row[name] for name in ("N", "batch", "length")},
            **{
                column: stage_bytes(scheme, row["N"], row["batch"], row["length"], found) / MB
                for column, scheme in columns.items()
            },
        }
        for row in rows
    ]
