"""The scheduler's compiled arithmetic: what is kept is never that of another layout, and nothing compiles late."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest
from numba.core.dispatcher import Dispatcher

from cluster.scheduler import digest_table
from cluster.scheduler.placement import moments
from cluster.scheduler.placement import tpot_forecast as neighbours
from cluster.scheduler.placement import worker_scan as coarse

MODULES = [coarse, digest_table, moments, neighbours]
NAMES_IT = {"Row", "Slot", "RESIDUAL_STEP", "PROMPTS_OVER_S"}  # see `cluster.scheduler.placement.compiled`


def _dispatchers(module: ModuleType) -> list[Dispatcher]:
    return [value for value in vars(module).values() if isinstance(value, Dispatcher)]


def _imported_from_legato(module: ModuleType) -> set[str]:
    assert module.__file__ is not None
    imports = [
        node for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    packages = ("cluster", "engine", "kv_transfer", "kernels")
    return {alias.name for node in imports if str(node.module).startswith(packages) for alias in node.names}


@pytest.mark.parametrize("module", MODULES)
def test_compiled_code_takes_from_other_files_only_what_names_it(module: ModuleType) -> None:
    used = {name for dispatcher in _dispatchers(module) for name in dispatcher.py_func.__code__.co_names}
    assert used
    assert used & _imported_from_legato(module) <= NAMES_IT


ENTRIES = [
    *(coarse.eligible, coarse.forecast_prompts, coarse.idle_shares, coarse.look, coarse.queue_shares),
    *(coarse.shortlist_kind, digest_table.doubled, digest_table.numbers_until_free, digest_table.put_number),
    *(digest_table.put_sole, moments.join_times, moments.start_times, neighbours.chances),
    neighbours.forecast_workers,
]


@pytest.mark.parametrize("function", ENTRIES)
def test_what_python_calls_was_compiled_at_import_and_takes_no_other_types(function: Dispatcher) -> None:
    assert len(function.nopython_signatures) == 1
    with pytest.raises(TypeError, match="No matching definition"):
        function(*["of another type"] * len(function.nopython_signatures[0].args))
