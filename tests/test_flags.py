from __future__ import annotations

from dataclasses import fields

import pytest
from sensorium.engine.config import ConfigError, EngineConfig
from sensorium.server import flags
from sensorium.server.config import ServerConfig


def parse(*argv: str, environ: dict[str, str] | None = None) -> tuple[ServerConfig, EngineConfig]:
    parser = flags.ArgumentParser("test")
    flags.add_flags(parser, ServerConfig, "server")
    flags.add_flags(parser, EngineConfig, "engine")
    args = parser.parse_args(argv)
    return flags.from_args(ServerConfig, args, environ or {}), flags.from_args(
        EngineConfig, args, environ or {}
    )


def test_no_flags_give_the_defaults() -> None:
    assert parse() == (ServerConfig(), EngineConfig())


def test_every_field_has_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    shown = capsys.readouterr().out
    for config in (ServerConfig, EngineConfig):
        for item in fields(config):
            assert "--" + item.name.replace("_", "-") in shown
            assert item.metadata["help"]


def test_values_of_every_type() -> None:
    server, engine = parse(
        *("--port", "9", "--max-audio-seconds", "1.5", "--model", "a", "b/c", "--model", "d"),
        *("--served-model-name", "x=a", "--no-prefix-caching", "--dtype", "bfloat16"),
    )
    assert (server.port, server.max_audio_seconds) == (9, 1.5)
    assert server.model == ("a", "b/c", "d")
    assert server.aliases == {"x": "a"}
    assert (engine.prefix_caching, engine.dtype) == (False, "bfloat16")


def test_key_from_the_environment() -> None:
    environ = {"SENSORIUM_API_KEY": "from-env"}
    assert parse(environ=environ)[0].api_key == "from-env"
    assert parse("--api-key", "given", environ=environ)[0].api_key == "given"
    assert parse(environ={"SENSORIUM_API_KEY": ""})[0].api_key is None


@pytest.mark.parametrize(
    "argv",
    [("--port", "x"), ("--dtype", "int3"), ("--nope",), ("--max-upload", "5"), ("--port",), ("stray",)],
)
def test_usage_errors_exit_with_1(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        parse(*argv)
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "70000"),
        ("max_queue", "0"),
        ("max_audio_seconds", "nan"),
        ("max_audio_seconds", "inf"),
        ("api_key", " "),
        ("served_model_name", "alias"),
        ("served_model_name", "=a"),
        ("max_inflight_mb", "5"),
        ("kv_cache_mb", "0"),
        ("drain_seconds", "-1"),
    ],
)
def test_values_that_cannot_work(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=flag):
        parse(f"{flag}={value}")


def test_unknown_settings_are_errors() -> None:
    with pytest.raises(ConfigError, match="max_cows"):
        flags.build(ServerConfig, {"max_cows": 3})
