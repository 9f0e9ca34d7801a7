"""Who can reach Ray: what is asked of it, and what the owner of an open one is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from ray.serve.config import HTTPOptions

from cluster.config.load import ConfigError, load_config
from cluster.deployment import ray_access
from cluster.deployment.announce import describe_http, describe_start
from cluster.deployment.ray_access import HAPROXY_PORTS, keep_ray_on_loopback, require_token
from cluster.deployment.ray_environment import RAY_ENVIRONMENT, SERVE_ENVIRONMENT, unset
from tests.cluster.config.test_config import FILES
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of Ray's is set, and what a test sets is gone after it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LEGATO_", "LOG_NAME"))}
    monkeypatch.setattr(os, "environ", kept)
    kept["HOME"] = str(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_each_file_gives_serve_its_settings(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["controller_options"] == {"runtime_env": {"env_vars": SERVE_ENVIRONMENT}}
    assert document["logging_config"]["encoding"] == "JSON", "as docs/guide/dashboard.md says"


def test_a_ray_of_one_machine_asks_its_other_users_for_a_token(tmp_path: Path) -> None:
    keep_ray_on_loopback()
    token = tmp_path / ".ray" / "auth_token"
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600
    first = token.read_text()
    token.chmod(0o644)  # as Ray itself would have made it
    keep_ray_on_loopback()
    assert token.read_text() == first
    assert token.stat().st_mode & 0o777 == 0o600


def test_a_token_that_cannot_be_written_is_told() -> None:
    os.environ["HOME"] = "/dev/null"
    with pytest.raises(ConfigError, match=r"Not a directory: '/dev/null/\.ray'.* Set RAY_AUTH_TOKEN_PATH"):
        keep_ray_on_loopback()


def test_without_a_home_there_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    del os.environ["HOME"]
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as where a container's user has no entry
    with pytest.raises(ConfigError, match=r"Could not determine home directory\. Set RAY_AUTH_TOKEN_PATH"):
        keep_ray_on_loopback()


def test_an_operator_may_choose_otherwise_by_name(tmp_path: Path) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    keep_ray_on_loopback()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert not (tmp_path / ".ray").exists()


def test_haproxy_is_started_with_its_side_ports_on_loopback(tmp_path: Path) -> None:
    keep_ray_on_loopback()
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "global\n    stats socket /tmp/admin.sock mode 666 level admin\ndefaults\n    mode http\n"
        "frontend prometheus\n    bind :21001\nfrontend http_frontend\n    bind *:8000\nlisten stats\n  bind *:21002\n"
    )
    ports = dict(zip(HAPROXY_PORTS, ("21002", "21001"), strict=True))
    subprocess.run(
        [os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config)],
        env={**os.environ, **ports, "LEGATO_HAPROXY": "/bin/true"},
        check=True,
        timeout=60,
    )
    told = config.read_text()
    assert "    bind 127.0.0.1:21001\n" in told
    assert "  bind 127.0.0.1:21002\n" in told
    assert "    bind *:8000\n" in told  # the front itself listens where the user says
    assert "admin.sock mode 600 level admin" in told


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="nothing here can tell it")
def test_haproxy_stops_where_whoever_started_it_is_killed(tmp_path: Path) -> None:
    """Ray leaves it where its manager is killed, and there it would share the port with the next cluster's."""
    keep_ray_on_loopback()
    proxy, begun, stopped = tmp_path / "haproxy", tmp_path / "begun", tmp_path / "stopped"
    proxy.write_text(f"#!/bin/sh\ntrap 'echo $* > {stopped}; exit' USR1\ntouch {begun}\nwhile :; do sleep 0.05; done\n")
    proxy.chmod(0o755)
    wrapper = os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]
    environment = {**os.environ, "LEGATO_HAPROXY": str(proxy)}
    manager = subprocess.Popen(["/bin/sh", "-c", '"$0" -db & wait', wrapper], env=environment)
    try:
        wait_until(begun.exists)
        assert not stopped.exists()
    finally:
        manager.kill()
        manager.wait()
    wait_until(lambda: stopped.exists() and stopped.read_text() == "-db\n")


def test_several_machines_need_rays_token(monkeypatch: pytest.MonkeyPatch) -> None:
    several = load_config({"network": {"host": "node"}})
    monkeypatch.setattr(ray_access, "asks_for_token", lambda: True)
    require_token(several)
    monkeypatch.setattr(ray_access, "asks_for_token", lambda: False)
    for host in ("127.0.0.1", "localhost", "127.0.0.2", "::1"):
        require_token(load_config({"network": {"host": host}}))
    require_token(load_config({"network": {"host": "node", "require_ray_token": False}}))
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE=token .* network.require_ray_token: false"):
        require_token(several)


def test_what_is_unset_is_said_with_what_it_costs() -> None:
    proxy, idle = unset()
    assert "a fifth of the requests per second" in proxy
    assert all(f"{name}={value}" in idle for name, value in RAY_ENVIRONMENT.items())
    os.environ.update({"RAY_event_stats": "1"})
    assert "RAY_event_stats" not in unset()[1]
    os.environ.update(RAY_ENVIRONMENT)
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    (left,) = unset()
    assert "`no option splice-request`: where a client leaves, its gateway is not told" in left
    os.environ.update(SERVE_ENVIRONMENT)
    assert unset() == []


def test_a_key_that_haproxy_does_not_heed_is_told() -> None:
    """By `serve run`, whose file nobody of Legato's has seen before."""
    plain, keyed = HTTPOptions(host="127.0.0.1"), HTTPOptions(host="127.0.0.1", ssl_keyfile="k", ssl_certfile="c")
    assert list(describe_http(keyed, "m")) == ["serves m on https://127.0.0.1:8000/v1"]
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    assert list(describe_http(plain, "m")) == ["serves m on http://127.0.0.1:8000/v1"]
    where, warning = describe_http(keyed, "m")
    assert where.startswith("serves m on http://") and "HTTP is NOT encrypted" in warning


def test_the_default_model_is_served_with_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    told = "no `model` is given below `args`"
    describe_start(load_config({"decode": {"replicas": 2}}))
    assert told in capfd.readouterr().out
    for tree in {"model": "gemma3-270m"}, {"models": ["gemma3-270m"]}:
        describe_start(load_config(tree))
        assert told not in capfd.readouterr().out
