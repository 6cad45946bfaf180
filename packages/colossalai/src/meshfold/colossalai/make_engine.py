"""``initialize``: Colossal-AI's way from a model, an optimizer and a config to an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshfold.colossalai.arguments import Translation
from meshfold.colossalai.context import gpc
from meshfold.colossalai.loaders import example_of, shard_loader
from meshfold.colossalai.optimizer_handover import follow, take_over
from meshfold.colossalai.schedulers import check, hand_over
from meshfold.colossalai.settings import Config, Settings, settings_of
from meshfold.colossalai.training import TrainingEngine
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.parameters import metadata_on


def initialize(
    model: nn.Module,
    optimizer: Any,
    criterion: Callable[..., Tensor] | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    *,
    config: object = None,
    ophooks: object = None,
    verbose: bool = True,
) -> tuple[TrainingEngine, Any, Any, Any]:
    """Return an engine for the objects of a Colossal-AI script.

    >>> engine, train_dataloader, test_dataloader, lr_scheduler = initialize(                 # doctest: +SKIP
    ...     model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler, config="config.py"
    ... )

    Args:
        model: whole, or built under ``LazyInitContext``; it is sharded in place.
        optimizer: made of ``model.parameters()``: its class, groups and settings are used, and the engine's own is
            ``engine.optimizer``. Or as for :class:`meshfold.engine.Engine`.
        criterion: of (output, target); None for models whose output has a ``.loss``.
        train_dataloader: of global batches; this rank's rows of it come back
            (:func:`meshfold.colossalai.loaders.shard_loader`). For a model whose input is not token ids, a pipeline reads from
            it what the model is called with; without one write ``example=batch`` into the config.
        test_dataloader: as ``train_dataloader``.
        lr_scheduler: of ``optimizer``; the same object is returned, for the engine's optimizer. The script steps it.
        config: a dict or the path of a Python file, with ``parallel``, ``zero``, ``fp16``, ``clip_grad_norm``,
            ``gradient_accumulation`` and what else Colossal-AI's configs have. None: what ``launch`` was given.
        ophooks: none; hooks of torch on the model's modules do as well.
        verbose: does nothing.

    Returns:
        Engine, train loader, test loader, schedule; None for arguments that are None.

    Raises:
        SpecError: for an invalid setting.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={model!r}: give an nn.Module; pass a function that builds one to Engine(...)")
    if ophooks:
        raise SpecError(f"ophooks={ophooks!r}: register hooks of torch on the model's modules, and leave it out")
    read = gpc.config if config is None else Config.of(config)
    engine, schedule = make_engine(
        model, optimizer, criterion, lr_scheduler, settings_of(read), "initialize", train_dataloader
    )
    gpc.show(read, engine.mesh)
    train, test = (
        shard_loader(train_dataloader, engine, "train"),
        shard_loader(test_dataloader, engine, "test"),
    )
    return engine, train, test, schedule


def make_engine(
    model: nn.Module,
    optimizer: Any,
    criterion: Callable[..., Tensor] | None,
    lr_scheduler: Any,
    settings: Settings,
    what: str,
    dataloader: Any = None,
) -> tuple[TrainingEngine, Any]:
    """Return the engine, and the schedule of its optimizer.

    Args:
        what: the name of the plugin with the settings, or ``initialize``.
        dataloader: the script's, in whose data an example for a pipeline may be found.
    """
    if optimizer is not None and lr_scheduler is not None:
        check(lr_scheduler, optimizer)
    asked = dict(settings.engine)
    if "pipeline" in settings.parallel and asked.get("example") is None:
        asked["example"] = example_of(dataloader, model, criterion)
    try:
        engine = TrainingEngine(
            model,
            criterion=criterion,
            parallel=settings.parallel,
            optimizer=take_over(optimizer, model),
            **asked,
        )
    except SpecError as error:
        if error.__cause__ is None:
            raise
        from meshfold.pipeline import ExampleError

        if not isinstance(error.__cause__, ExampleError):
            raise
        batch = "example=next(iter(dataloader))"
        write = f"{batch} in the config" if what == "initialize" else f"{what}(..., engine=dict({batch}))"
        raise SpecError(f"{error}. Here: {write}, of batches as the model is to be called with") from error
    if engine.spec.zero is not None and engine.spec.zero.stage == 3:
        tell_sizes(engine.model, engine.mesh)
    Translation(words=list(settings.words)).say(what, rank=engine.mesh.rank)
    schedule = engine.lr_scheduler = hand_over(lr_scheduler, engine.optimizer)
    given = "engine.step()" if what == "initialize" else "that of the optimizer that boost(...) gave back"
    follow(optimizer, engine, given)
    return engine, schedule


def tell_sizes(model: nn.Module, mesh: Mesh) -> None:
    """Make ``parameter.numel()`` return the full size while a parameter is released, since scripts add sizes up.

    Args:
        model: under ZeRO stage 3.
        mesh: of the model; over tensor axes it is the shard's size.
    """
    for parameter in model.parameters():
        shape = metadata_on(parameter, mesh).placement.local_shape(mesh)
        size = 1
        for length in shape:
            size *= length
        parameter.numel = partial(int, size)  # type: ignore[method-assign]
