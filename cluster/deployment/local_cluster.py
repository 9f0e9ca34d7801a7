"""Brings Ray and Legato up on this machine, waits until a request can be served, and shows one.

For a newcomer's first minute and for tests; on a cluster that exists already, use `serve run`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from pydantic import ValidationError

from cluster.config.load import (
    IMPORT_PATH,
    SERVE_NAMES,
    ConfigError,
    find_legato,
    give_secret,
    http_options,
    load_config,
    load_document,
)
from cluster.config.settings import LegatoConfig
from cluster.deployment.capacity import live_nodes, require_room
from cluster.deployment.ray_environment import tune_environment

START_TIMEOUT_S = 300.0
BOARDS = Path(__file__).parents[1] / "metrics" / "grafana"
OBJECT_STORE_BYTES = 200 * 2**20  # Ray's, in /dev/shm: Legato keeps nothing there
FIRST_QUESTION = "What is the capital of France?"
_LOOK_EVERY_S = 0.25
_HEARS_EVERY_S = 0.05
_LOOK_TIMEOUT_S = 2.0
_CLEAR_LINE = "\r\x1b[K"
_TOLD_CHARACTERS = 2_000  # how much of Serve's account of a failure is told
_LOGS = "/tmp/ray/session_latest/logs/serve"
# In a Serve config file, and of an application there.
_HEEDED = {"applications", "http_options", "controller_options", "logging_config", "proxy_location"}
_HEEDED_OF_APPLICATION = {"name", "route_prefix", "import_path", "args", "logging_config"}


class StartError(RuntimeError):
    """Legato could not be started; says why and where to look."""


@contextlib.contextmanager
def told_in_words(what: str, advice: str) -> Iterator[None]:
    """Raises StartError in the place of whatever Ray or Serve raises in the block: both also raise bare `Exception`.
    `what` failed, as a sentence begins; `advice`: one of its own."""
    try:
        yield
    except Exception as error:
        raise StartError(f"{what}: {why_it_failed([str(error) or type(error).__name__])}\n{advice}") from error


RAY_ADVICE = (
    "A machine that is far too busy may need a second try, or more time: RAY_raylet_start_wait_time_s=600. Else look"
    " into Ray's logs, under /tmp/ray/session_latest/logs."
)
SERVE_ADVICE = f"Try again; if it stays, look into Serve's logs, under {_LOGS}."


def read_document(path: str) -> dict[str, Any]:
    """Read and check a Serve config file with one application, Legato. Raises ConfigError, also for what only Serve
    itself heeds."""
    document, _ = load_document(path)
    if ignored := unheeded(document):
        raise ConfigError(
            f"{path} has {' and '.join(ignored)}, which is Serve's to heed and would be ignored here: start it by"
            f" `serve run {path}`, or leave it out. Variables come from this environment."
        )
    return document


def unheeded(document: dict[str, Any]) -> list[str]:
    """What a Serve config file has, as `load_document` reads it, that `serve run` heeds, and nobody here."""
    _, application = find_legato(document)
    found = [name for name in sorted(SERVE_NAMES[()] - _HEEDED) if document.get(name) is not None]
    grpc = document.get("grpc_options")
    if isinstance(grpc, dict) and not grpc.get("grpc_servicer_functions"):  # as `serve build` writes it: without gRPC
        found.remove("grpc_options")
    if document.get("proxy_location") == "Disabled":  # the others are the same to a Ray of one machine
        found.append("proxy_location: Disabled")
    for name, value in application.items():
        if value and name not in _HEEDED_OF_APPLICATION:
            found.append(f"{name} of the application")
    if application["import_path"] != IMPORT_PATH:
        found.append(f"import_path {application['import_path']} of the application")
    if len(document["applications"]) > 1:
        found.append("other applications")
    return found


def require_serve_takes(document: dict[str, Any], what: str) -> None:
    """Check a Serve config by Serve's own schema, as `serve run` does. Imports Ray. `what`: its name, for people.
    Raises ConfigError, with a line for each problem."""
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        told = [f"{what}: {'.'.join(map(str, each['loc']))}: Serve says: {each['msg']}" for each in problems]
        raise ConfigError("\n".join(told)) from error


def url_of(http: dict[str, Any], application: dict[str, Any]) -> str:
    """Where an application answers that is served with these options."""
    parts = (http.get("root_path"), application.get("route_prefix"))
    return f"http://{http['host']}:{http['port']}" + "".join((part or "").rstrip("/") for part in parts)


@contextlib.contextmanager
def stopping(application: dict[str, Any]) -> Iterator[None]:
    """End the application, and Ray, after the block, whatever became of it, and of who reads what is printed."""
    try:
        yield
    finally:
        try:
            print("Stopping.", flush=True)
        finally:
            stop_application(application)


def serve_document(document: dict[str, Any], *, stay: bool = True, dashboard: bool = True) -> None:
    """Serve what a Serve config file holds until interrupted, or only for one answer. Raises ConfigError, StartError.

    `dashboard`: whether Ray's dashboard is started, too, in processes of its own.
    """
    application = document["applications"][0]
    config = load_config(application.get("args") or {})
    http = http_options(document)
    require_free_port(http["host"], http["port"])
    tune_environment()
    give_secret()
    import_module("ray")  # completely, before two threads import from it
    require_serve_takes(document, "the configuration")
    fetch_models(config)  # until here Ctrl-C just ends this process: a download may take hours
    interrupted = interrupted_by_signals()
    print("Starting Ray ...", flush=True)
    # Ray's processes take seconds to come up, in which this process would only wait: it imports meanwhile.
    threading.Thread(target=import_module, args=("cluster.app",), daemon=True).start()
    with stopping(application):
        start_ray(include_dashboard=dashboard)
        heed_signals(interrupted)
        require_room(config, live_nodes())
        url = start_legato(document, http, config, interrupted)
        if dashboard:
            print(_where_the_dashboard_is(), flush=True)
        if not interrupted.is_set():
            unless_interrupted(interrupted, show_first_answer, url, config.served[0].model.name)
        if stay and not interrupted.is_set():
            print(f"\nServing on {url}/v1 (Ctrl-C to stop).", flush=True)
            interrupted.wait()


def start_legato(
    document: dict[str, Any],
    http: dict[str, Any],
    config: LegatoConfig,
    interrupted: Interruption,
    *,
    logs: str = _LOGS,
) -> str:
    """Start Serve with these options of HTTP, and the application, on a Ray that is up; wait until it serves, or until
    `interrupted` is set. Returns where it answers. `logs`: see `StartStates`. Raises StartError."""
    application, logging_config = document["applications"][0], document.get("logging_config")
    start_serve(http, interrupted, document.get("controller_options"), logging_config)
    print("Starting Legato: a gateway, the global scheduler and the workers load the model ...", flush=True)
    run_application(application, config, interrupted, logging_config)
    url = url_of(http, application)
    wait_until_ready(StartStates(_name(application), url, config, logs=logs), interrupted)
    return url


class Interruption:
    """Set by Ctrl-C and a polite kill, so that Ray can be taken down in order. A handler may set it while this very
    thread is about to wait for it, where it would wait forever for the lock of a `threading.Event`."""

    def __init__(self) -> None:
        self._signals = SimpleQueue[int]()
        self._is_set = False

    def set(self, number: int = 0, *_: object) -> None:
        self._is_set = True
        self._signals.put(number)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is set, or that many seconds have passed. Returns whether it is set."""
        if not self._is_set:
            with contextlib.suppress(Empty):
                self._signals.get(timeout=timeout_s)
        return self._is_set


def interrupted_by_signals() -> Interruption:
    interrupted = Interruption()
    heed_signals(interrupted)
    return interrupted


def heed_signals(interrupted: Interruption) -> None:
    """Have SIGINT and SIGTERM set `interrupted`. Call it again once Ray is up: as it starts it takes SIGTERM for
    itself, and then prints where each thread stands."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, interrupted.set)


def start_ray(**options: Any) -> None:
    """Start a local Ray that is small enough for a laptop, joins no other and listens on this machine only. Raises
    StartError."""
    import ray

    defaults = {
        "address": "local",
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "warning",
    }
    with told_in_words("Ray did not start", RAY_ADVICE):
        ray.init(**{**defaults, **options})


def start_serve(
    http_options: dict[str, Any],
    interrupted: Interruption,
    controller_options: dict[str, Any] | None = None,
    logging_config: dict[str, Any] | None = None,
) -> None:
    """Start Serve. Returns once its controller, which takes applications, is there, or `interrupted` is set. Raises
    StartError where Serve raises until then.

    Serve's proxies take seconds more, in which workers can start; Serve replaces a proxy that is not ready in time.
    Only the head has one: all nodes are of this machine, where those of the others could not listen on its port, and
    Serve would start them again and again.
    """
    import ray
    from ray import serve

    # Serve would say that a controller is there already, and mean the one that this very call has started.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    proxies = _in_thread(
        serve.start,
        proxy_location="HeadOnly",
        http_options=http_options,
        controller_options=controller_options,
        logging_config=logging_config,
    )
    with told_in_words("Serve did not start", SERVE_ADVICE):
        while not any(actor["namespace"] == "serve" for actor in ray.util.list_named_actors(all_namespaces=True)):
            if wait([proxies], _HEARS_EVERY_S).done or interrupted.is_set():
                break
        if proxies.done():
            proxies.result()


def _in_thread(call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """Call it in a thread that keeps no process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **options))
        except BaseException as error:  # told to who asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="serve", daemon=True).start()
    return future


def unless_interrupted(
    interrupted: Interruption, call: Callable[..., object], *args: object, **options: object
) -> None:
    """Call what hears no signal, and return when it has, or when `interrupted` is set. Raises what it raises."""
    called = _in_thread(call, *args, **options)
    while not (wait([called], _HEARS_EVERY_S).done or interrupted.is_set()):
        pass
    if called.done():
        called.result()


def _where_the_dashboard_is() -> str:
    """A line that says where Ray's dashboard is. Also copies Legato's board to Ray's boards in the session's folder,
    where a Grafana finds them: in the place of the one for Ray Data, whose tab of the Metrics page shows it (see
    `tune_environment`)."""
    import ray

    from cluster.deployment.ray_access import asks_for_token, token_path

    boards = Path(ray._private.worker._global_node.get_session_dir_path()) / "metrics" / "grafana" / "dashboards"
    if boards.is_dir():  # the dashboard has made its own long ago
        shutil.copy(BOARDS / "legato.json", boards / "data_grafana_dashboard.json")
    token = f" (it asks for Ray's token: cat {token_path()})" if asks_for_token() else ""
    return f"Ray's dashboard: http://{ray._private.worker._global_node.webui_url}{token}"


def stop_application(application: dict[str, Any]) -> None:
    """End the application, then Ray, whatever state they are in. Workers have time to finish what they do."""
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        # `serve.shutdown` lets Ray tell of a task that failed "and will be retried": the last one of the controller.
        if ray.is_initialized() and serve.status().applications:
            serve.delete(_name(application))
    except (TimeoutError, ray.exceptions.RayError, RayServeException) as error:
        print(f"It did not end in order: {error}", flush=True)
    finally:
        ray.shutdown()


def _name(application: dict[str, Any]) -> str:
    return str(application.get("name", "legato"))


def run_application(
    application: dict[str, Any],
    config: LegatoConfig,
    interrupted: Interruption,
    logging_config: dict[str, Any] | None = None,
) -> None:
    """Deploy the application, without waiting for it; `wait_until_ready` tells when it serves. `logging_config`: that
    of its replicas, unless the application has its own. Returns early where `interrupted` is set. Raises StartError."""
    if interrupted.is_set():
        return
    import ray
    from ray import serve

    from cluster.app import build_application

    target = serve.RunTarget(
        target=build_application(config),
        name=_name(application),
        route_prefix=application.get("route_prefix", "/"),
        logging_config=application.get("logging_config", logging_config),
    )
    with told_in_words("Serve did not take Legato's application", SERVE_ADVICE):
        try:
            # Serve's own waiting for an application has no deadline; that for its proxies has, and hears no Ctrl-C.
            options = {"wait_for_ingress_deployment_creation": False, "wait_for_applications_running": False}
            unless_interrupted(interrupted, serve.run_many, [target], **options)
        except ray.exceptions.RayError:  # of which some are a TimeoutError, too
            raise
        except TimeoutError:
            # It has the application, and has waited a fixed minute for its proxies, which start on: `wait_until_ready`
            # has more patience, and asks them.
            print("  Serve's proxies take more than a minute; waiting on ...", flush=True)


class StartStates:
    """Prints how an application comes up: a line for each change of what Serve says of its deployments, and the gateway
    at `url` of the workers. While models load, it writes one last line over and over on a terminal; elsewhere it prints
    a line for each tenth. `logs`: where its processes' logs are, for people."""

    def __init__(
        self,
        application: str,
        url: str,
        config: LegatoConfig,
        stream: TextIO | None = None,
        *,
        logs: str = _LOGS,
    ) -> None:
        self.url = url
        self.logs = logs
        self.changed_s = self._began_s = time.monotonic()
        self._application = application
        self._num_workers = sum(sum(served.least_workers.values()) for served in config.served)
        self._num_ready = 0
        self._stream = stream or sys.stdout
        self._told: dict[str, str] = {}
        self._live = ""  # the last line, which is written over next

    @property
    def all_ready(self) -> bool:
        """Whether all workers are there that the configuration starts; some may serve before."""
        return self._num_ready >= self._num_workers

    def refresh(self) -> None:
        """Ask Serve and the gateway, and print what is new. Raises StartError if Serve has given the application up, or
        does not say."""
        from ray import serve

        with told_in_words("Serve does not say how Legato is", SERVE_ADVICE):
            found = serve.status().applications.get(self._application)
        if found is None:
            return
        for name, deployment in found.deployments.items():
            states = sorted((state.lower(), number) for state, number in deployment.replica_states.items() if number)
            self._tell(name, ", ".join(f"{number} {state}" for state, number in states) or "waiting")
        if found.status == "DEPLOY_FAILED":
            messages = [found.message, *(deployment.message for deployment in found.deployments.values())]
            raise StartError(
                f"Serve could not start Legato: {why_it_failed(messages)}\nAll of it is in the workers' logs under"
                f" {self.logs}."
            )
        with (
            contextlib.suppress(OSError, HTTPException, ValueError, KeyError),  # there is no gateway yet
            urllib.request.urlopen(f"{self.url}/cluster", timeout=_LOOK_TIMEOUT_S) as answer,
        ):
            self.tell_of_workers(json.load(answer))

    def tell_of_workers(self, cluster: dict[str, Any]) -> None:
        """Print what is new about workers in `cluster`, a gateway's answer to `/cluster`. Raises KeyError if it is not
        such an answer."""
        roles = [worker["role"] for worker in cluster["workers"]]
        self._num_ready = len(roles)
        each = ", ".join(f"{roles.count(role)} {role}" for role in sorted(set(roles), reverse=True))
        if each:
            self._tell("Ready workers", f"{len(roles)} of {max(len(roles), self._num_workers)}: {each}")
        loading = {report["worker_id"]: _how_far(report) for report in cluster["loading"]}
        if not self._stream.isatty():
            for worker_id, (tenths, told) in loading.items():
                if self._told.get(f"{worker_id} loads") != tenths:
                    self._told[f"{worker_id} loads"] = tenths
                    self._print(f"{worker_id}: {told}")
        elif live := "; ".join(f"{worker_id}: {told}" for worker_id, (_, told) in loading.items()):
            self._write_over(live)

    def close(self) -> None:
        """End the line that is written over. Call it when all is told."""
        self._stream.write(_CLEAR_LINE if self._live else "")
        self._live = ""

    def _tell(self, name: str, told: str) -> None:
        if self._told.get(name) != told:
            self._told[name] = told
            self._print(f"{name}: {told}")

    def _print(self, text: str) -> None:
        self.close()
        self.changed_s = time.monotonic()
        print(f"  {self._elapsed()}  {text}", file=self._stream, flush=True)

    def _write_over(self, text: str) -> None:
        if text != self._live:
            self.changed_s = time.monotonic()
        self._live = text
        width = shutil.get_terminal_size().columns - 1  # one more, and it would be two lines
        print(
            f"{_CLEAR_LINE}  {self._elapsed()}  {text}"[: width + len(_CLEAR_LINE)],
            end="",
            file=self._stream,
            flush=True,
        )

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began_s:5.1f} s"


def _how_far(report: dict[str, Any]) -> tuple[str, str]:
    """How far a worker is, by its `LoadingReport`: a word that changes with each tenth, and a text for people."""
    total, read, placed = (report[f"{what}_bytes"] for what in ("total", "read", "placed"))
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    if not total:
        told = "begins"
    elif placed >= total:
        told = f"all {total / unit:.1f} {name} loaded, tries steps out"
    elif read >= total:
        told = f"packed {placed / unit:.1f} of {total / unit:.1f} {name}"
    else:
        told = f"read {read / unit:.1f} of {total / unit:.1f} {name}"
    return f"{5 * (read + placed) // total if total else -1}{told.partition(' ')[0]}", told


def why_it_failed(messages: Sequence[str]) -> str:
    """The error itself, without its traceback, out of what Serve says of an application and its deployments."""
    longest = max(messages, key=len).strip()[-_TOLD_CHARACTERS:]
    return longest.splitlines()[-1].strip() if "Traceback" in longest or '  File "' in longest else longest


def wait_until_ready(states: StartStates, interrupted: Interruption, silence_s: float = START_TIMEOUT_S) -> None:
    """Wait until `/health` says that a request could be served and all workers are there, or until `interrupted` is
    set.

    Raises StartError if Serve has given up, or if nothing changed for `silence_s`:
    a large model may take longer in all."""
    try:
        while not interrupted.wait(_LOOK_EVERY_S):
            why = _why_not_ready(states.url)  # first, so that whatever is ready by then is told, too
            states.refresh()
            if why is None and states.all_ready:
                break
            if time.monotonic() - states.changed_s > silence_s:
                raise StartError(
                    f"Legato did not become ready, and nothing changed for {silence_s:.0f} s"
                    f" ({why or 'not all workers are there'}). Look into the workers' logs under"
                    f" {states.logs}."
                )
    finally:
        states.close()


def _why_not_ready(url: str) -> str | None:
    """Why no request could be served at `url` now; None: one could."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return None
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace")[:300]
    except OSError as error:
        return str(error)


def require_free_port(host: str, port: int) -> None:
    """Check that nobody listens on a port. Raises StartError, with advice, if somebody does."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise StartError(
                f"{host}:{port} cannot be listened on ({error.strerror}). "
                "Stop what uses it, or choose another port with --port (make serve PORT=...)."
            ) from error


def fetch_models(config: LegatoConfig) -> None:
    """Fetch the models that are not on this machine. Call it before anything is started, so that the download's
    progress is seen. Raises StartError."""
    from engine.checkpoint.builtin_models import ModelUnavailableError
    from engine.checkpoint.store import resolve_model

    for served in config.served:
        print(f"Model {served.model.ref} ...", flush=True)
        try:
            print(f"  in {resolve_model(served.model.ref, backend=served.model.backend)}", flush=True)
        except (ValueError, ModelUnavailableError) as error:
            raise StartError(str(error)) from error
        except OSError as error:  # a folder that cannot be written, a disk that is full
            raise StartError(
                f"{served.model.ref} cannot be made ready on this machine: {error}. `legato doctor` looks at the folder"
                " that models go to; LEGATO_CACHE, or for the hub's HF_HOME, names another one."
            ) from error


def show_first_answer(url: str, model: str) -> None:
    """Ask the model `FIRST_QUESTION` and print its answer as it comes; or print why there is none, or no whole one: the
    cluster serves others all the same."""
    body = {"model": model, "messages": [{"role": "user", "content": FIRST_QUESTION}], "max_tokens": 48}
    body["stream"] = True
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps({**body, "temperature": 0}).encode(),
        headers={"content-type": "application/json"},
    )
    print(f"\n> {FIRST_QUESTION}\n", flush=True)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    for choice in event["choices"]:
                        print(choice["delta"].get("content", ""), end="", flush=True)
    except urllib.error.HTTPError as error:
        # A base model without a chat template, for example: it serves completions all the same.
        print(f"(no first answer: {error.read().decode(errors='replace')[:300]})", end="", flush=True)
    except BrokenPipeError:  # nobody reads what is printed
        raise
    except (OSError, HTTPException, ValueError) as error:
        print(f"(no whole first answer: {error})", end="", flush=True)
    print(flush=True)
