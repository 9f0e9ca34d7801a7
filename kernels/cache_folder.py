"""Where Legato keeps what is made once for a machine: converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$LEGATO_CACHE, or ~/.cache/legato."""
    configured = os.environ.get("LEGATO_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "legato"
