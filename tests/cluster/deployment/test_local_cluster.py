"""What `legato serve` asks of Ray, up to the call that would start it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import ray
import yaml
from ray import serve
from ray.serve._private.client import ServeControllerClient

from cluster.__main__ import main
from cluster.config.load import IMPORT_PATH, ConfigError, http_options, load_config
from cluster.deployment import local_cluster
from cluster.deployment.local_cluster import (
    Interruption,
    StartError,
    read_document,
    run_application,
    show_first_answer,
    start_ray,
    start_serve,
    stopping,
    url_of,
)
from cluster.deployment.ray_environment import free_port
from tests.support.threaded_server import QuietHandler, threaded_server
from tests.support.waiting import wait_until

CONFIGS = Path(__file__).parents[3] / "ray_configs"


class Started(BaseException):
    """In place of a Ray. None of Ray's errors, of which there are sentences for people."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options


def start(**options: Any) -> NoReturn:
    raise Started(**options)


@pytest.mark.parametrize(("options", "has_dashboard"), [([], True), (["--no-dashboard"], False)])
def test_the_dashboard_is_started_unless_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], has_dashboard: bool
) -> None:
    # A model's folder, as far as it is looked at by then.
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    line = ["legato", "serve", str(tmp_path), "--cpu", "--port", str(free_port()), *options]
    monkeypatch.setattr("sys.argv", line)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(local_cluster, "interrupted_by_signals", Interruption)  # the tests' own handlers stay
    with patch.dict(os.environ, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token")), pytest.raises(Started) as started:
        main()
    assert started.value.options["include_dashboard"] is has_dashboard


def test_the_head_alone_has_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Serve starts one on every node, and again and again where its port is taken: by the head's, here."""
    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: [])
    with pytest.raises(Started) as started:
        start_serve({"host": "127.0.0.1", "port": 8000}, Interruption())
    assert started.value.options["proxy_location"] == "HeadOnly"


@pytest.mark.parametrize("error", [Exception, ray.exceptions.GetTimeoutError])
@pytest.mark.parametrize(
    ("begin", "what", "advice"),
    [
        (start_ray, "Ray did not start", "RAY_raylet_start_wait_time_s"),
        (lambda: start_serve({"host": "127.0.0.1", "port": 8000}, Interruption()), "Serve did not start", "Try again"),
        (lambda: run_application({}, load_config({}), Interruption()), "Serve did not take", "Try again"),
    ],
    ids=["Ray", "Serve", "the application"],
)
def test_what_ray_raises_at_the_start_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None], what: str, advice: str, error: type[Exception]
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(serve, "start", fail)
    monkeypatch.setattr(serve, "run_many", fail)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: [])
    with pytest.raises(StartError, match=rf"^{what}.*: The current node timed out[^\n]*\n.*{advice}"):
        begin()


def test_proxies_that_take_longer_than_serve_waits_for_them_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Serve has the application by then, and its own client gives up: here, before it has waited at all."""
    taken: list[str] = []

    class Method:
        def __init__(self, name: str) -> None:
            self._name = name

        def remote(self, *_: object, **__: object) -> str:
            taken.append(self._name)
            return self._name

    class Actor:
        def __getattr__(self, name: str) -> Method:
            return Method(name)

    answers = {"get_proxies": {"node": Actor()}, "deploy_applications": None}
    monkeypatch.setattr(ray, "get", lambda refs, **_: answers[refs])
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], refs))
    controller = ServeControllerClient.__new__(ServeControllerClient)
    vars(controller).update(_controller=Actor(), _shutdown=False, get_handle=lambda *_, **__: None)
    monkeypatch.setattr(serve, "run_many", lambda targets, **options: controller.deploy_applications([], **options))
    run_application({}, load_config({}), Interruption())
    assert taken == ["deploy_applications", "get_proxies", "serving"]
    assert "waiting on" in capsys.readouterr().out


def test_ctrl_c_is_heard_while_serve_waits_for_its_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a minute, in C, and calls nothing of ours meanwhile."""
    interrupted, is_over = Interruption(), threading.Event()
    waited: list[bool] = []

    def wait(*_: object, **__: object) -> None:
        interrupted.set()
        waited.append(is_over.wait())

    monkeypatch.setattr(serve, "run_many", wait)
    try:
        run_application({}, load_config({}), interrupted)
        assert not waited
    finally:
        is_over.set()
    wait_until(lambda: waited)


def test_ctrl_c_ends_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may take hours, and nothing is started yet that would have to end in order."""
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(local_cluster, "fetch_models", lambda config: signal.raise_signal(signal.SIGINT))
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with patch.dict(os.environ, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token")), pytest.raises(KeyboardInterrupt):
            local_cluster.serve_document(
                {"http_options": {"port": free_port()}, "applications": [{"import_path": IMPORT_PATH, "args": {}}]}
            )
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_what_only_serve_itself_heeds_is_refused(tmp_path: Path) -> None:
    quickstart, changed = CONFIGS / "quickstart.yaml", tmp_path / "changed.yaml"
    document = read_document(str(quickstart))
    environment = {"env_vars": {"OTEL_SDK_DISABLED": "true"}}
    grpc = {"port": 9000, "grpc_servicer_functions": ["mycompany.serving:add_to_server"]}
    (application,) = document["applications"]
    for told, applications, options in (
        ("deployments of the", [application | {"deployments": [{"name": "Gateway", "num_replicas": 2}]}], {}),
        ("runtime_env of the", [application | {"runtime_env": environment}], {}),
        ("import_path mycompany.serving:build of", [application | {"import_path": "mycompany.serving:build"}], {}),
        ("other applications,", [{"name": "other", "import_path": "other:app", "route_prefix": "/x"}, application], {}),
        ("proxy_location: Disabled", [application], {"proxy_location": "Disabled"}),
        ("grpc_options and target_capacity,", [application], {"grpc_options": grpc, "target_capacity": 10}),
    ):
        changed.write_text(yaml.safe_dump(document | {"applications": applications} | options), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"has {told}.*`serve run {changed}`"):
            read_document(str(changed))
    as_serve_build_writes_it = {"proxy_location": "EveryNode", "grpc_options": grpc | {"grpc_servicer_functions": []}}
    changed.write_text(yaml.safe_dump(document | as_serve_build_writes_it | {"x-own": {}}), encoding="utf-8")
    assert read_document(str(changed))


def answering(answer: bytes) -> AbstractContextManager[str]:
    """The URL of a gateway that answers every request with these bytes, and closes."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.wfile.write(answer)

    return threaded_server(Handler)


CHUNK = b'data: {"choices": [{"delta": {"content": "Par"}}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + CHUNK + b"data: [DONE]\n\n", "\n\nPar\n"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\nno template", "(no first answer: no template)"),
        (
            b"HTTP/1.1 200 OK\r\n\r\n" + CHUNK + b'data: {"error": {"message": "The request failed 4 times."}}\n\n',
            "Par(no whole first answer: The request failed 4 times.)",
        ),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n40\r\n" + CHUNK, "(no whole first answer: Incomplete"),
        (b"", "(no whole first answer: Remote end closed"),
    ],
    ids=["whole", "refused", "an error in the stream", "cut off", "nothing"],
)
def test_a_cluster_serves_on_whatever_becomes_of_its_first_answer(
    capsys: pytest.CaptureFixture[str], answer: bytes, told: str
) -> None:
    with answering(answer) as url:
        show_first_answer(url, "model")
    assert told in capsys.readouterr().out


def test_who_stops_reading_does_not_leave_it_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """`legato serve MODEL | tee log`: Ctrl-C ends tee first."""
    ended: list[Any] = []
    monkeypatch.setattr(local_cluster, "stop_application", ended.append)
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "w") as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        with pytest.raises(BrokenPipeError), stopping({"name": "legato"}):
            pass
    assert ended == [{"name": "legato"}]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "http_options is"),
        ({"port": "8000"}, "port is '8000'"),
        ({"port": 70_000}, "70000"),
        ({"host": 1}, "host is 1"),
    ],
)
def test_options_of_serve_that_cannot_be(options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        http_options({"http_options": options or [1]})


def test_where_it_answers() -> None:
    assert http_options({"http_options": None}) == {"host": "127.0.0.1", "port": 8000}
    http = http_options({"http_options": {"host": "0.0.0.0", "root_path": "/llm"}}, port=8001)
    assert url_of(http, {"route_prefix": "/"}) == url_of(http, {}) == "http://0.0.0.0:8001/llm"
    assert url_of(http | {"root_path": ""}, {"route_prefix": "/legato"}) == "http://0.0.0.0:8001/legato"
