"""Batch-invariant attention is to round alike on prefill and decode: what the compiler tells without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.interpreted import uninterpreted_environment


def test_all_kernels_lay_their_products_out_alike() -> None:
    """Same instructions over the same shapes, spread over the same threads: then sums are taken in the same order."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.interpreted.attention_layouts_child"],
        env=uninterpreted_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    products = json.loads(child.stdout.splitlines()[-1])
    assert products["prefill"] == products["decode"] == products["cascade"]
    assert len(products["prefill"]) == 2, "scores, and weighted values; masked and not"
    assert all("instrShape = [16, 8]" in product for product in products["prefill"])
