"""`make test-clients`: serves a cluster, and runs the tests of this folder against it in the clients' environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.clients.served import MODEL
from tests.ray.served_cluster import served_cluster
from tests.support.thinker import thinker

FOLDER: Final = Path(__file__).parent
CONFIG: Final[dict[str, Any]] = {
    "kv": {
        "prefill": {"memory": "128MiB", "host_memory": 0},
        "decode": {"memory": "128MiB", "host_memory": 0},
    },
    "prefill": {"threads": 1},
    "decode": {"threads": 1},
}


def main() -> None:
    python, *asked = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="legato-clients-") as name:
        folder = Path(name)
        config = {
            **CONFIG,
            "model": {"ref": str(thinker(folder / MODEL)), "reasoning_format": "think"},
            "gateway": {"storage": str(folder / "storage")},
        }
        with served_cluster(config, folder) as cluster:
            cluster.wait_for_workers(prefill=1, decode=1)
            # The fixtures of tests/conftest.py are for Legato's own environment.
            command = [python, "-m", "pytest", f"--confcutdir={FOLDER}", *(asked or [str(FOLDER)])]
            code = subprocess.run(command, env={**os.environ, "LEGATO_URL": cluster.url}).returncode
            cluster.wait_idle()
    sys.exit(code)


if __name__ == "__main__":
    main()
