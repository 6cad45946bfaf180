"""Import paths of version 0.1: each gives the module at its current path, with a DeprecationWarning."""

from __future__ import annotations

from meshfold.mesh import redirect_imports

MOVED = {
    "meshfold.zero_gemini.disk": "meshfold.zero_gemini.nvme",
    "meshfold.zero_gemini.profiler.moments": "meshfold.zero_gemini.profiler.trace",
    "meshfold.zero_gemini.trace": "meshfold.zero_gemini.profiler",
    "meshfold.zero_gemini.watched_rates": "meshfold.zero_gemini.machine_rates.observed",
}
"""Old path of a module or folder: its path today. Modules in a moved folder have moved with it."""


def install() -> None:
    """Let imports find the old paths of meshfold.zero_gemini."""
    redirect_imports(MOVED)
