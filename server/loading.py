"""A started engine with the named models in it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..models import store

logger = logging.getLogger(__name__)


def served_name(name: str) -> str:
    """What a model is called: a local path is known by its last part, which tells clients no folders."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def start_engine(config: EngineConfig, names: Sequence[str]) -> Engine:
    """Downloads what is missing, loads every model and starts. Raises ModelError."""
    engine = Engine(config)
    for name in names:
        logger.info("loading model=%s", name)
        engine.load(served_name(name), store.resolve(name))
    engine.start()
    return engine
