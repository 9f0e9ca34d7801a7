"""A Hugging Face hub for one repository on 127.0.0.1, as far as `snapshot_download` needs one."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlparse

from tests.support.threaded_server import QuietHandler, threaded_server

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def serve_repository(
    repository: str, files: dict[str, bytes], asked: list[str] | None = None, commit: str = _COMMIT
) -> AbstractContextManager[str]:
    """The endpoint to give as HF_ENDPOINT; every other repository is unknown there. `asked`: gets the paths. `commit`:
    the newest one, 40 hexadecimal digits."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            path = urlparse(self.path).path
            if asked is not None:
                asked.append(path)
            if path.startswith(f"/api/models/{repository}/tree/"):
                self._answer(json.dumps(_tree(files)).encode())
            elif path.startswith(f"/api/models/{repository}"):
                siblings = [{"rfilename": name} for name in files]
                self._answer(json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode())
            elif path.startswith(f"/{repository}/resolve/") and path.split("/", 5)[-1] in files:
                self._answer(files[path.split("/", 5)[-1]])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return threaded_server(Handler)


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
        for name, body in files.items()
    ]
