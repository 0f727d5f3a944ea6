"""The table of variables: precedence, strictness, warnings, and that every row keeps the same promises."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from coli.errors import UsageError
from coli.settings import TABLE, Settings, load, no_effect


def test_nothing_given_is_the_defaults() -> None:
    settings, warnings = load({}, {})
    assert settings == Settings() and warnings == []
    assert all(settings.origin(name) == "default" for name in TABLE)


def test_every_field_is_a_row_and_names_are_unique() -> None:
    assert {f.name for f in fields(Settings)} - {"origins"} == set(TABLE)
    assert len({row.name for row in TABLE.values()}) == len(TABLE)
    for name, row in TABLE.items():
        default = getattr(Settings(), name)
        assert row.help and row.kind.range and row.engines
        assert (default is None) == bool(row.unset), f"{row.name}: a default of None says what it means"
        if default is not None and row.name != "NO_COLOR":
            assert row.kind.parse(row.kind.show(default)) == default


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().ctx = 1  # type: ignore[misc]


def test_flag_beats_variable_beats_default() -> None:
    environ = {"COLI_CTX": "100", "COLI_CAP": "7"}
    settings, _ = load({"ctx": 50, "cap": None}, environ)
    assert (settings.ctx, settings.cap, settings.threads) == (50, 7, None)
    assert [settings.origin(name) for name in ("ctx", "cap", "threads")] == ["flag", "variable", "default"]


def test_a_flag_overrides_a_bad_variable() -> None:
    assert load({"ctx": 50}, {"COLI_CTX": "many"})[0].ctx == 50


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("COLI_MODEL", "org/name", "model", "org/name"),
        ("COLI_CTX", "4096", "ctx", 4096),
        ("RAM_GB", "1.5", "ram", 1_500_000_000),
        ("COLI_CAP", "1", "cap", 1),
        ("COLI_THREADS", "2", "threads", 2),
        ("COLI_SIMD", "0", "simd", False),
        ("COLI_CACHE", "/tmp/x", "cache_dir", Path("/tmp/x")),
        ("COLI_ACT", "f32", "act", "f32"),
        ("Q38_TRUNK_CPU_INT8", "1", "trunk_int8", True),
        ("COLI_PREFILL_CHUNK", "512", "prefill_chunk", 512),
        ("COLI_DEBUG", "1", "debug", True),
        ("NO_COLOR", "please", "no_color", True),
        ("NO_COLOR", "", "no_color", False),
    ],
)
def test_values(name: str, text: str, field: str, value: object) -> None:
    assert getattr(load({}, {name: text})[0], field) == value


@pytest.mark.parametrize("name", [row.name for row in TABLE.values() if row.kind.range == "0 or 1"])
@pytest.mark.parametrize("text", ["", "2", "01", "true", "yes", "on", " 1", "-0"])
def test_booleans_are_exactly_0_or_1(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load({}, {name: text})
    assert name in str(caught.value) and "0 or 1" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("COLI_CTX", "0"), ("COLI_CTX", "-5"), ("COLI_CTX", "8k"), ("COLI_CTX", "1_000"), ("COLI_CTX", ""),
        ("COLI_CTX", "9" * 5000), ("COLI_PREFILL_CHUNK", "513"), ("COLI_THREADS", "0"), ("COLI_CAP", "1.5"),
        ("RAM_GB", "0"), ("RAM_GB", "nan"), ("RAM_GB", "inf"), ("RAM_GB", "-1"), ("RAM_GB", "16GB"),
        ("COLI_ACT", "INT8"), ("COLI_MODEL", ""), ("COLI_CACHE", " "),
    ],
)  # fmt: skip
def test_bad_values_name_the_variable_and_its_range(name: str, text: str) -> None:
    row = next(row for row in TABLE.values() if row.name == name)
    with pytest.raises(UsageError) as caught:
        load({}, {name: text})
    assert caught.value.where == name and row.kind.range in caught.value.hint


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [("ctx", 0, "--ctx"), ("ram", float("nan"), "--ram"), ("threads", 5000, "--threads"), ("model", "", "--model")],
)
def test_bad_flags_name_the_flag(field: str, value: object, flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        load({field: value}, {})
    assert caught.value.where == flag


@pytest.mark.parametrize(("name", "nearest"), [("COLI_THREAD", "COLI_THREADS"), ("COLI_CONTEXT", "COLI_CTX"),
                                               ("Q38_TRUNK_INT8", "Q38_TRUNK_CPU_INT8")])  # fmt: skip
def test_an_unknown_name_is_one_warning_with_the_nearest(name: str, nearest: str) -> None:
    _, warnings = load({}, {name: "1", "PATH": "/bin", "COLIBRI": "1"})
    assert len(warnings) == 1 and name in warnings[0] and nearest in warnings[0]


def test_another_engines_variable_is_named_as_having_no_effect() -> None:
    _, (warning,) = load({}, {"Q36_MTP": "1"})
    assert "Q36_MTP has no effect" in warning and "qwen36" in warning
    settings, _ = load({}, {"Q38_TRUNK_CPU_INT8": "1"})
    assert no_effect(settings, "qwen38") == []
    assert "qwen38" in no_effect(settings, "glm52")[0]
    assert no_effect(Settings(), "glm52") == []


def test_strict_makes_an_unknown_name_an_error() -> None:
    with pytest.raises(UsageError, match="COLI_CTXX"):
        load({}, {"COLI_CTXX": "1", "COLI_ENV_STRICT": "1"})
    load({}, {"COLI_ENV_STRICT": "1", "COLI_CTX": "10"})


@pytest.mark.parametrize("name, why", [
    ("COLI_MTP_GUARD_PCT", "colibri"), ("DRAFT", "colibri"), ("Q38_MTP_CHAIN", "device"), ("Q36_MTP", "qwen36"),
])  # fmt: skip
def test_a_variable_of_another_engine_or_device_is_named_with_its_owner(name, why):
    warnings = load({}, {name: "1"})[1]
    assert len(warnings) == 1 and warnings[0].startswith(f"{name} has no effect") and why in warnings[0]
