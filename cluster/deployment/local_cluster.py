"""Brings Ray and Legato up on this machine, waits until a request can be served, and shows one.

For a newcomer's first minute and for tests; on a cluster that exists already, use `serve run`.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from cluster.config.load import give_secret, load_config
from cluster.config.settings import LegatoConfig
from cluster.deployment.capacity import live_nodes, require_room
from cluster.deployment.ray_environment import tune_environment

START_TIMEOUT_S = 300.0
FIRST_QUESTION = "What is the capital of France?"


class StartError(RuntimeError):
    """Legato could not be started; says why and where to look."""


def serve_file(path: str, *, port: int | None = None, stay: bool = True) -> None:
    """Serve the configuration in `path` until interrupted, or only for one answer. Raises ConfigError, StartError."""
    config = load_config(path)
    document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    http = {"host": "127.0.0.1", "port": 8000, **document.get("http_options", {})}
    if port is not None:
        http["port"] = port
    _require_free_port(http["host"], http["port"])
    tune_environment()
    give_secret()
    interrupted = interrupted_by_signals()
    import_module("ray")  # whole, before two threads ask for it
    _fetch_model(config)
    print("Starting Ray ...", flush=True)
    # Ray's processes take seconds to come up, in which this one would only wait.
    threading.Thread(target=import_module, args=("cluster.app",), daemon=True).start()
    try:
        start_ray()
        require_room(config, live_nodes())
        start_serve(http, document.get("controller_options"))
        print("Starting Legato: a gateway, the global scheduler and the workers load the model ...", flush=True)
        run_application(document["applications"][0], config)
        url = f"http://{http['host']}:{http['port']}"
        wait_until_ready(url, interrupted)
        if not interrupted.is_set():
            _show_first_answer(url, config.model.name)
        if stay and not interrupted.is_set():
            print(f"\nServing on {url}/v1 (Ctrl-C to stop).", flush=True)
            interrupted.wait()
    finally:
        print("Stopping.", flush=True)
        _stop(document["applications"][0])


def interrupted_by_signals() -> threading.Event:
    """Set by Ctrl-C and by a polite kill, so that Ray is taken down in order."""
    interrupted = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: interrupted.set())
    return interrupted


def start_ray(**options: Any) -> None:
    """A local Ray that is as small as a laptop wants it; joins nothing and listens on this machine only."""
    import ray

    defaults = {
        "address": "local",
        "object_store_memory": 200 * 2**20,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "warning",
    }
    ray.init(**{**defaults, **options})


def start_serve(http_options: dict[str, Any], controller_options: dict[str, Any] | None = None) -> None:
    """Returns once Serve's controller is there, which takes applications. Raises what Serve raises until then.

    Its proxies take seconds more, in which workers can start; Serve replaces one that is not ready in time.
    """
    import ray
    from ray import serve

    # Its word on a controller that is there already would be on the one that this very call has started.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with_thread = ThreadPoolExecutor(1, thread_name_prefix="serve-start")
    proxies: Future[None] = with_thread.submit(
        serve.start, http_options=http_options, controller_options=controller_options
    )
    with_thread.shutdown(wait=False)
    while not any(actor["namespace"] == "serve" for actor in ray.util.list_named_actors(all_namespaces=True)):
        if wait([proxies], 0.05).done:
            break
    if proxies.done():
        proxies.result()


def _stop(application: dict[str, Any]) -> None:
    """End the application, then Ray, whatever state they are in; its workers have time for what they do."""
    import ray
    from ray import serve

    try:
        # `serve.shutdown` lets Ray tell of a task that failed "and will be retried": the last one of the controller.
        if ray.is_initialized() and serve.status().applications:
            serve.delete(_name(application))
    except (TimeoutError, ray.exceptions.RayError) as error:
        print(f"It did not end in order: {error}", flush=True)
    finally:
        ray.shutdown()


def _name(application: dict[str, Any]) -> str:
    return str(application.get("name", "legato"))


def run_application(application: dict[str, Any], config: LegatoConfig) -> None:
    """Deploy and return at once; `wait_until_ready` tells when it serves."""
    from ray import serve

    from cluster.app import build_application

    target = serve.RunTarget(
        target=build_application(config),
        name=_name(application),
        route_prefix=application.get("route_prefix", "/"),
    )
    # Serve's own waiting has no deadline and hears no Ctrl-C.
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def wait_until_ready(url: str, interrupted: threading.Event, timeout_s: float = START_TIMEOUT_S) -> None:
    """Until `/health` says that a request could be served. Raises StartError."""
    deadline = time.monotonic() + timeout_s
    why = "nothing answered"
    while not interrupted.wait(0.1):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except urllib.error.HTTPError as error:
            why = error.read().decode(errors="replace")[:300]
        except OSError as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise StartError(
                f"Legato did not become ready within {timeout_s:.0f} s ({why}). "
                "Look into the workers' logs under /tmp/ray/session_latest/logs/serve."
            )


def _require_free_port(host: str, port: int) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise StartError(
                f"{host}:{port} cannot be listened on ({error.strerror}). "
                "Stop what uses it, or choose another port with --port (make serve PORT=...)."
            ) from error


def _fetch_model(config: LegatoConfig) -> None:
    """Before anything is started, so that the download's progress is seen."""
    from engine.checkpoint.store import resolve_model

    print(f"Model {config.model.ref} ...", flush=True)
    print(f"  in {resolve_model(config.model.ref)}", flush=True)


def _show_first_answer(url: str, model: str) -> None:
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
                    for choice in json.loads(line[6:])["choices"]:
                        print(choice["delta"].get("content", ""), end="", flush=True)
    except urllib.error.HTTPError as error:
        # A base model without a chat template, for example: it serves completions all the same.
        print(f"(no first answer: {error.read().decode(errors='replace')[:300]})", end="", flush=True)
    print(flush=True)
