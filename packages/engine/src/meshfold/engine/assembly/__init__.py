"""Assembly of an engine: from its arguments to the parts of a train step."""

from __future__ import annotations

from meshfold.engine.assembly.assemble import Assembled, assemble, has_dropout

__all__ = ["Assembled", "assemble", "has_dropout"]
