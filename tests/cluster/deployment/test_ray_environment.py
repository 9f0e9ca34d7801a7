"""What Ray finds in its environment; and a port that is chosen now is still free when a server has come up."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from unittest.mock import patch

import pytest

from cluster.deployment.ray_environment import free_ports, tune_environment


def test_ports_differ_and_are_none_that_the_system_gives_to_others() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(20)
    assert len(set(ports)) == 20
    if first >= 30_000:  # Linux' default; whoever widened it shares all ports
        assert not [port for port in ports if first <= port <= last]


def test_a_port_that_is_listened_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken, free) = free_ports(2)
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, num: [taken, free])
        assert free_ports(1) == [free]
        with pytest.raises(OSError, match="no 2 of"):
            free_ports(2)


@pytest.mark.parametrize(("given", "expected"), [(None, "120"), ("7", "7")])
def test_rays_node_has_time_to_come_up(tmp_path: Path, given: str | None, expected: str) -> None:
    """Ray's own 30 s are too few on a machine that is busy; a user's word goes before Legato's."""
    name = "RAY_raylet_start_wait_time_s"
    with patch.dict(os.environ, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token")):
        os.environ.pop(name, None)
        if given is not None:
            os.environ[name] = given
        tune_environment()
        assert os.environ[name] == expected
