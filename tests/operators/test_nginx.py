"""nginx, as docs/guide/security.md has it configured, in front of the HTTP application."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from cluster.config.settings import GatewaySettings
from cluster.deployment.ray_environment import free_port
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, wait_until

SECURITY = Path(__file__).parents[2] / "docs" / "guide" / "security.md"
KEY = "0123456789abcdef" * 4
AS_ALICE = {"authorization": f"Bearer {KEY}", "x-tenant": "mallory"}
BODY = {"model": MODEL, "prompt": "the sea", "max_tokens": 8}


@pytest.fixture(scope="module")
def generator(smollm2_folder: Path) -> ScriptedGenerator:
    return ScriptedGenerator(Tokenizer(smollm2_folder))


@pytest.fixture(scope="module")
def front(
    program: Callable[[str], str],
    generator: ScriptedGenerator,
    smollm2_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """A client of nginx, without a key."""
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    files = ["-keyout", str(folder / "legato.key"), "-out", str(folder / "legato.pem")]
    subprocess.run([*certificate, *files], check=True, capture_output=True, timeout=HANGS_S)
    (folder / "legato.keys").write_text(f'"{KEY}" alice;\n')
    (block,) = re.findall(r"^```nginx\n(.*?)^```$", SECURITY.read_text(), flags=re.DOTALL | re.MULTILINE)
    settings = GatewaySettings(trust_tenant_header=True)
    with running_server(generator, Tokenizer(smollm2_folder), settings) as target:
        changes = {"/etc/nginx": str(folder), "listen 443": f"listen 127.0.0.1:{port}"}
        changes["127.0.0.1:8000"] = target.http.base_url.netloc.decode()
        for ours, here in changes.items():
            assert ours in block
            block = block.replace(ours, here)
        own = "".join(f"{name}_temp_path {folder / name};\n" for name in ("client_body", "proxy", "fastcgi"))
        own += "".join(f"{name}_temp_path {folder / name};\n" for name in ("uwsgi", "scgi"))
        config = folder / "nginx.conf"
        config.write_text(f"daemon off;\npid {folder}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{own}{block}}}\n")
        process = subprocess.Popen([program("nginx"), "-e", str(folder / "error.log"), "-c", str(config)])
        try:
            with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=False, timeout=HANGS_S) as client:
                wait_until(lambda: process.poll() is not None or _answers(client))
                assert process.poll() is None, (folder / "error.log").read_text()
                yield client
        finally:
            process.terminate()
            process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/").status_code > 0
    except httpx.ConnectError:
        return False


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer 0"}, {"x-api-key": "0"}, {"authorization": KEY}])
def test_nobody_comes_in_without_a_key(front: httpx.Client, headers: dict[str, str]) -> None:
    assert front.post("/v1/completions", json=BODY, headers=headers).status_code == 401
    assert front.get("/cluster", headers=headers).status_code == 401


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
def test_a_key_is_a_tenants_whatever_its_client_says(
    front: httpx.Client, generator: ScriptedGenerator, headers: dict[str, str]
) -> None:
    generator.script = Script()
    answer = front.post("/v1/completions", json=BODY, headers={**headers, "x-tenant": "mallory"})
    assert answer.status_code == 200, answer.text
    assert generator.terms[-1].tenant == "alice"


@pytest.mark.parametrize(
    "path",
    [
        "/cluster",
        "/cluster/requests",
        "/v1/../cluster",
        "/v1/%2e%2e/cluster",
        "//cluster",
        "/metrics",
        "/slo",
        "/load",
        "/board",
        "/",
        "/v1/load_lora_adapter",
        "/v1//load_lora_adapter",
        "/v1/load%5Flora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/x/../unload_lora_adapter",
    ],
)
def test_operators_paths_are_kept_from_clients(front: httpx.Client, path: str) -> None:
    """However they are written. It is nginx that says so."""
    url = front.base_url.copy_with(raw_path=path.encode())
    for method in ("GET", "POST"):
        answer = front.request(method, url, headers=AS_ALICE)
        assert answer.status_code == 404 and "nginx" in answer.text, answer.text


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/score", "/rerank", "/v2/rerank", "/v1/rerank"])
def test_all_that_clients_may_ask_comes_through(front: httpx.Client, path: str) -> None:
    """Nothing is asked here, so that it is the gateway that answers: that its body is none. More in the path is none of
    these."""
    answer = front.post(path, json=[], headers=AS_ALICE)
    assert answer.status_code == 400 and "error" in answer.json(), answer.text
    assert "nginx" in front.post(f"{path}/x", headers=AS_ALICE).text or path.startswith("/v1/")


def test_tokens_come_as_they_are_made(front: httpx.Client, generator: ScriptedGenerator) -> None:
    """The second one is not made until the first one has come."""
    came: list[str] = []
    generator.script = Script(until=lambda: came)
    with front.stream("POST", "/v1/completions", json={**BODY, "stream": True}, headers=AS_ALICE) as answer:
        for line in answer.iter_lines():
            came.append(line)
    assert came[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(front: httpx.Client, generator: ScriptedGenerator, stream: bool) -> None:
    generator.script = Script(delay_s=HANGS_S)
    before = generator.num_cancelled

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=front.base_url, verify=False, timeout=HANGS_S) as client:
            request = asyncio.create_task(
                client.post("/v1/completions", json={**BODY, "stream": stream}, headers=AS_ALICE)
            )
            await asyncio.to_thread(wait_until, lambda: generator.num_open == 1)
            request.cancel()
            await asyncio.wait({request})

    asyncio.run(leave())
    wait_until(lambda: generator.num_cancelled == before + 1)
