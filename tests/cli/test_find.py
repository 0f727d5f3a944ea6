"""Model references: folder, Hugging Face id in the local cache, the shipped model; refusals say what was tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from coli.errors import ModelError
from coli.models.find import NANO, find, hub_cache


def hub(tmp_path: Path, revision: str = "main", commit: str = "abc123") -> dict[str, str]:
    repo = tmp_path / "hub" / "models--org--some.name"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / revision).write_text(commit)
    return {"HF_HOME": str(tmp_path)}


def test_nothing_is_the_shipped_model() -> None:
    assert find(None) == NANO and (NANO / "config.json").is_file()


def test_a_folder_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = hub(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find("org/some.name", environ).name == "abc123"
    (tmp_path / "org" / "some.name").mkdir(parents=True)
    assert find("org/some.name", environ) == Path("org/some.name")


def test_an_id_takes_revisions_and_commits(tmp_path: Path) -> None:
    environ = hub(tmp_path, revision="v2")
    assert find("org/some.name@v2", environ).name == "abc123"
    assert find("org/some.name@abc123", environ).name == "abc123"
    with pytest.raises(ModelError, match="no revision main, only abc123"):
        find("org/some.name", environ)


def test_the_cache_folder_follows_the_hubs_variables() -> None:
    assert hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hub_cache({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/b/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert hub_cache({}) == Path("~/.cache/huggingface/hub").expanduser()


def test_a_model_that_is_nowhere_says_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        find("org/none", {"HF_HOME": str(tmp_path)})
    assert str(tmp_path / "hub" / "models--org--none") in str(caught.value) and "org/none" in caught.value.where


@pytest.mark.parametrize("name", ["x.gguf", "x.GGUF"])
def test_a_gguf_file_is_a_model(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert find(str(tmp_path / name)) == tmp_path / name
    with pytest.raises(ModelError, match="no such file"):
        find(str(tmp_path / "other.gguf"))


@pytest.mark.parametrize("reference", ["nowhere", "a/b/c", "../x/y z", "~nobody-here/x", "a\0b", "x" * 5000, "org/..",
                                       "org/name@../../../etc"])  # fmt: skip
def test_hostile_references_are_one_error(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        find(reference, {"HF_HOME": str(tmp_path)})


def test_a_ref_file_cannot_lead_out_of_the_snapshots(tmp_path: Path) -> None:
    environ = hub(tmp_path)
    (tmp_path / "hub" / "models--org--some.name" / "refs" / "main").write_text("../../../..")
    with pytest.raises(ModelError):
        find("org/some.name", environ)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="where a folder or a .gguf file is needed"):
        find(str(tmp_path / "model.safetensors"))
