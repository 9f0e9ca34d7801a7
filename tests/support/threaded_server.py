"""A plain HTTP server for tests, in place of somebody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent: a test looks at what clients make of the answers."""


@contextmanager
def threaded_server(handler: type[QuietHandler]) -> Iterator[str]:
    """Its URL, on a port of its own."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
