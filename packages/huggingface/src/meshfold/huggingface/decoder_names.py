"""Correspondence of our own GPT and Llama with Hugging Face's, tensor by tensor, where the architectures are equal.

The correspondence is data: a row of a table per tensor. Ours have queries, keys and values in one projection, and gate and up of
an MLP; GPT-2's linear layers there are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.tensors import TensorInfo
from meshfold.huggingface.decoder_configs import theirs_of
from meshfold.models import DecoderConfig, GPTConfig, MoELlamaConfig

_HEAD = "head.weight"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that makes some tensors from others.

    Attributes:
        sources: names of the input tensors.
        results: names of the outputs, in order.
        make: computes them.
    """

    sources: tuple[str, ...]
    results: dict[str, TensorInfo]
    make: Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tensor of ours and its counterparts there: itself, or parts of its first dim; transposed or not."""

    ours: str
    theirs: tuple[str, ...]
    parts: tuple[int, ...] = ()
    transposed: bool = False

    def leave(self, given: Mapping[str, Tensor]) -> Step:
        """Convert our tensors to Hugging Face's."""
        whole = given[self.ours]
        sizes = self.parts or (whole.shape[0],)
        if sum(sizes) != whole.shape[0]:
            raise CheckpointError(
                f"{self.ours!r} has {whole.shape[0]} rows and the model's configuration says {sum(sizes)}: it belongs to "
                "another model"
            )
        results = {}
        for name, size in zip(self.theirs, sizes, strict=True):
            shape = (size, *whole.shape[1:])
            results[name] = TensorInfo(dtype=whole.dtype, shape=shape[::-1] if self.transposed else shape)

        def make(read: Sequence[Tensor]) -> Sequence[Tensor]:
            parts = read[0].split(list(sizes))
            return [part.T if self.transposed else part for part in parts]

        return Step(sources=(self.ours,), results=results, make=make)

    def enter(self, given: Mapping[str, Tensor]) -> Step:
        """Convert Hugging Face's tensors to ours."""
        shapes = [tuple(given[name].shape)[:: -1 if self.transposed else 1] for name in self.theirs]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])

        def make(read: Sequence[Tensor]) -> Sequence[Tensor]:
            turned = [part.T if self.transposed else part for part in read]
            return [turned[0] if len(turned) == 1 else torch.cat(turned)]

        described = TensorInfo(dtype=given[self.theirs[0]].dtype, shape=shape)
        return Step(sources=self.theirs, results={self.ours: described}, make=make)


@dataclass(frozen=True, kw_only=True)
class ExpertRow:
    """A stacked tensor of ours, ``[e, ..]``, and those that its experts are over there, one or several each, in order."""

    ours: str
    theirs: tuple[str, ...]
    experts: int

    def leave(self, given: Mapping[str, Tensor]) -> Step:
        """Convert our tensor to Hugging Face's."""
        whole = given[self.ours]
        each = len(self.theirs) // self.experts
        if whole.shape[0] != self.experts or whole.shape[1] % each:
            raise CheckpointError(
                f"{self.ours!r} has {whole.shape[0]} experts and the model's configuration says {self.experts}: it is of another "
                "model"
            )
        described = TensorInfo(dtype=whole.dtype, shape=(whole.shape[1] // each, whole.shape[2]))

        def make(read: Sequence[Tensor]) -> Sequence[Tensor]:
            return [part for matrix in read[0] for part in matrix.chunk(each)]

        return Step(sources=(self.ours,), results=dict.fromkeys(self.theirs, described), make=make)

    def enter(self, given: Mapping[str, Tensor]) -> Step:
        """Convert Hugging Face's tensors to ours."""
        rows, columns = given[self.theirs[0]].shape
        each = len(self.theirs) // self.experts

        def make(read: Sequence[Tensor]) -> Sequence[Tensor]:
            return [torch.cat(list(read)).view(self.experts, each * rows, columns)]

        described = TensorInfo(dtype=given[self.theirs[0]].dtype, shape=(self.experts, each * rows, columns))
        return Step(sources=self.theirs, results={self.ours: described}, make=make)


AnyRow: TypeAlias = Row | ExpertRow


def rows_of(config: DecoderConfig) -> list[AnyRow]:
    """Return the table of a model, the head last."""
    body = _gpt(config) if isinstance(config, GPTConfig) else _llama(config)
    return [*body, Row(ours=_HEAD, theirs=("lm_head.weight",))]


def _gpt(config: DecoderConfig) -> Iterable[AnyRow]:
    yield Row(ours="embed.weight", theirs=("transformer.wte.weight",))
    yield Row(ours="positions.weight", theirs=("transformer.wpe.weight",))
    linear = {
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i in range(config.layers):
        for ours, theirs in {"norm1": "ln_1", "norm2": "ln_2", **linear}.items():
            for kind in ("weight", "bias"):
                yield Row(
                    ours=f"blocks.{i}.{ours}.{kind}",
                    theirs=(f"transformer.h.{i}.{theirs}.{kind}",),
                    transposed=ours in linear and kind == "weight",
                )
    for kind in ("weight", "bias"):
        yield Row(ours=f"norm.{kind}", theirs=(f"transformer.ln_f.{kind}",))


def _llama(config: DecoderConfig) -> Iterable[AnyRow]:
    yield Row(ours="embed.weight", theirs=("model.embed_tokens.weight",))
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        qkv = tuple(f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv")
        both = tuple(f"{theirs}.mlp.{part}_proj.weight" for part in ("gate", "up"))
        yield Row(ours=f"{ours}.norm1.weight", theirs=(f"{theirs}.input_layernorm.weight",))
        yield Row(ours=f"{ours}.attn.qkv.weight", theirs=qkv, parts=config.qkv_parts)
        yield Row(ours=f"{ours}.attn.out.weight", theirs=(f"{theirs}.self_attn.o_proj.weight",))
        yield Row(ours=f"{ours}.norm2.weight", theirs=(f"{theirs}.post_attention_layernorm.weight",))
        if isinstance(config, MoELlamaConfig):
            yield from _mixture(config, f"{ours}.mlp", f"{theirs}.block_sparse_moe")
            continue
        yield Row(ours=f"{ours}.mlp.gate_up.weight", theirs=both, parts=(config.inner, config.inner))
        yield Row(ours=f"{ours}.mlp.down.weight", theirs=(f"{theirs}.mlp.down_proj.weight",))
    yield Row(ours="norm.weight", theirs=("model.norm.weight",))


def _mixture(config: MoELlamaConfig, ours: str, theirs: str) -> Iterable[AnyRow]:
    """Yield the rows of a mixture: the names of Mixtral's files, which have experts one by one."""
    experts = [f"{theirs}.experts.{number}" for number in range(config.experts)]
    gate_up = tuple(f"{expert}.{part}.weight" for expert in experts for part in ("w1", "w3"))
    down = tuple(f"{expert}.w2.weight" for expert in experts)
    yield Row(ours=f"{ours}.router.weight", theirs=(f"{theirs}.gate.weight",))
    yield ExpertRow(ours=f"{ours}.experts.gate_up", theirs=gate_up, experts=config.experts)
    yield ExpertRow(ours=f"{ours}.experts.down", theirs=down, experts=config.experts)


def unchanged(given: Mapping[str, Tensor]) -> list[Step]:
    """Return each tensor unchanged, under its name."""
    return [
        Step(
            sources=(name,),
            results={name: TensorInfo(dtype=value.dtype, shape=tuple(value.shape))},
            make=lambda read: read,
        )
        for name, value in given.items()
    ]


def leave(given: Mapping[str, Tensor], config: DecoderConfig) -> list[Step]:
    """Return the steps from a state of ours to one of Hugging Face's; a tied head is left out, as transformers does.

    Raises:
        CheckpointError: where the state belongs to another model, or transformers has no such model.
    """
    theirs_of(config)
    rows = [row for row in rows_of(config) if row.ours != _HEAD]
    names = set(given)
    if config.tie:  # tied: one name is enough
        rows[0] = Row(ours="embed.weight" if "embed.weight" in names else _HEAD, theirs=rows[0].theirs)
        names.discard(_HEAD)
    else:
        rows.append(rows_of(config)[-1])
    _check([row.ours for row in rows], given, names | {rows[0].ours})
    return [row.leave(given) for row in rows]


def enter(given: Mapping[str, Tensor], config: DecoderConfig) -> list[Step]:
    """Return the steps from a state of Hugging Face's to one of ours; either of a tied pair suffices."""
    given = {_full(name, config): value for name, value in given.items() if not _is_table(name)}
    rows = [row for row in rows_of(config) if row.ours != _HEAD]
    names = set(given)
    if config.tie:
        head = rows_of(config)[-1].theirs
        if rows[0].theirs[0] not in names:
            rows[0] = Row(ours=rows[0].ours, theirs=head)
        names -= set(head)
    else:
        rows.append(rows_of(config)[-1])
    _check([name for row in rows for name in row.theirs], given, names | set(rows[0].theirs))
    return [row.enter(given) for row in rows]


def full_names(given: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, str]:
    """Map names with the base model's prefix, which old GPT-2 files leave out, to the files' names."""
    return {_full(name, config): name for name in given}


def _full(name: str, config: DecoderConfig) -> str:
    prefix = "transformer." if isinstance(config, GPTConfig) else "model."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _is_table(name: str) -> bool:
    """Return True for a tensor of old files that is computed today: causal masks, rotary frequencies."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def _check(wanted: Iterable[str], given: Mapping[str, Tensor], names: set[str]) -> None:
    wanted = list(wanted)
    missing = [name for name in wanted if name not in given]
    unknown = sorted(names - set(wanted))
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r} too"
        raise CheckpointError(f"the model's configuration does not match its tensors: the state {what}")
