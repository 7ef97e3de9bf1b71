"""`sensorium serve`: models over HTTP."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import types

import uvicorn

from ..engine.config import ConfigError, EngineConfig
from ..engine.engine import Engine
from ..models import store
from ..models.base import ModelError
from . import exits, flags, logs
from .app import create_app
from .config import ServerConfig
from .loading import start_engine

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that none is closed in their face


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds the `serve` command; `run` takes what it parses."""
    summary = "serve models over an OpenAI-compatible HTTP API"
    parser = subparsers.add_parser("serve", help=summary, description=summary)
    flags.add_flags(parser, ServerConfig, "server")
    flags.add_flags(parser, EngineConfig, "engine")
    return parser


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code."""
    try:
        config = flags.from_args(ServerConfig, args)
        engine_config = flags.from_args(EngineConfig, args)
    except ConfigError as error:
        return _refuse(str(error), exits.USAGE)
    logs.configure(config.log_level)
    try:
        listener = bind(config.host, config.port)
    except OSError as error:
        where = f"{config.host}:{config.port}"
        return _refuse(f"cannot listen on {where}: {error.strerror or error}", exits.UNAVAILABLE)
    with listener:
        try:
            engine = start_engine(engine_config, config.model or store.default_models())
        except ModelError as error:
            return _refuse(str(error), exits.UNAVAILABLE)
        except ConfigError as error:
            return _refuse(str(error), exits.USAGE)
        try:
            return _serve(engine, config, listener)
        finally:
            engine.shutdown(drain=False)


def _refuse(message: str, code: int) -> int:
    print(f"sensorium serve: {message}", file=sys.stderr)
    return code


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, taken before models are loaded: a port in use is told at once. Raises OSError.

    Its protocol number is TCP's, not 0: asyncio switches Nagle's delay off for such sockets only.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """uvicorn, which says when it is ready and remembers the signal that ended it."""

    def __init__(self, config: uvicorn.Config, models: list[str]) -> None:
        super().__init__(config)
        self.ended_by: int | None = None
        self._models = models

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = sockets[0].getsockname()[:2] if sockets else ("", 0)
        shown = f"[{host}]" if ":" in host else host
        logger.info("ready on http://%s:%d models=%s", shown, port, ",".join(self._models))

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        self.ended_by = sig
        super().handle_exit(sig, frame)


def _serve(engine: Engine, config: ServerConfig, listener: socket.socket) -> int:
    try:
        app = create_app(engine, config)
    except ConfigError as error:
        return _refuse(str(error), exits.USAGE)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=config.drain_seconds,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ),
        [model.name for model in engine.models()],
    )
    # uvicorn raises the signal again after its shutdown, when the engine still has to be shut down.
    previous = {
        number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return exits.INTERRUPTED if server.ended_by == signal.SIGINT else exits.OK
