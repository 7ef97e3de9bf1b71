"""Fixtures that many tests share: the real recordings and the real models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sensorium.models import store

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def media() -> Path:
    """The folder of real recordings, images and documents (SENSORIUM_MEDIA)."""
    folder = (ROOT / os.environ.get("SENSORIUM_MEDIA", "../shared/media")).resolve()
    if not (folder / "audio").is_dir():
        pytest.fail("the test media are absent: set SENSORIUM_MEDIA to their folder", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def whisper_base_dir() -> Path:
    """Whisper base, multilingual, from its offline pack in the real model cache."""
    return store.resolve("whisper-base")


@pytest.fixture(scope="session")
def whisper_tiny_en_dir() -> Path:
    """Whisper tiny.en from its offline pack in the real model cache."""
    return store.resolve("whisper-tiny.en")
