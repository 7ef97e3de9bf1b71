"""Names become files: the order of places, and what each refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from sensorium.models import hub, packs, store
from sensorium.models.base import ModelError
from sensorium.models.hub import CachedRepo, HubName
from sensorium.models.packs import Pack, PackFile
from sensorium.models.store import ModelEntry, ModelStore

FILES = (PackFile("a", ("a",), 3, ""), PackFile("b", ("b",), 4, ""))
PACK = Pack("toy", "", "whisper", "MIT", True, ("toy==1",), 9, FILES)
OTHER = Pack("other", "", "whisper", "BSD", False, ("other==1",), 9, (PackFile("a", ("a",), 1, ""),))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """A store with two packs, of which "toy" is downloaded, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "cache" / "packs" / "toy"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"123")
    (folder / "b").write_bytes(b"1234")
    return ModelStore(tmp_path / "cache", {"toy": PACK, "other": OTHER})


def test_order_of_places(models: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.resolve("toy") == tmp_path / "cache" / "packs" / "toy"
    (tmp_path / "toy").mkdir()
    assert models.resolve("toy") == Path("toy")
    monkeypatch.setattr(hub, "fetch", lambda name, revision: Path(f"/{name}@{revision}"))
    assert models.resolve("o/r:Q8_0", "v1") == Path("/o/r:Q8_0@v1")
    (tmp_path / "o" / "r").mkdir(parents=True)
    assert models.resolve("o/r") == Path("o/r")


def test_home_and_files(models: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert models.resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    "name", ["", "nothing", "/nothing/here", "./a/b", "~nobody-here/x", "x" * 5000, "a\0b", "o/r:"]
)
def test_unknown_names(models: ModelStore, name: str) -> None:
    with pytest.raises(ModelError, match=r"no model .* hub name owner/repo, or one of other, toy") as caught:
        models.resolve(name)
    assert "\n" not in str(caught.value)


def test_revisions_are_of_the_hub(models: ModelStore, tmp_path: Path) -> None:
    for name in ("toy", str(tmp_path)):
        with pytest.raises(ModelError, match="has no revisions"):
            models.resolve(name, "main")


def test_without_download(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.resolve("toy", download=False).name == "toy"
    for name in ("other", "o/r"):
        with pytest.raises(
            ModelError, match=f"^{name} is not downloaded; run: sensorium models pull {name}$"
        ):
            models.resolve(name, download=False)
    (models.cache / "packs" / "toy" / "a").write_bytes(b"12")
    with pytest.raises(ModelError, match="toy is not downloaded"):
        models.resolve("toy", download=False)
    monkeypatch.setattr(hub, "find_cached", lambda name, revision: Path(f"/{name}@{revision}"))
    assert models.resolve("o/r", "v1", download=False) == Path("/o/r@v1")


def test_list(models: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "list_cached", lambda: [CachedRepo("o/r", 12, tmp_path)])
    assert models.list_models() == [
        ModelEntry("toy", "pack", 7, "MIT", models.cache / "packs" / "toy", default=True),
        ModelEntry("other", "pack", 1, "BSD", None),
        ModelEntry("o/r", "hub", 12, "", tmp_path),
    ]
    assert models.defaults() == ["toy"]


def test_remove(models: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.remove("toy")
    assert not (models.cache / "packs" / "toy").exists()
    removed: list[HubName] = []
    monkeypatch.setattr(hub, "remove", removed.append)
    models.remove("o/r")
    assert removed == [HubName("o/r", None)]
    with pytest.raises(ModelError, match="was downloaded"):
        models.remove(str(tmp_path))
    assert tmp_path.is_dir()


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SENSORIUM_CACHE", raising=False)
    assert ModelStore.from_environment().cache == tmp_path / ".cache" / "sensorium"
    monkeypatch.setenv("SENSORIUM_CACHE", "~/elsewhere")
    assert ModelStore.from_environment().cache == tmp_path / "elsewhere"


def test_module_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSORIUM_CACHE", str(tmp_path))
    monkeypatch.setattr(packs, "ensure", lambda pack, root: root / pack.alias)
    assert store.resolve("whisper-base") == tmp_path / "packs" / "whisper-base"
    assert store.default_models() == ["whisper-base", "smollm2-135m-instruct"]
    assert [entry.name for entry in store.list_models()][:2] == ["whisper-base", "whisper-tiny.en"]
    for act in (store.path, store.remove):
        with pytest.raises(ModelError, match=r"whisper-tiny\.en is not downloaded"):
            act("whisper-tiny.en")
