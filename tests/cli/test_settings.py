"""The table of variables: precedence, strictness, warnings, and that every row keeps the same promises."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from coli.errors import UsageError
from coli.settings import ENGINES, PREFIX, TABLE, VARIABLES, Settings, load, no_effect


def test_nothing_given_is_the_defaults() -> None:
    settings, warnings = load({}, {})
    assert settings == Settings() and warnings == []
    assert all(settings.origin(name) == "default" for name in TABLE)


def test_every_field_is_a_row_and_names_are_unique() -> None:
    assert {f.name for f in fields(Settings)} - {"engine", "flags", "given", "overrides"} == set(TABLE)
    assert len({row.name for row in VARIABLES}) == len(VARIABLES)
    assert all(getattr(Settings(), name) == rows[0].default for name, rows in TABLE.items())
    for row in VARIABLES:
        assert row.help and row.kind.range and row.engines
        assert (row.default is None) == bool(row.unset), f"{row.name}: a default of None says what it means"
        if row.default is not None and row.name != "NO_COLOR":
            assert row.kind.parse(row.kind.show(row.default)) == row.default


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
        ("Q38_TRUNK_CPU_INT8", "0", "trunk", "stored"),
        ("COLI_TRUNK", "int8", "trunk_int8", True),
        ("COLI_EXPERTS", "int4", "experts", "int4"),
        ("COLI_PREFILL_CHUNK", "512", "prefill_chunk", 512),
        ("COLI_DEBUG", "1", "debug", True),
        ("NO_COLOR", "please", "no_color", True),
        ("NO_COLOR", "", "no_color", False),
    ],
)
def test_values(name: str, text: str, field: str, value: object) -> None:
    assert getattr(load({}, {name: text})[0], field) == value


@pytest.mark.parametrize("name", [row.name for row in VARIABLES if row.kind.range == "0 or 1"])
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
        ("COLI_ACT", "INT8"), ("COLI_MODEL", ""), ("COLI_CACHE", " "), ("COLI_TRUNK", "1"), ("COLI_EXPERTS", "int3"),
        ("Q36_MTP_PMIN", "1.5"), ("Q36_MTP_PMIN", "-0.1"), ("Q36_MTP_PMIN", "nan"), ("Q36_MTP_PMIN", "1e-2"),
        ("Q36_MTP_PMIN", ""), ("Q36_MTP_DRAFTS", "8"), ("Q36_MTP_VOCAB_IDS", ""), ("Q36_MTP_FORCE", "row9"),
    ],
)  # fmt: skip
def test_bad_values_name_the_variable_and_its_range(name: str, text: str) -> None:
    row = next(row for row in VARIABLES if row.name == name)
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
    settings, warnings = load({}, {"Q36_MTP": "1", "Q38_TRUNK_CPU_INT8": "1"})
    assert warnings == []  # which engine runs is not known yet
    assert no_effect(settings, "qwen38") == ["Q36_MTP has no effect on the engine qwen38: it belongs to qwen36"]
    assert no_effect(settings, "qwen36") == [
        "Q38_TRUNK_CPU_INT8 has no effect on the engine qwen36: it belongs to qwen38"
    ]
    assert no_effect(Settings(), "qwen36") == []


def test_another_engines_flag_is_too() -> None:
    settings, _ = load({"mtp_wiring": "a", "mtp_pmin": 0.5, "drafts": "2"}, {})
    assert no_effect(settings, "qwen36") == ["--mtp-wiring has no effect on the engine qwen36: it belongs to qwen38"]
    assert no_effect(settings, "qwen38") == ["--pmin has no effect on the engine qwen38: it belongs to qwen36"]
    assert settings.resolve("qwen36").mtp_wiring == "b" and settings.resolve("qwen38").mtp_pmin == 0.0


# ---- two engines -----------------------------------------------------------------------------------------------------

OWN = ("mtp", "drafts", "mtp_pmin", "mtp_vocab", "mtp_vocab_ids", "mtp_cap", "mtp_pstep", "mtp_force", "mtp_dump")


def test_the_defaults_of_each_engine_are_the_laws() -> None:
    settings, _ = load({}, {})
    assert [getattr(settings.resolve("qwen38"), name) for name in OWN] == [None, 2, 0.0, 16000] + [None] * 2 + [
        False, None, None,
    ]  # fmt: skip
    assert [getattr(settings.resolve("qwen36"), name) for name in OWN] == [False, 1, 0.0, 16000] + [None] * 2 + [
        True, None, None,
    ]  # fmt: skip
    assert settings.resolve("qwen38") == settings and settings.resolve("qwen36").engine == "qwen36"


@pytest.mark.parametrize(("engine", "own", "other"), [("qwen38", "2", "5"), ("qwen36", "5", "2")])
def test_each_engine_reads_its_own_variable(engine: str, own: str, other: str) -> None:
    environ = {f"{PREFIX[name]}MTP_DRAFTS": own if name == engine else other for name in ENGINES}
    settings = load({}, environ)[0].resolve(engine)
    assert settings.drafts == int(own) and settings.origin("drafts") == "variable"
    assert settings.row("drafts").name == f"{PREFIX[engine]}MTP_DRAFTS"
    alone = load({}, {name: text for name, text in environ.items() if text == other})[0].resolve(engine)
    assert alone.origin("drafts") == "default" and alone.drafts == {"qwen38": 2, "qwen36": 1}[engine]


def test_a_flag_is_for_whichever_engine_runs_and_beats_both_variables() -> None:
    settings, _ = load({"drafts": "3", "mtp": True, "mtp_vocab": 7}, {"Q38_MTP_DRAFTS": "1", "Q36_MTP": "0"})
    for engine in ENGINES:
        found = settings.resolve(engine)
        assert (found.drafts, found.mtp, found.mtp_vocab, found.origin("drafts")) == (3, True, 7, "flag")
    assert load({"drafts": "auto"}, {})[0].resolve("qwen36").drafts == 0


def test_a_flag_out_of_the_running_engines_range_names_flag_engine_and_range() -> None:
    settings, _ = load({"drafts": "7"}, {})
    assert settings.resolve("qwen36").drafts == 7
    with pytest.raises(UsageError) as caught:
        settings.resolve("qwen38")
    assert str(caught.value) == "--drafts: '7' is out of range for the engine qwen38 (give 0..3 or auto)"


def test_a_flag_out_of_every_engines_range_is_found_before_an_engine_is_known() -> None:
    with pytest.raises(UsageError) as caught:
        load({"drafts": "8"}, {})
    assert caught.value.where == "--drafts" and caught.value.hint == "give 0..3 or auto (qwen38), 0..7 or auto (qwen36)"


def test_the_older_name_yields_to_the_newer_and_both_to_the_flag() -> None:
    both = {"COLI_TRUNK": "stored", "Q38_TRUNK_CPU_INT8": "1"}
    assert load({}, both)[0].resolve("qwen38").trunk == "stored"
    assert load({"trunk": "int8"}, both)[0].resolve("qwen38").trunk == "int8"
    old = load({}, {"Q38_TRUNK_CPU_INT8": "1"})[0]
    assert old.resolve("qwen38").origin("trunk") == "variable" and old.resolve("qwen36").trunk == "stored"


def test_what_a_command_sets_itself_stands_whatever_was_given_and_keeps_its_origin() -> None:
    settings = load({"drafts": "3"}, {"USAGE_SAVE": "1"})[0].override(drafts=0, usage_save=False)
    for engine in ENGINES:
        found = settings.resolve(engine)
        assert (found.drafts, found.usage_save, found.origin("usage_save")) == (0, False, "variable")


def test_a_flag_that_is_no_setting_is_a_fault_of_the_caller() -> None:
    with pytest.raises(TypeError, match="trunk_int8"):
        load({"trunk_int8": True}, {})


def test_strict_makes_an_unknown_name_an_error() -> None:
    with pytest.raises(UsageError, match="COLI_CTXX"):
        load({}, {"COLI_CTXX": "1", "COLI_ENV_STRICT": "1"})
    load({}, {"COLI_ENV_STRICT": "1", "COLI_CTX": "10"})


@pytest.mark.parametrize("name, why", [
    ("COLI_MTP_GUARD_PCT", "colibri"), ("DRAFT", "colibri"), ("Q38_MTP_CHAIN", "device"),
])  # fmt: skip
def test_a_variable_of_an_absent_engine_or_device_is_named_with_its_owner(name, why):
    warnings = load({}, {name: "1"})[1]
    assert len(warnings) == 1 and warnings[0].startswith(f"{name} has no effect") and why in warnings[0]
