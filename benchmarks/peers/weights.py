"""The weights that every peer gets: the default model's folder, and a short name for its contents."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from benchmarks.common.workload import MODEL
from engine.checkpoint.store import resolve_model


@functools.cache
def model_folder() -> Path:
    return resolve_model(MODEL)


@functools.cache
def weights_id() -> str:
    """Changes with the contents, so that what was converted from others is not taken for these."""
    manifest = model_folder() / "manifest.json"
    return hashlib.sha256(manifest.read_bytes()).hexdigest()[:8]
