"""The names that models answer to."""

from __future__ import annotations

from collections.abc import Mapping

from ..engine.config import ConfigError
from ..engine.engine import Engine, LoadedModel, UnknownModel
from . import errors

DEFAULT_SPEECH_ALIAS = "whisper-1"  # hard-coded in many clients


class ModelNames:
    """Loaded models by name and by alias. Raises ConfigError for an alias of a model that is not loaded."""

    def __init__(self, engine: Engine, aliases: Mapping[str, str]) -> None:
        self._engine = engine
        self._aliases = dict(aliases)
        loaded = {model.name for model in engine.models()}
        for alias, name in aliases.items():
            if name not in loaded:
                raise ConfigError(f"--served-model-name {alias}={name}: no model {name} is loaded")
        speech = [m.name for m in engine.models() if "transcription" in m.processor.info.capabilities]
        if speech and DEFAULT_SPEECH_ALIAS not in loaded | set(aliases):
            self._aliases[DEFAULT_SPEECH_ALIAS] = speech[0]

    def resolve(self, name: str) -> LoadedModel:
        """Raises ApiError 404."""
        try:
            return self._engine.model(self._aliases.get(name, name))
        except UnknownModel:
            raise errors.model_not_found(name) from None

    @staticmethod
    def require(model: LoadedModel, capability: str) -> None:
        """Raises ApiError 400 when the model cannot do what the endpoint is for."""
        if capability not in model.processor.info.capabilities:
            message = f"The model {errors.shown(model.name)} does not support {capability}."
            raise errors.invalid("model", message, "unsupported_model")

    def listed(self) -> dict[str, LoadedModel]:
        """Every name that is answered, models first, then aliases."""
        named = {model.name: model for model in self._engine.models()}
        return {**named, **{alias: named[name] for alias, name in self._aliases.items()}}
