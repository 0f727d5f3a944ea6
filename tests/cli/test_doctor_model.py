"""`coli doctor` on what lies beside the weights: checksums, text, sidecars, histories, a mirror; and on the plan."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from coli.doctor.checksums import digest, listed
from coli.doctor.finding import ERROR, OK, WARN
from tests.containers import write_sidecar
from tests.doctoring import SHARDS, bad, contents, named, of, only
from tests.tiny import tiny_config, tiny_weights, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

# ---- checksums -------------------------------------------------------------------------------------------------------


def sums(model: Path, names: list[str]) -> str:
    return "".join(f"{hashlib.sha256((model / name).read_bytes()).hexdigest()}  {name}\n" for name in names)


def test_listed_checksums(model: Path) -> None:
    (model / "SHA256SUMS").write_text(sums(model, SHARDS) + "0" * 64 + "  absent.bin\n" + "0" * 64 + " */etc/passwd\n")
    shallow, said = of(model), []
    assert "4 files listed in SHA256SUMS; --deep" in only(shallow, "checksums").what
    deep = of(model, deep=True, say=said.append)
    assert bad(deep) == [] and only(deep, "checksums").facts["same"] == 4
    assert any(text.startswith("checksums: ") and SHARDS[3] in text for text in said)
    with open(model / SHARDS[1], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert bad(of(model)) == [], "only the bytes tell"
    report = of(model, deep=True)
    ((check, what),) = bad(report)
    assert check == "checksums" and SHARDS[1] in what and "SHA256SUMS says" in what and report.exit_code == 1
    facts = next(finding.facts for finding in report.findings if finding.status == ERROR)
    assert facts["found"] == hashlib.sha256((model / SHARDS[1]).read_bytes()).hexdigest()


@pytest.mark.parametrize("form", ["{sum}\n", "{sum}  {name}\n", "{sum} *{name}\r\n", "SHA256 ({name}) = {sum}\n"])
def test_forms_of_sum_files(tmp_path: Path, form: str) -> None:
    (tmp_path / "a.gguf").write_bytes(b"some bytes")
    expected = hashlib.sha256(b"some bytes").hexdigest()
    (tmp_path / "a.gguf.sha256").write_bytes(form.format(sum=expected.upper(), name="a.gguf").encode())
    for model in (tmp_path, tmp_path / "a.gguf"):
        (entry,) = listed(model)
        assert (entry.path, entry.kind, entry.digest) == (tmp_path / "a.gguf", "sha256", expected)
    assert listed(tmp_path / "b.gguf") == [], "of a file only its own parts"


def test_a_download_by_hf_brings_its_etags(model: Path) -> None:
    """The id of a small file is the one `git hash-object` prints (of "hello\\n" it is ce0136...)."""
    (model / "note.md").write_text("hello\n")
    home = model / ".cache" / "huggingface" / "download"
    home.mkdir(parents=True)
    now = time.time()

    def listing(name: str, etag: str) -> None:
        (home / f"{name}.metadata").write_text(f"{'c' * 40}\n{etag}\n{now}\n")

    listing("note.md", "ce013625030ba8dba906f756967f9e9ca394464a")
    listing(SHARDS[0], hashlib.sha256((model / SHARDS[0]).read_bytes()).hexdigest())
    listing("config.json", "0" * 40)
    listing("odd.bin", "not-an-etag")
    os.utime(model / "config.json", (now - 60, now - 60))
    report = of(model, deep=True)
    ((_, what),) = bad(report)
    assert "config.json has the git" in what and report.exit_code == 1
    os.utime(model / "config.json", (now + 60, now + 60))
    report = of(model, deep=True)
    ((_, what),) = bad(report)
    assert "config.json was changed after its download" in what and report.exit_code == 0
    assert next(f for f in report.findings if f.check == "checksums" and f.status == OK).facts["same"] == 2
    listing(SHARDS[0], "0" * 64)
    os.utime(model / SHARDS[0], (now + 60, now + 60))
    assert of(model, deep=True).exit_code == 1, "weights are nobody's to edit"


def test_links_of_the_hub_cache_are_named_by_their_checksum(whole: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("d" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for path in whole.iterdir():
        content = path.read_bytes()
        large = path.suffix == ".safetensors"
        name = hashlib.sha256(content).hexdigest() if large else digest(path, {"git"})["git"]
        shutil.copy(path, repo / "blobs" / name)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    report = of(snapshot, deep=True)
    assert bad(report) == [] and only(report, "checksums").facts["same"] == len(list(whole.iterdir()))
    os.truncate((snapshot / SHARDS[0]).resolve(), 5000)
    (repo / "blobs" / "x.incomplete").write_bytes(b"x")
    assert {check for check, _ in bad(of(snapshot, deep=True))} == {"files", "leftovers", "checksums"}
    (snapshot / SHARDS[0]).resolve().unlink()
    assert "missing" in bad(of(snapshot))[0][1], "a link to nothing"


def test_a_file_that_cannot_be_read_is_an_error_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "SHA256SUMS").write_text(sums(model, SHARDS))

    def fails(path: Path, *_: object) -> dict[str, str]:
        if path.name == SHARDS[1]:
            raise OSError(5, "Input/output error")
        return digest(path, {"sha256"})

    monkeypatch.setattr("coli.doctor.checksums.digest", fails)
    report = of(model, deep=True)
    ((_, what),) = bad(report)
    assert SHARDS[1] in what and "errno 5" in what
    assert next(f for f in report.findings if f.check == "checksums" and f.status == OK).facts["same"] == 3


# ---- text ------------------------------------------------------------------------------------------------------------


def test_text_files(model: Path) -> None:
    shutil.copy(model / "tokenizer.json", model / "keep")
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{% for %}")
    report = of(model)
    assert [check for check, _ in bad(report)] == ["tokenizer"] and {"template", "stop tokens"} <= set(report.skipped)
    os.replace(model / "keep", model / "tokenizer.json")
    report = of(model)
    assert [check for check, _ in bad(report)] == ["template"] and report.exit_code == 1
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert "refuses" in only(of(model), "template").what
    (model / "chat_template.jinja").unlink()
    report = of(model)
    assert [check for check, _ in bad(report)] == ["template"] and report.exit_code == 0


def test_stop_tokens(tmp_path: Path) -> None:
    model = write_tiny36(tmp_path / "m", tiny36_config("qwen3_5_moe_text", eos_token_id=None))
    assert bad(of(model)) == []
    (model / "generation_config.json").unlink()
    assert "names none" in only(of(model), "stop tokens").what
    (model / "generation_config.json").write_text('{"eos_token_id": [256, 9999]}')
    finding = only(of(model), "stop tokens")
    assert finding.status == WARN and "9999 beyond the vocabulary of 272" in finding.what
    (model / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert only(of(model), "stop tokens").status == ERROR


def test_a_tokenizer_of_a_larger_model(model: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    library = Tokenizer.from_file(str(model / "tokenizer.json"))
    library.add_tokens([AddedToken(f"<{number}>") for number in range(20)])
    library.save(str(model / "tokenizer.json"))
    finding = only(of(model), "tokenizer")
    assert finding.status == ERROR and "281 tokens, the model has rows for 272" in finding.what


# ---- experts, memory, histories --------------------------------------------------------------------------------------


def test_sidecars(model: Path) -> None:
    write_sidecar(model, tiny_weights(tiny_config()), bits=4, group=32)
    assert bad(of(model)) == [] and "complete" in only(of(model), "sidecars").what
    folder = model / "experts-int4g32"
    (folder / "layer-003.safetensors").unlink()
    report = of(model)
    assert "layers.3" in only(report, "sidecars").what and report.exit_code == 0, "the model has its own experts"
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"complete": False}))
    (model / "convert.json").write_text('{"complete": false}')
    (folder / "layer-004.safetensors.part").write_bytes(b"x")
    texts = [what for check, what in bad(of(model)) if check == "sidecars"]
    assert len(texts) == 2 and "has not come to its end" in texts[0] and "not complete" in texts[1]


def test_a_model_whose_experts_are_in_a_broken_sidecar(tmp_path: Path) -> None:
    weights = tiny_weights(tiny_config())
    bare = write_tiny(tmp_path / "m", change=lambda w: [w.pop(name) for name in list(w) if ".mlp.experts." in name])
    write_sidecar(bare, weights)
    assert bad(of(bare)) == [], "it runs from its sidecar"
    (bare / "experts-int4g64" / "layer-003.safetensors").unlink()
    report = of(bare)
    assert report.exit_code == 1 and any("layer 3" in what or "layers.3" in what for _, what in bad(report))


def test_ram_against_the_plan(model: Path) -> None:
    """1 MB is less than anything needs: the error has both numbers."""
    finding = only(of(model, checks=named("plan"), RAM_GB="0.001"), "plan")
    assert finding.status == ERROR and "the budget is 1.00 MB" in finding.what and "needs at least 1" in finding.what
    assert "--ram" in finding.hint
    well = only(of(model, checks=named("plan"), RAM_GB="1"), "plan")
    assert well.status == OK and well.facts["total"] <= well.facts["budget"] == 1_000_000_000
    assert well.facts["total"] == sum(well.facts["terms"].values()) + well.facts["experts"] + well.facts["head_experts"]
    beyond = only(of(model, checks=named("plan"), COLI_CTX="99999"), "plan")
    assert beyond.status == ERROR and "99,999" in beyond.what


def test_histories_are_read_and_left_alone(model: Path) -> None:
    well = [finding.what for finding in of(model).findings if finding.check == "histories"]
    assert well == ["experts used: no file yet", "tokens used: no file yet"]
    (model / ".coli_usage").write_text("-1 8 8\n-2 1 38\n0 1 5\n")
    (model / ".coli_vocab").write_bytes(b"what is this")
    before = contents(model)
    ((check, what),) = bad(of(model))
    assert check == "histories" and ".coli_vocab" in what and "neither used nor changed" in what
    (model / ".coli_usage").write_text("-1 8 8\n-2 1 36\n0 1 5\n")
    assert "engine qwen36" in bad(of(model))[0][1]
    (model / ".coli_usage").write_text("-1 8 8\n-2 1 38\n0 1 5\n")
    assert contents(model)[str(model / ".coli_vocab")] == before[str(model / ".coli_vocab")]
    same = of(model, COLI_USAGE=str(model / "one"), COLI_VOCAB_USAGE=str(model / "one"))
    assert any("expert history's file" in what for _, what in bad(same))


def test_a_mirror(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    assert "none of the mirror" in only(of(model, COLI_MODEL_MIRROR=str(tmp_path / "mirror")), "mirror").what
    for name in SHARDS:
        shutil.copy(model / name, tmp_path / "mirror")
    finding = only(of(model, COLI_MODEL_MIRROR=str(tmp_path / "mirror")), "mirror")
    assert finding.status == WARN and "same file system" in finding.what
