"""Contexts that build a model without allocating it, with Colossal-AI's names and arguments."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from meshfold.colossalai.arguments import Argument, Table, bind, translate
from meshfold.mesh import SpecError
from meshfold.zero_gemini import ShardedInit

_DTYPE = Argument(word="precision=... of the engine says the dtype")

LAZY: Table = {
    "tensor_cls": Argument(word="tensors are on the meta device of torch"),
    "default_device": Argument(word="the engine knows the device of this rank"),
}

ZERO: Table = {  # the first three are in every script; they ask for what happens anyway
    "target_device": Argument(),
    "shard_strategy": Argument(),
    "shard_param": Argument(),
    "default_dtype": _DTYPE,
    "model_numel_tensor": Argument(instead="count with sum(p.numel() for p in model.parameters()), and leave it out"),
}

_SPLIT = Argument(word="parallel=dict(tensor=...) says how parameters are split")

COLO: Table = {"device": Argument(), "dtype": _DTYPE, "default_pg": _SPLIT, "default_dist_spec": _SPLIT}


class LazyInitContext(ShardedInit):
    """Builds a model without allocating it; ``initialize``, ``boost`` and ``Engine`` then make each rank's own part.

    >>> with LazyInitContext():              # doctest: +SKIP
    ...     model = GPT(config)

    An optimizer may be made of such a model's parameters. A model made inside by ``from_pretrained`` of transformers
    has its weights, whole in the memory of the host.
    """

    _table: ClassVar[Table] = LAZY

    def __init__(self, *args: Any, seed: int = 0, **given: Any) -> None:
        """Args:
            args: as in Colossal-AI.
            seed: of the initial values.
            given: as in Colossal-AI, by name.

        Raises:
            SpecError: for an unknown name.
        """
        name = type(self).__name__
        translate(name, bind(name, self._table, args, given), self._table).say(name)
        super().__init__(seed=seed)

    @staticmethod
    def materialize(model: nn.Module, verbose: bool = False) -> nn.Module:
        """Refuse to materialize.

        Raises:
            SpecError: always, since it would make the whole model on every rank.
        """
        raise SpecError(
            "LazyInitContext.materialize(model) would make the whole model on every rank: give the model as it is to "
            "initialize(...), booster.boost(...) or Engine(...), which make this rank's part"
        )


class ZeroInitContext(LazyInitContext):
    """Older name of the context: ``ZeroInitContext(target_device=..., shard_strategy=..., shard_param=True)``."""

    _table: ClassVar[Table] = ZERO


class ColoInitContext(LazyInitContext):
    """Second name of the context: ``ColoInitContext(device=...)``."""

    _table: ClassVar[Table] = COLO


class TensorShardStrategy:
    """Placeholder for ``zero=dict(model_config=...)``: the layout of chunks is searched for."""


class BucketTensorShardStrategy(TensorShardStrategy):
    """Placeholder without effect."""
