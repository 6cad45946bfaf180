"""Role of a backward within its optimizer step."""

from __future__ import annotations

from typing import Literal

BackwardRole = Literal["more", "apart", "last", "final"]
"""Role of a backward within its optimizer step.

``"more"``: others follow before the step; what is reduced is reduced as the stage does it.
``"apart"``: others follow, and nothing is sent to other ranks meanwhile.
``"last"``: the last as far as one knows: gradients are complete after it.
``"final"``: the last for certain, and nobody looks at the gradients before the step: chunks are stepped in it.
"""
