"""Models of the Hugging Face hub, in the hub's own cache (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured).

Fetched are safetensors, GGUF, CTranslate2's model.bin and small JSON and text files; never a pickled
checkpoint and never code.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    CachedRepoInfo,
    CacheNotFound,
    HfApi,
    HfFileSystem,
    constants,
    scan_cache_dir,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from . import ctranslate2
from .base import ModelError
from .weights import INDEX_FILE, SINGLE_FILE, detect_format, read_json

logger = logging.getLogger(__name__)

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?", re.ASCII)
TIMEOUT_SECONDS = 10
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
SIDE_SUFFIXES = (".json", ".txt", ".jinja")
PREFERRED_QUANTS = ("Q4_K_M", "Q8_0")


@dataclass(frozen=True)
class HubName:
    """`owner/repo`, and the quantisation of the GGUF file that is wanted, if one is."""

    repo_id: str
    quant: str | None

    def __str__(self) -> str:
        return f"{self.repo_id}:{self.quant}" if self.quant else self.repo_id


@dataclass(frozen=True)
class CachedRepo:
    repo_id: str
    size: int
    path: Path


def parse(name: str) -> HubName | None:
    """None for what cannot be a hub name."""
    match = NAME.fullmatch(name)
    return HubName(match[1], match[2]) if match else None


def fetch(name: HubName, revision: str | None) -> Path:
    """Downloads what the cache lacks. Returns the snapshot's folder or the GGUF file. Raises ModelError."""
    with _errors(name, revision):
        listing = None if constants.HF_HUB_OFFLINE else _listing(name, revision)
        if listing is None:
            # No connection: what was downloaded before still serves.
            found = find_cached(name, revision)
            if found is None:
                raise ModelError(f"{name} is not downloaded and the hub cannot be reached")
            return found
        chosen = choose(listing, name)
        if ctranslate2.MODEL_FILE in chosen:
            _check_header(name, revision)
        folder = Path(snapshot_download(name.repo_id, revision=revision, allow_patterns=chosen))
    return _result(folder, chosen)


def _listing(name: HubName, revision: str | None) -> list[str] | None:
    """The repository's files; None without a connection."""
    try:
        # One request: the call that lists files tries again for half a minute where there is no network.
        info = HfApi().model_info(name.repo_id, revision=revision, timeout=TIMEOUT_SECONDS)
        return [file.rfilename for file in info.siblings or ()]
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
    except (HTTPError, OSError) as error:
        logger.info("the hub cannot be reached: %s", type(error).__name__)
    return None


def find_cached(name: HubName, revision: str | None) -> Path | None:
    """The same from the cache alone; None if it is not there or not complete."""
    repo = next((r for r in _repos() if r.repo_id == name.repo_id), None)
    for snapshot in repo.revisions if repo else ():
        if revision == snapshot.commit_hash or (revision or "main") in snapshot.refs:
            return _complete(snapshot.snapshot_path, name)
    return None


def _complete(folder: Path, name: HubName) -> Path | None:
    """A snapshot shows a file only once it is whole; here it is checked that none is absent."""
    present = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    try:
        chosen = choose(present, name)
        if INDEX_FILE in chosen:
            shards = read_json(folder / INDEX_FILE).get("weight_map")
            if not isinstance(shards, dict) or any(shard not in present for shard in shards.values()):
                return None
        return _result(folder, chosen)
    except ModelError:
        return None


def list_cached() -> list[CachedRepo]:
    """The models of the hub's cache that can be read, by name."""
    found = []
    for repo in _repos():
        snapshots = sorted(repo.revisions, key=lambda s: ("main" not in s.refs, -s.last_modified))
        path = _complete(snapshots[0].snapshot_path, HubName(repo.repo_id, None)) if snapshots else None
        if path is not None:
            found.append(CachedRepo(repo.repo_id, repo.size_on_disk, path))
    return sorted(found, key=lambda repo: repo.repo_id)


def remove(name: HubName) -> None:
    """Deletes every revision of a repository from the hub's cache. Raises ModelError if there is none."""
    repo = next((r for r in _repos() if r.repo_id == name.repo_id), None)
    if repo is None:
        raise ModelError(f"{name.repo_id} is not downloaded")
    if name.quant is not None:
        raise ModelError(f"a repository is removed as a whole: name {name.repo_id}")
    try:
        shutil.rmtree(repo.repo_path)
    except OSError as error:
        raise ModelError(f"cannot remove {name.repo_id}: {error.strerror}") from None


def _repos() -> list[CachedRepoInfo]:
    try:
        return [repo for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def choose(listing: Sequence[str], name: HubName) -> list[str]:
    """The files of a repository to fetch: one set of weights and the small files at its top level.

    Raises ModelError if there are no weights of a kind that can be read, or several to choose from.
    """
    files = set(listing)
    if name.quant is not None:
        return _gguf(listing, name)
    side = [f for f in listing if "/" not in f and f.endswith(SIDE_SUFFIXES) and ".index." not in f]
    if SINGLE_FILE in files:
        return sorted([SINGLE_FILE, *side])
    if INDEX_FILE in files:
        return sorted([INDEX_FILE, *(f for f in files if SHARD.fullmatch(f)), *side])
    if ctranslate2.MODEL_FILE in files:
        return sorted([ctranslate2.MODEL_FILE, *side])
    if any(f.endswith(".gguf") for f in files):
        return _gguf(listing, name)
    raise ModelError(f"{name.repo_id} has no weights that can be read (safetensors, GGUF or CTranslate2)")


def _gguf(listing: Sequence[str], name: HubName) -> list[str]:
    """The GGUF file of the wanted quantisation, in all its parts; without a wish the only or a usual one."""
    models: dict[str, list[str]] = {}
    for file in sorted(listing):
        if file.endswith(".gguf") and "mmproj" not in file.lower():
            models.setdefault(GGUF_PART.sub("", file.removesuffix(".gguf")), []).append(file)
    wishes = (name.quant,) if name.quant is not None else PREFERRED_QUANTS
    for quant in wishes:
        ending = re.compile(rf"(?:^|[-._/]){re.escape(quant)}$", re.IGNORECASE)
        matches = [stem for stem in models if ending.search(stem)]
        if len(matches) == 1:
            return models[matches[0]]
    if name.quant is None and len(models) == 1:
        return next(iter(models.values()))
    names = ", ".join(Path(stem).name for stem in models) or "none"
    raise ModelError(f"{name} does not name one GGUF file; the repository has: {names}")


def _result(folder: Path, chosen: Sequence[str]) -> Path:
    if chosen[0].endswith(".gguf"):
        return folder / chosen[0]
    detect_format(folder)
    return folder


@contextmanager
def _errors(name: HubName, revision: str | None) -> Iterator[None]:
    """The hub library's exceptions as one line for users."""
    try:
        yield
    except GatedRepoError:
        raise ModelError(f"{name.repo_id} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"the hub has no model {name.repo_id}, or HF_TOKEN may not read it") from None
    except RevisionNotFoundError:
        raise ModelError(f"{name.repo_id} has no revision {revision!r}") from None
    except HfHubHTTPError as error:
        raise ModelError(f"the hub answered {error.response.status_code} for {name.repo_id}") from None
    except (ValueError, EntryNotFoundError) as error:
        raise ModelError(f"{name.repo_id} cannot be fetched from the hub ({type(error).__name__})") from None
    except (HTTPError, RuntimeError) as error:  # RuntimeError: how the Xet transfer library reports failures
        raise ModelError(
            f"the download of {name.repo_id} broke off ({type(error).__name__}); try again"
        ) from None
    except OSError as error:
        raise ModelError(
            f"cannot download {name.repo_id}: {error.strerror or 'the hub is offline'}"
        ) from None


def _check_header(name: HubName, revision: str | None) -> None:
    """Looks at the first bytes of a model.bin before it is fetched: a pickle of that name is not wanted."""
    path = f"{name.repo_id}@{revision or 'main'}/{ctranslate2.MODEL_FILE}"
    with HfFileSystem().open(path, "rb", block_size=ctranslate2.HEADER_BYTES, cache_type="none") as file:
        if not ctranslate2.is_header(file.read(ctranslate2.HEADER_BYTES)):
            raise ModelError(f"{ctranslate2.MODEL_FILE} of {name.repo_id} is not a CTranslate2 model")
