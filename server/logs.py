"""Log lines: time, level, logger, request id, message. They never hold file contents, text or prompts."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar

from rich.console import Console
from rich.logging import RichHandler

request_id: ContextVar[str] = ContextVar("request_id", default="-")

_LINE = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(request_id)s %(message)s"
_DATE = "%Y-%m-%dT%H:%M:%S"


class _RequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def configure(level: str) -> None:
    """Sends this process's log to standard error: rich on a terminal, one plain UTC line each otherwise."""
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(logging.Formatter("%(request_id)s %(message)s"))
    else:
        handler = logging.StreamHandler()
        formatter = logging.Formatter(_LINE, _DATE)
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    handler.addFilter(_RequestId())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # of libraries
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every malformed upload
    logging.getLogger("sensorium").setLevel(level.upper())
