"""The names that models answer to."""

from __future__ import annotations

from collections.abc import Mapping

from ..engine.config import ConfigError
from ..engine.engine import Engine, LoadedModel, UnknownModel
from . import errors

DEFAULT_SPEECH_ALIAS = "whisper-1"  # hard-coded in many clients


class ModelNames:
    """Loaded models by name and by alias. Raises ConfigError for an alias of a model that is not loaded.

    Models may come and go: an alias is answered while its model is loaded.
    """

    def __init__(self, engine: Engine, aliases: Mapping[str, str]) -> None:
        self._engine = engine
        self._aliases = dict(aliases)
        loaded = {model.name for model in engine.models()}
        for alias, name in aliases.items():
            if name not in loaded:
                raise ConfigError(f"--served-model-name {alias}={name}: no model {name} is loaded")

    def resolve(self, name: str) -> LoadedModel:
        """Raises ApiError 404."""
        try:
            return self._engine.model(self._all_aliases().get(name, name))
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
        aliases = self._all_aliases()
        return {**named, **{alias: named[name] for alias, name in aliases.items() if name in named}}

    def is_alias(self, name: str) -> bool:
        """Whether a name is kept for another model, loaded or not."""
        return name in self._aliases

    def _all_aliases(self) -> dict[str, str]:
        """alias → model, with the one that the first speech model has unless something else is called so."""
        models = self._engine.models()
        speech = [model.name for model in models if "transcription" in model.processor.info.capabilities]
        taken = DEFAULT_SPEECH_ALIAS in self._aliases or any(m.name == DEFAULT_SPEECH_ALIAS for m in models)
        return {**self._aliases, **({} if taken or not speech else {DEFAULT_SPEECH_ALIAS: speech[0]})}
