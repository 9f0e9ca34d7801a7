"""The composition root: configuration, gateway, global scheduler, Ray Serve application, command line."""

from __future__ import annotations

import functools


@functools.cache
def build_info() -> dict[str, str | int]:
    """Which Legato this is, for people: its `version`, the `protocol` that its processes must have in common, and where
    that can be told the `commit` of the checkout that it runs from or was installed from. May ask git, and wait."""
    import contextlib
    import importlib.metadata
    import json
    import subprocess
    from pathlib import Path

    from kv_transfer.messages import PROTOCOL_VERSION

    version, commit, root = "unknown", "", Path(__file__).parents[1]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a checkout that is not installed
        installed = importlib.metadata.distribution("legato")
        version = installed.version
        commit = json.loads(installed.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id", "")
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, or somebody else's repository
            commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    found: dict[str, str | int] = {"version": version, "protocol": PROTOCOL_VERSION}
    return found | ({"commit": commit[:12]} if commit else {})
