"""What `coli bench` sets up before it measures: arms, prompts, and the block that says where it ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from coli.bench import environment
from coli.bench.arms import ARMS, baseline, opening, parse, runnable
from coli.bench.prompts import BUILT_IN, Prompt, choose, request
from coli.errors import PromptTooLong, UsageError
from coli.session import Request
from coli.settings import Settings, load
from coli.speculation.options import Speculation
from tests.gguf_files import write_gguf
from tests.tiny36 import tiny36_config, tiny36_weights

# ---- arms and prompts ------------------------------------------------------------------------------------------------


QWEN38 = "off,1,2,3,auto,lookup,mtp+lookup"


def test_arms_differ_in_sources_and_depth_only() -> None:
    base = Speculation(drafts=1, pstep=True, lookup_drafts=3)
    got = {arm.name: arm.speculation(base) for arm in parse(QWEN38)}
    assert all(spec.pstep and spec.lookup_drafts == 3 and spec.gate for spec in got.values())
    assert {name: (s.mtp, s.drafts if s.mtp else None, s.lookup) for name, s in got.items()} == {
        "off": (False, None, False), "1": (True, 1, False), "2": (True, 2, False), "3": (True, 3, False),
        "auto": (True, 0, True), "lookup": (False, None, True), "mtp+lookup": (True, 2, True),
    }  # fmt: skip


def test_arms_by_name() -> None:
    assert [arm.name for arm in parse("lookup, off")] == ["lookup", "off"]
    assert baseline(parse("lookup,off")) == "off" and baseline(parse("2,auto")) == "2"
    assert parse(None) == list(ARMS.values()) and [arm.name for arm in parse("7")] == ["7"]
    for wrong in ("8", "", "off,", "off,off"):
        with pytest.raises(UsageError, match="--arms"):
            parse(wrong)


def test_a_model_without_a_head_leaves_arms_out_and_says_which() -> None:
    kept, notes = runnable(parse(None), named=False, head=False, most=3)
    assert [arm.name for arm in kept] == ["off", "auto", "lookup"]
    assert notes == ["arms left out, the model runs without an MTP head: 1, 2, 3, mtp+lookup"]
    assert runnable(parse("1,off"), named=True, head=True, most=3) == (parse("1,off"), [])
    with pytest.raises(UsageError, match="MTP head"):
        runnable(parse("1,2"), named=True, head=False, most=3)


def test_the_arms_of_each_engine_are_as_deep_as_its_head() -> None:
    assert runnable(parse(None), named=False, head=True, most=3) == (parse(QWEN38), [])
    deep, _ = runnable(parse(None), named=False, head=True, most=7)
    assert [arm.name for arm in deep] == ["off", *"1234567", "auto", "lookup", "mtp+lookup"]
    assert runnable(parse("off,7"), named=True, head=True, most=7)[0] == parse("off,7")
    with pytest.raises(UsageError, match="--arms: .*drafts 3 at most, not 5, 7"):
        runnable(parse("off,5,2,7"), named=True, head=True, most=3)


def test_the_engine_opens_for_the_deepest_of_the_arms_and_writes_no_counts() -> None:
    def opened(arms: str | None, engine: str) -> tuple[int, bool]:
        settings = opening(load({"drafts": "1", "mtp": True}, {"COLI_LOOKUP": "0"})[0], parse(arms)).resolve(engine)
        assert not settings.usage_save
        return Speculation.of(settings).deepest, settings.lookup

    assert opened("off,2", "qwen38") == opened("off,2", "qwen36") == (2, False)
    assert opened("auto,off", "qwen38") == (5, True) and opened("1,auto", "qwen36") == (7, True)
    assert opened(None, "qwen38") == (5, True) and opened(None, "qwen36") == (7, True)
    assert opened("off,6", "qwen36") == (7, False) and opened("lookup", "qwen38") == (5, True)


@pytest.mark.parametrize("name", ["COLI_LOOKUP_FORCE", "Q38_MTP_FORCE", "Q36_MTP_FORCE"])
def test_a_benchmark_has_no_reference_to_force_drafts_from(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        opening(load({}, {name: "accept"})[0], parse("off"))


class Templated:
    """What `request` reads of an engine."""

    ctx = 80

    class chat:
        @staticmethod
        def render(messages: list[dict[str, str]], **_: object) -> str:
            return f"<user>{messages[0]['content']}</user>"

    class tokenizer:
        @staticmethod
        def encode(text: str) -> list[int]:
            return list(text.encode())


def test_requests_take_the_template_unless_raw_and_one_seed() -> None:
    def asked(prompt: Prompt, temperature: float | None = None, engine: object = Templated) -> Request:
        return request(prompt, engine, max_tokens=9, temperature=temperature, seed=3)  # type: ignore[arg-type]

    greedy, raw = asked(Prompt("p", "hi")), asked(BUILT_IN["prose"])
    assert bytes(greedy.prompt_ids) == b"<user>hi</user>" and greedy.sampling.greedy and greedy.max_tokens == 9
    assert bytes(raw.prompt_ids).startswith(b"It was") and (raw.sampling.temperature, raw.sampling.seed) == (1.0, 3)
    assert asked(Prompt("p", "hi"), 0.5).sampling.temperature == 0.5 and asked(BUILT_IN["prose"], 0.0).sampling.greedy
    with pytest.raises(PromptTooLong, match="p: the prompt has 95 tokens"):
        asked(Prompt("p", "x" * 80 + "yy"))


def test_prompts_by_task_and_text() -> None:
    assert [prompt.name for prompt in choose([], [])] == list(BUILT_IN)
    assert [prompt.name for prompt in choose(["json", "chat", "json"], [])] == ["json", "chat"]
    assert [(p.name, p.text) for p in choose([], ["a", "b"])] == [("prompt 1", "a"), ("prompt 2", "b")]
    assert [p.name for p in choose(["prose"], ["a"])] == ["prose", "prompt"]
    assert BUILT_IN["prose"].temperature == 1.0 and BUILT_IN["prose"].raw
    with pytest.raises(UsageError, match="--task"):
        choose(["poem"], [])


# ---- environment -----------------------------------------------------------------------------------------------------


def test_the_fingerprint_sees_config_and_headers_but_no_data(tmp_path: Path) -> None:
    def write(config: str, header: bytes, data: bytes) -> str:
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        return environment.fingerprint(tmp_path)

    first = write("{}", b'{"a":1}', b"x")
    assert first == write("{}", b'{"a":1}', b"other data") and len(first) == 64
    assert len({first, write('{"b":2}', b'{"a":1}', b"x"), write("{}", b'{"a":2}', b"x")}) == 3


def test_the_fingerprint_of_a_gguf_is_that_of_what_stands_before_its_data(tmp_path: Path) -> None:
    config = tiny36_config("qwen3_moe", num_hidden_layers=1)

    def write(name: str, seed: int, theta: float) -> str:
        weights, folder = tiny36_weights(config, seed), tmp_path / name
        folder.mkdir()
        changed = {**config, "rope_theta": theta}
        return environment.fingerprint(write_gguf(folder / "m.gguf", changed, weights, splits=2))

    first = write("a", 1, 1e4)
    assert first == write("b", 2, 1e4) != write("c", 1, 1e5) and len(first) == 64


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Fast One 9000\n")
    assert environment.cpu_model(info) == "Fast One 9000"
    assert environment.cpu_model(tmp_path / "none")


def test_settings_given_are_named_by_their_variables() -> None:
    settings, _ = load({"ctx": 100, "drafts": "auto"}, {"COLI_THREADS": "2", "Q38_MTP_CAP": "3"})
    assert environment.given(settings.resolve("qwen38")) == {
        "COLI_CTX": "100", "COLI_THREADS": "2", "Q38_MTP_DRAFTS": "auto", "Q38_MTP_CAP": "3",
    }  # fmt: skip
    assert environment.given(settings.resolve("qwen36")) == {
        "COLI_CTX": "100", "COLI_THREADS": "2", "Q36_MTP_DRAFTS": "auto",
    }  # fmt: skip
    assert environment.given(Settings()) == {}
