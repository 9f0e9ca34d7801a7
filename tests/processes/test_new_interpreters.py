"""What a new interpreter loads, computes and prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster.deployment.ray_environment import RAY_ENVIRONMENT, SERVE_ENVIRONMENT
from engine.kv.prefix import block_hashes
from kv_transfer.messages import KINDS

ROOT = Path(__file__).parent.parent.parent


def printed_by(program: str, **environment: str) -> str:
    """What a Python program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_loading_a_tokenizer_loads_no_model_code(smollm2_folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from engine.text.tokenizer import Tokenizer; import engine.checkpoint.store\n"
        f"Tokenizer(Path({str(smollm2_folder)!r}))\n"
        "print([name for name in sys.modules if '.modeling_' in name and name.startswith('transformers.models.')\n"
        "       and not name.endswith('.modeling_auto')])"  # the table of names behind the Auto classes
    )
    assert printed_by(program) == "[]"


def test_help_is_there_at_once() -> None:
    """Whatever the commands load when they run. In seconds of the processor, which no other process makes longer."""
    program = (
        "import sys, time\n"
        "from cluster.__main__ import main\n"
        "sys.argv = ['legato', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "loaded = {'torch', 'ray', 'numpy', 'pydantic', 'yaml', 'transformers'} & set(sys.modules)\n"
        "print(loaded, time.process_time() < 0.3)"
    )
    assert printed_by(program).splitlines()[-1] == "set() True"


# One after the other in one interpreter. The first one starts Ray, beside which torch is loaded.
MODULES = (
    "cluster.deployment.local_cluster",
    "engine.checkpoint.store",
    "cluster.config.build_scheduler",
    "cluster.simulation.plan.command",
    "cluster.simulation.whatif",
    "cluster.app",
)


def test_who_computes_nothing_loads_no_torch() -> None:
    """Whoever starts a cluster, the application, gateways, the scheduler, who simulates and who replays a log: torch
    takes 1.5 s of a core, in each of them."""
    program = (
        "import importlib, sys\n"
        f"for module in {MODULES}:\n"
        "    importlib.import_module(module)\n"
        "    print(module, *{'torch', 'transformers', 'huggingface_hub', 'ray'} & set(sys.modules))"
    )
    *others, application = MODULES
    assert printed_by(program).splitlines() == [*others, f"{application} ray"]


def test_another_process_computes_the_same() -> None:
    code = "from engine.kv.prefix import block_hashes; print(b''.join(block_hashes(list(range(9)), 4, 'ü')).hex())"
    for seed in ("1", "2"):
        assert printed_by(code, PYTHONHASHSEED=seed) == b"".join(block_hashes(list(range(9)), 4, "ü")).hex()


def test_the_command_prints_what_a_shell_takes() -> None:
    """Values with line breaks, too."""
    script = (
        'eval "$("$0" -m cluster environment)" && exec "$0" -c "import json, os; print(json.dumps({**os.environ}))"'
    )
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    printed = subprocess.run(
        ["sh", "-c", script, sys.executable], env=outside, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert json.loads(printed).items() >= (RAY_ENVIRONMENT | SERVE_ENVIRONMENT | {"RAY_AUTH_MODE": "token"}).items()


def test_whoever_imports_the_messages_can_decode_all_of_them() -> None:
    assert set(printed_by("from kv_transfer.messages import KINDS; print(*KINDS)").split()) == set(KINDS)
