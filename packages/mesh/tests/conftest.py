"""Lets tests import the helpers that lie beside them, as the ranks of the pool do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
