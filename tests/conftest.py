"""Fixtures that several test files share, and how Hypothesis chooses its examples.

Imports no torch: files that need none are collected and run without waiting for it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

    from tests.support.small_models import SmallModel

# What fails depends on the code alone: the same examples in every run, and no limit on the time that one takes.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# Other examples in each run: `make test-long`.
settings.register_profile("random", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")

RAY_TESTS = "tests/ray/"
# Files of a few seconds at most: at the end they leave no process alone with a long one.
SHORT_TESTS = ("tests/kernels/", "tests/kv_transfer/", "tests/prefill_workers/", "tests/tree/")
# What needs programs or packages that Legato's own environment has not.
ASKED_FOR = tuple(Path(__file__).with_name(name) for name in ("clients", "operators"))
ON_GPU = Path("/dev/nvidiactl").exists()
_MOST_WORKERS = 4  # more of them make nothing quicker: the longest files take a quarter of the whole
_WORKER_BYTES = 4 * 2**30  # one file loads two real models in float32

# Triton asks for it when a kernel is decorated, so it is set before the module of any test imports one. Whether torch
# can use the GPU is asked by `tests.support.interpreted`, which every test of such kernels imports.
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
# Read with torch, by this process alone: of several threads that compute together, who waits for the others sleeps. By
# default it looks for 3 ms whether they have come, and where other tests have the cores that is most of what it does.
_SPINS = "GOMP_SPINCOUNT"
_SLEEPS = os.environ.setdefault(_SPINS, "0") == "0"


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes run tests side by side with `-n auto`, as far as memory goes: one a core, and for all tests
    one more, since who starts Ray's clusters waits for them most of the time. One on a GPU."""
    import psutil

    if ON_GPU:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rooms = psutil.virtual_memory().available // _WORKER_BYTES
    is_whole: bool = config.args == config.getini("testpaths")
    return max(1, min(cores + is_whole, rooms, _MOST_WORKERS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """A file runs in one process, as it does alone. So do all files that start Ray: one cluster at a time."""
    from xdist.scheduler import LoadFileScheduling

    class OneCluster(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return RAY_TESTS if nodeid.startswith(RAY_TESTS) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # in the order of collection
    return OneCluster(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """These run where they are asked for by name: `make test-clients`, `make test-operators`."""
    if collection_path not in ASKED_FOR:
        return None
    asked = (Path(config.invocation_params.dir, name.partition("::")[0]).resolve() for name in config.args)
    return None if any(path.is_relative_to(collection_path) for path in asked) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Ray comes first, for it takes longest: others run the rest meanwhile; short files last."""
    items.sort(key=lambda item: item.nodeid.startswith(SHORT_TESTS) - item.nodeid.startswith(RAY_TESTS))


def pytest_sessionstart() -> None:
    """In the repeatable profile Hypothesis draws no constants of Legato's modules. It knows those of modules that are
    loaded, which depends on what ran before in this process, and to read them takes seconds of each process."""
    if settings.get_current_profile_name() == "repeatable":
        setattr(providers, "is_local_module_file", lambda path: False)  # noqa: B010


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What is imported and collected stays to the end, a million objects or more: nobody looks through them for cycles,
    neither as they are made, where that took a third of the time, nor whenever a test collects."""
    gc.disable()
    try:
        _import_in_turns(session.config)
        return (yield)
    finally:
        gc.collect()  # once: what is in cycles and unused would stay, too
        gc.freeze()
        gc.enable()


def _import_in_turns(config: pytest.Config) -> None:
    """Of processes side by side each begins with other files. Who comes first has to compile one and to rewrite its
    asserts: in a fresh clone a third of what collecting costs."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    folders = (config.invocation_params.dir / name.partition("::")[0] for name in config.args)
    files = sorted(
        path
        for folder in folders
        for path in (folder.rglob("test_*.py") if folder.is_dir() else [folder])
        if not any(path.is_relative_to(asked) for asked in ASKED_FOR)
    )
    begin = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in [*files[begin:], *files[:begin]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which is told when it is collected
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def _one_torch_thread() -> None:
    """Tests run beside each other and beside worker processes; more threads would only make their timing vary."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    _one_torch_thread()
    if _SLEEPS:
        os.environ.pop(_SPINS, None)  # what tests start does as it is built to


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """What a test sets, or what it loads, is no other's."""
    yield
    _one_torch_thread()


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Each HTTP client reads all that the machine trusts, for 27 ms of the processor: hundreds of clients, and none of
    them speaks TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """A small random Llama, for whoever only asks it."""
    from tests.support.small_models import SmallModel  # most tests need none of what it imports

    return SmallModel("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_folder(llama: SmallModel) -> Path:
    """Its checkpoint, for whoever loads it in a way of their own."""
    return llama.folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct with its real weights, converted once into the default cache folder."""
    from engine.checkpoint.store import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """Gemma 3 270M (a base model) with its real weights, converted once into the default cache folder."""
    from engine.checkpoint.store import resolve_model

    return resolve_model("gemma3-270m")
