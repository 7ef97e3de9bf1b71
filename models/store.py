"""Where models come from: a name becomes files.

A name is, in this order: a local directory or file; the alias of an offline pack (`packs.toml`); a
repository of the Hugging Face hub, `owner/repo`, or `owner/repo:QUANT` for one of its GGUF files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import hub, packs
from .base import ModelError
from .packs import Pack

PACKS_FILE = Path(__file__).with_name("packs.toml")


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be named: where it comes from, its bytes on disk, and its path once it is there."""

    name: str
    source: Literal["pack", "hub"]
    size: int
    license: str
    path: Path | None
    default: bool = False


@dataclass(frozen=True)
class ModelStore:
    """The packs, and the cache folder that holds them. Hub models live in the hub's own cache."""

    cache: Path
    packs: Mapping[str, Pack]

    @classmethod
    def from_environment(cls) -> ModelStore:
        """Cache folder SENSORIUM_CACHE, by default ~/.cache/sensorium."""
        configured = os.environ.get("SENSORIUM_CACHE")
        cache = Path(configured) if configured else Path.home() / ".cache" / "sensorium"
        return cls(cache.expanduser(), packs.read_packs(PACKS_FILE))

    @property
    def _root(self) -> Path:
        return self.cache / "packs"

    def resolve(self, name: str, revision: str | None = None, download: bool = True) -> Path:
        """The directory (or GGUF file) of a model, downloaded if need be and allowed.

        revision: branch, tag or commit of a hub repository. Raises ModelError.
        """
        hub_name = hub.parse(name)
        local = _local(name)
        if local is not None or name in self.packs:
            if revision is not None:
                raise ModelError(f"{name} has no revisions: only models of the hub do")
            return local or self._pack_path(self.packs[name], download)
        if hub_name is None:
            known = ", ".join(sorted(self.packs))
            raise ModelError(
                f"no model {name!r}: give a local path, a hub name owner/repo, or one of {known}"
            )
        if download:
            return hub.fetch(hub_name, revision)
        found = hub.find_cached(hub_name, revision)
        if found is None:
            raise ModelError(f"{name} is not downloaded; run: sensorium models pull {name}")
        return found

    def _pack_path(self, pack: Pack, download: bool) -> Path:
        if download:
            return packs.ensure(pack, self._root)
        folder = self._root / pack.alias
        if not packs.is_intact(pack, folder):
            raise ModelError(f"{pack.alias} is not downloaded; run: sensorium models pull {pack.alias}")
        return folder

    def list_models(self) -> list[ModelEntry]:
        """Every pack, then every hub model in the hub's cache that can be read."""
        entries = []
        for pack in self.packs.values():
            folder = self._root / pack.alias
            path = folder if packs.is_intact(pack, folder) else None
            entries.append(ModelEntry(pack.alias, "pack", pack.size, pack.license, path, pack.default))
        for repo in hub.list_cached():
            entries.append(ModelEntry(repo.repo_id, "hub", repo.size, "", repo.path))
        return entries

    def remove(self, name: str) -> None:
        """Deletes a downloaded model. A local path is never deleted. Raises ModelError."""
        hub_name = hub.parse(name)
        if name in self.packs:
            packs.remove(self.packs[name], self._root)
        elif hub_name is not None:
            hub.remove(hub_name)
        else:
            raise ModelError(f"no model {name!r} was downloaded")

    def defaults(self) -> list[str]:
        """Names of the models that are served when none is named."""
        return [pack.alias for pack in self.packs.values() if pack.default]


def _local(name: str) -> Path | None:
    """An existing file or directory; None for every other text, however strange."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):  # longer than a file name may be; the home of an unknown user
        return None


def resolve(name: str, revision: str | None = None, download: bool = True) -> Path:
    """`ModelStore.resolve` with the store of this environment."""
    return ModelStore.from_environment().resolve(name, revision, download)


def path(name: str, revision: str | None = None) -> Path:
    """Where a model is, without downloading it. Raises ModelError if it is not there."""
    return resolve(name, revision, download=False)


def list_models() -> list[ModelEntry]:
    """`ModelStore.list_models` with the store of this environment."""
    return ModelStore.from_environment().list_models()


def remove(name: str) -> None:
    """`ModelStore.remove` with the store of this environment."""
    ModelStore.from_environment().remove(name)


def default_models() -> list[str]:
    """`ModelStore.defaults` with the store of this environment."""
    return ModelStore.from_environment().defaults()
