"""The server's configuration; its command-line flags are generated from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..engine.config import ConfigError, option

MIB = 1024 * 1024
MIN_AUDIO_SECONDS = 0.1  # anything shorter is refused, as by OpenAI


@dataclass(frozen=True)
class ServerConfig:
    """What the server listens on, serves and refuses. Sizes in MiB, times in seconds."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    model: tuple[str, ...] = option((), "model to load (repeatable); without it, the embedded defaults")
    served_model_name: tuple[str, ...] = option((), "ALIAS=NAME: answer to ALIAS too (repeatable)")
    api_key: str | None = option(
        None,
        "key that clients must send; the environment's SENSORIUM_API_KEY",
        env="SENSORIUM_API_KEY",
        secret=True,
    )
    cors_origin: tuple[str, ...] = option((), "origin that browsers may call from, or * (repeatable)")
    max_upload_mb: int = option(200, "largest file a client may upload, in MiB")
    max_audio_seconds: float = option(7200.0, "longest audio that is decoded, in seconds")
    max_inflight_mb: int = option(1024, "uploads held in memory at once, in MiB; more are refused with 429")
    max_decoded_mb: int = option(2048, "decoded audio held at once, in MiB; more uploads wait")
    max_queue: int = option(64, "transcriptions running and waiting; more are refused with 429")
    max_text_queue: int = option(512, "text requests running and waiting; more are refused with 429")
    max_body_mb: int = option(32, "largest JSON body a client may send, in MiB")
    media_workers: int = option(0, "threads that decode media; 0 takes up to four of the cores")
    upload_stall_seconds: float = option(60.0, "longest pause within an upload, in seconds")
    stream_stall_seconds: float = option(30.0, "longest time that a client may leave a stream unread")
    max_stored_responses: int = option(1000, "answers of /v1/responses kept in memory for later requests")
    max_stored_mb: int = option(64, "memory for these answers and their conversations, in MiB")
    allow_model_management: bool = option(False, "let clients load and unload models")
    drain_seconds: int = option(30, "time that running requests get to finish on SIGTERM, in seconds")
    log_level: str = option("info", "least severe log lines", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("--port must be between 0 and 65535")
        at_least_one = ("max_upload_mb", "max_inflight_mb", "max_decoded_mb", "max_queue")
        for name in (*at_least_one, "max_text_queue", "max_body_mb", "max_stored_responses", "max_stored_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("max_audio_seconds", "upload_stall_seconds", "stream_stall_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0")
        if self.media_workers < 0 or self.drain_seconds < 0:
            raise ConfigError("--media-workers and --drain-seconds must be at least 0")
        if self.max_inflight_mb < self.max_upload_mb:
            raise ConfigError("--max-inflight-mb must be at least --max-upload-mb")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key must not be empty")
        if any(not all(self._split(text)) for text in self.served_model_name):
            raise ConfigError("--served-model-name takes ALIAS=NAME")

    @property
    def aliases(self) -> dict[str, str]:
        """alias → name of a loaded model."""
        return dict(self._split(text) for text in self.served_model_name)

    @staticmethod
    def _split(text: str) -> tuple[str, str]:
        alias, _, name = text.partition("=")
        return alias.strip(), name.strip()
