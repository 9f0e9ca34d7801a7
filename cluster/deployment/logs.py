"""What Legato's modules log in a replica, in the replica's own log file: Ray's dashboard shows it there.

Serve writes it as JSON where the configuration says `logging_config: {encoding: JSON}`, one object a line. What is
logged about a request has its id as `request` (`extra={"request": ...}`), and what is about several as `requests`.
"""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler

from ray.serve._private.constants import SERVE_LOGGER_NAME


def log_with_serve(level: str) -> None:
    """Write what Legato logs into Serve's log of this replica, or to standard error if Serve has none. Call it first in
    a replica's constructor."""
    handlers = [_unbuffered(handler) for handler in logging.getLogger(SERVE_LOGGER_NAME).handlers]
    logging.basicConfig(level=level, handlers=handlers or None, force=True)


def _unbuffered(handler: logging.Handler) -> logging.Handler:
    """A handler like this one that writes each record at once. Serve, which logs every request, collects a thousand
    records before it writes them; Legato logs only what is rare."""
    if not isinstance(handler, MemoryHandler) or handler.target is None:
        return handler
    direct = MemoryHandler(capacity=1, target=handler.target)
    for field_filter in handler.filters:
        direct.addFilter(field_filter)
    return direct
