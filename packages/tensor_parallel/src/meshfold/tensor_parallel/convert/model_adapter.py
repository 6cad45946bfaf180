"""Inputs and outputs of a split model: batches are padded to what the mode can split, outputs are returned whole.

- A batch that the mode cannot split is padded with rows whose labels are ignored (−100); their rows of the output are cut off.
  A loss of the model's own is then a mean over the targets that are not ignored, or is refused.
- Logits stay split when the model computes its own loss, and are gathered when they are read
  (:mod:`~meshfold.tensor_parallel.convert.lazy_outputs`). Otherwise they are returned whole.
- The residual stream of a model without a head is returned whole.
- A model whose modules have ``attended_rows = True`` gets its positions whole. These modules, which compute masks and rotary tables
  from them, get the rows that attention has. Where single tokens are decoded, this holds for other models' rotary tables too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import bind_collect, take_block
from meshfold.mesh.model_io import IGNORE_INDEX, LABEL_NAMES, map_tensors
from meshfold.mesh.tracking import block, tracker, untracked
from meshfold.tensor_parallel.convert.forward_code import parameters_of
from meshfold.tensor_parallel.convert.lazy_outputs import LazyOutputs
from meshfold.tensor_parallel.convert.padded_loss import MeansOfTargets
from meshfold.tensor_parallel.convert.stream_layout import check_stream, joined_rows
from meshfold.tensor_parallel.layers.base import BatchShape, StreamAdapter
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.modes import Mode

_NEVER_LABELS = ("attention_mask", "mask", "position_ids", "token_type_ids", "past_key_values")
_NOT_ROWS = ("cache_position",)
_ADAPTER = "_meshfold_model_adapter"
_INSIDE = ("output_hidden_states", "output_attentions")


def row_multiple(model: nn.Module, sequence: int) -> int:
    """Return the number of rows that a batch of sequences of this length is padded to a multiple of; 1 for an unsplit model."""
    model = getattr(model, "_orig_mod", model)
    adapter: ModelAdapter | None = model.__dict__.get(_ADAPTER)
    return 1 if adapter is None else adapter.padded_rows(1, sequence)


def attention_part(model: nn.Module) -> tuple[int, int]:
    """Return which part of a batch's rows this rank has in attention, and how many parts there are; (0, 1) for all rows."""
    model = getattr(model, "_orig_mod", model)
    adapter: ModelAdapter | None = model.__dict__.get(_ADAPTER)
    return (0, 1) if adapter is None else adapter.attended_part


@contextmanager
def padding_for_decoding(model: nn.Module) -> Iterator[None]:
    """Context manager: pad batches as if each row had one token, so that attention keeps its rows when tokens come one at a
    time. It changes nothing for a model that is not split.
    """
    adapters = [adapter for m in model.modules() if isinstance(adapter := m.__dict__.get(_ADAPTER), ModelAdapter)]
    for adapter in adapters:
        adapter.for_decoding = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.for_decoding = False


class ModelAdapter(StreamAdapter):
    """Adapter of a whole model: hooks before and after its forward.

    Attributes:
        for_decoding: pad batches as if each row had one token.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        mode: Mode,
        outer: Mode,
        *,
        by_tokens: bool,
        heads: list[Linear],
        loss: bool,
        hidden: int,
        whole: str = "",
        ignored: int = IGNORE_INDEX,
        batch: BatchShape,
    ) -> None:
        """Args:
        model: in which it is put by :meth:`attach_to_model`; not kept, since the model has this object.
        outer: the mode outside of the blocks.
        by_tokens: the residual stream and the logits may be split within sequences.
        heads: the layers that make logits, whole ones if no loss is computed inside.
        loss: the model has a loss that takes split logits.
        hidden: size of a residual stream that comes out split; 0 if it does not come out.
        whole: name of a module that stays whole and takes masks or positions of all rows; empty without one.
        ignored: the label that the model's loss ignores.
        batch: the shape of the forward's batch, shared with the layers and set before each.
        """
        self.mesh, self.mode = mesh, mode
        self.heads, self.loss, self.hidden = heads, loss, hidden
        self._outputs = LazyOutputs(mesh, outer, heads)
        self._whole, self._ignored, self._batch = whole, ignored, batch
        self.for_decoding = False
        self._means: MeansOfTargets | None = None
        residual, logits = outer.layout("residual"), outer.layout("logits")
        blocks = [mesh.size(*mode.layout("residual")["m"]), mesh.size(*logits["m"])]
        # If the stream is split by tokens, batch times sequence must be divisible by the ranks, else the batch.
        self._by_tokens = math.lcm(*blocks) if by_tokens else 1
        self._by_rows = math.lcm(mesh.size(*mode.layout("hidden")["m"]), 1 if by_tokens else math.lcm(*blocks))
        self._columns = residual["h"]
        self._attended, self._stream = (
            tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in (mode.layout("hidden")["m"], residual["m"])
        )
        self._splits_stream = mesh.size(*residual.axes) > 1
        self._join_rows, self._join_columns = (
            bind_collect(mesh, 0, residual["m"]),
            bind_collect(mesh, -1, residual["h"]),
        )
        self._cuts_positions = any(
            map(_has_attended_rows, model.modules())
        )  # in modules of the model, which get them whole
        self._positions: Tensor | None = None  # of all rows, for these
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._parameters = tuple(name for name, p in parameters_of(model).items() if p.kind in kinds)

    def attach_to_model(self, model: nn.Module) -> None:
        """Register the hooks on the model, and register it with :func:`row_multiple`."""
        model.__dict__[_ADAPTER] = self
        self.attach(model, prepend=True)
        model.register_forward_hook(self._end, always_call=True)
        for module in model.modules():
            if _has_attended_rows(module):
                module.register_forward_pre_hook(self._attended_rows)
            if self._attended != self._stream and _is_rotary(module):
                module.register_forward_pre_hook(self._attended_positions, with_kwargs=True)

    def padded_rows(self, rows: int, sequence: int) -> int:
        """Return the smallest batch from ``rows`` up that can be split, for sequences of this length."""
        step = math.lcm(self._by_rows, self._by_tokens // math.gcd(self._by_tokens, sequence))
        return math.ceil(rows / step) * step

    @property
    def attended_part(self) -> tuple[int, int]:
        """The number of this rank's block of rows in attention, and the number of blocks."""
        return self.mesh.index(*self._attended), self.mesh.size(*self._attended)

    # -- in -----------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = self._names_of(args)
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        self._refuse(getattr(module, "config", None), given)
        if self.loss:
            self._batch.gather_logits = all(given.get(name) is None for name in LABEL_NAMES)
        self._measure(given)
        if self._batch.rows != self._batch.given:
            given = self._with_decoder_inputs(module, given)
            given = {name: self._pad(name, value) for name, value in given.items()}
        given = self._cut_rows(self._drop_mask(given))
        self._follow_rows(given)
        if self._batch.rows != self._batch.given:
            self._means = MeansOfTargets(self._batch.given, self._batch.rows, self._ignored)
            self._means.__enter__()
        return tuple(given.pop(name) for name in names), given

    def _names_of(self, args: tuple[Any, ...]) -> list[str]:
        """Return the names of the forward's positional arguments; integers in the shape of the ids are labels."""
        names = [*self._parameters, *map(str, range(len(self._parameters), len(args)))][: len(args)]
        if len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            alike = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype == torch.int64
            if alike and names[1] not in _NEVER_LABELS:
                names[1] = LABEL_NAMES[0]
        return names

    def _measure(self, given: Mapping[str, Any]) -> None:
        """Set the batch size, and the number of rows to pad to."""
        first = next((t for t in given.values() if isinstance(t, Tensor) and t.dim() > 1), None)
        batch = self._batch
        batch.rows = batch.given = batch.length = 0
        if first is None:
            return
        sequence = first.shape[1] if first.dim() == (3 if first.is_floating_point() else 2) else 1
        if self.for_decoding or given.get("use_cache"):
            sequence = 1  # the padded batch must fit steps of one token too
        batch.given, batch.length = first.shape[0], first.shape[1]
        batch.rows = self.padded_rows(batch.given, sequence)

    def _follow_rows(self, given: Mapping[str, Any]) -> None:
        """Tell the tracker which dims are the batch, if it may be a part of a larger one."""
        found = tracker()
        if found is not None and self._batch.rows and self.mesh.world_size > 1:
            found.rows.begin((x for x in tree_leaves(given) if isinstance(x, Tensor)), self._batch.rows)

    def _refuse(self, config: object, given: Mapping[str, Any]) -> None:
        for name in _INSIDE:
            if given.get(name) or (given.get(name) is None and getattr(config, name, False)):
                raise LayoutError(
                    f"{name}: outputs of blocks stay split over the mesh, so the model cannot return them; leave it out"
                )
        if given.get("inputs_embeds") is not None and self._splits_stream:
            raise LayoutError(
                f"inputs_embeds cannot be used in mode {self.mode.name!r}, where the embedding also splits the residual "
                f"stream: give input_ids"
            )

    def _drop_mask(self, given: dict[str, Any]) -> dict[str, Any]:
        """Drop a mask of ones: attention is faster without it."""
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all()):
            return {**given, "attention_mask": None}
        return given

    def _cut_rows(self, given: dict[str, Any]) -> dict[str, Any]:
        """Cut masks and positions that differ between rows to this rank's rows."""
        self._positions = None
        if not self._attended and not self._stream:
            return given
        made = dict(given)
        names = ("attention_mask", "decoder_attention_mask", "position_ids")
        for name in names[:2] if self._cuts_positions else names:
            value = given.get(name)
            if not isinstance(value, Tensor) or value.shape[0] != self._batch.rows:
                continue
            if name == "position_ids" and self.for_decoding and self._batch.length == 1 and not self._whole:
                self._positions = value  # one token a row has no mask, so only rotary tables follow attention's rows
                made[name] = take_block(value, self.mesh, 0, self._stream)
                continue
            if self._attended != self._stream or (self._whole and self._stream):
                who = f"{self._whole}, which stays whole," if self._whole else "attention"
                raise LayoutError(
                    f"an {name} that differs by row cannot be used in mode {self.mode.name!r}, where {who} has other "
                    f"rows than the stream: leave it out, pad on the right and give padding the label {IGNORE_INDEX} (causal "
                    f"attention never looks at it)"
                )
            made[name] = self._block_of_rows(value)
        return made

    def _attended_rows(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Cut positions of all rows to this rank's rows in attention."""
        if not args or not isinstance(args[0], Tensor) or args[0].shape[0] != self._batch.rows:
            return None
        return self._block_of_rows(args[0]), *args[1:]

    def _attended_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give rotary tables the positions of this rank's rows in attention."""
        if self._positions is None:
            return None
        mine = take_block(self._positions, self.mesh, 0, self._attended)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": mine}
        return (args[0], mine, *args[2:]), kwargs

    def _block_of_rows(self, value: Tensor) -> Tensor:
        """Return this rank's rows in attention."""
        found = tracker()
        with untracked():
            mine = take_block(value, self.mesh, 0, self._attended)
        if found is not None:
            found.mark(mine, (block(mine.shape[0], self._attended), *found.dims(value)[1:]))
            found.rows.keep(mine, value)
        return mine

    @staticmethod
    def _with_decoder_inputs(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with the decoder's tokens, if the model would make them from its labels: it may look for a token in
        each row (mBART moves the last one to the front), and rows of padding have ignored labels alone.
        """
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        made = [given.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds")]
        labels = given.get(LABEL_NAMES[0])
        if shift is None or not isinstance(labels, Tensor) or any(one is not None for one in made):
            return given
        return {**given, "decoder_input_ids": shift(labels)}

    def _pad(self, name: str, value: Any) -> Any:
        """Append copies of the last row, which are valid inputs; their labels are ignored."""
        if (
            not isinstance(value, Tensor)
            or value.dim() == 0
            or value.shape[0] != self._batch.given
            or name in _NOT_ROWS
        ):
            return value
        more = value[-1:].expand(self._batch.rows - self._batch.given, *value.shape[1:])
        return torch.cat([value, torch.full_like(more, self._ignored) if name in LABEL_NAMES else more])

    # -- out ----------------------------------------------------------------------------------------------------

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Stop looking at losses, also where the forward failed."""
        if self._means is not None:
            self._means.__exit__(None, None, None)
            self._means = None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.hidden:
            output = map_tensors(output, self._join)
        if self.loss and self.heads and not self._batch.gather_logits:
            return map_tensors(output, self._of_own_loss)
        if self._batch.given == self._batch.rows:
            return output
        return map_tensors(output, self._cut)

    def _of_own_loss(self, name: str, value: Tensor) -> Tensor:
        """Return an output next to a loss, gathered when it is read."""
        if not value.dim():
            return value
        found = self._outputs.gather_when_read(name, value, self._batch.given, self._batch.rows)
        return self._cut(name, value) if found is None else found

    def _join(self, name: str, value: Tensor) -> Tensor:
        if value.dim() < 2 or value.shape[-1] * self.mesh.size(*self._columns) != self.hidden:
            return value
        found = tracker()
        with untracked():
            joined = self._join_rows(self._join_columns(value))
        if found is not None:
            check_stream(found, self.mesh, value, self._stream, self._columns, "the end of the model")
            found.mark(joined, joined_rows(found, self.mesh, found.dims(value), tuple(joined.shape)))
        return joined

    def _cut(self, name: str, value: Tensor) -> Tensor:
        if value.dim() == 0 and self._means is not None and self._means.has(value):
            return value
        if value.dim() == 0:
            raise LayoutError(
                f"a batch of {self._batch.given} was padded to {self._batch.rows} rows for mode {self.mode.name!r}, but "
                f"the model computes a scalar of all of them: make the batch a multiple of {self.padded_rows(1, 1)}, or let "
                f"the model return its logits"
            )
        return value[: self._batch.given] if value.shape[0] == self._batch.rows else value


def _has_attended_rows(module: nn.Module) -> bool:
    return bool(getattr(module, "attended_rows", False))


def _is_rotary(module: nn.Module) -> bool:
    """Return True for a module of transformers' kind that makes rotary tables: (stream, position_ids) -> (cos, sin)."""
    return "Rotary" in type(module).__name__ and list(parameters_of(module))[:2] == ["x", "position_ids"]
