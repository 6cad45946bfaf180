"""Everything Meshfold raises on purpose, and the "Did you mean ...?" that goes into the messages.

A message names the mistake, quotes the value as written, and says what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshfoldError(Exception):
    """The root of all errors that Meshfold raises on purpose: ``except MeshfoldError`` catches every one."""


class SpecError(MeshfoldError, ValueError):
    """An invalid parallel spec: an unknown key, a wrong type, an impossible size, ..."""


class LayoutError(MeshfoldError, ValueError):
    """Layouts that do not fit each other, a tensor or the mesh."""


class TokenError(MeshfoldError, IndexError):
    """A token id or a label that is not in the vocabulary."""


class LaunchError(MeshfoldError, RuntimeError):
    """Processes that could not be started, did not find each other, or died."""


class CollectiveError(MeshfoldError, RuntimeError):
    """An invalid argument of a collective, or a collective that failed while it ran."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the known name most like ``word`` as a question to append to a message, or ``""`` if none is close.

    >>> did_you_mean("pipelin", ["data", "pipeline"])
    " Did you mean 'pipeline'?"
    >>> did_you_mean("zzz", ["data", "pipeline"])
    ''
    """
    names = list(known)
    folded = {name.casefold(): name for name in names}
    found = difflib.get_close_matches(word.casefold(), list(folded), n=1, cutoff=0.6)
    return f" Did you mean {folded[found[0]]!r}?" if found else ""
