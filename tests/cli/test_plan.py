"""`coli plan`: the document and its arithmetic, budgets that fit or do not, the probe and its cache, the prediction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coli import memory
from coli.errors import ColiError
from coli.models.find import NANO
from coli.planning import probe
from coli.planning.header_cache import surveyed
from coli.planning.plan import KEPT, Plan, Sequences, make_plan
from coli.planning.predict import EFFICIENCY, MULTIPLY, SKEW, Traffic, predict, traffic
from coli.planning.report import Asked, report
from coli.settings import Settings, load
from tests.conftest import Coli, clean_env
from tests.tiny36 import block36_config

MB = 10**6
FAST = probe.Measured(
    probe.MemorySpeed(50e9, 2, probe.machine(), "2026-11-30"),
    probe.DiskSpeed(1e9, True, 98304, 4, 10**9, 1.0, probe.device(NANO), probe.machine(), "2026-11-30"),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing that was measured or surveyed elsewhere is found."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("COLI_CACHE", str(folder))
    yield folder


def asked(*budgets: int, measured: probe.Measured | None = None, model: Path = NANO,
          sequences: Sequences | None = None, **flags: Any) -> Asked:  # fmt: skip
    """What the command asks of nano, its flags as fields of the settings."""
    settings, _ = load({"threads": 2, **flags}, {})
    survey = surveyed(model, settings)
    return Asked(survey, settings.resolve(survey.engine), budgets or (10**9,), "", sequences or Sequences(),
                 measured or probe.Measured(), 2, avx512=True)  # fmt: skip


def plan(*budgets: int, **flags: Any) -> dict[str, Any]:
    """The only plan of the report."""
    (row,) = report(asked(*budgets, **flags))["plans"]
    return row


def made(budget: int, **flags: Any) -> Plan:
    wanted = asked(budget, **flags)
    return make_plan(wanted.survey, wanted.settings, budget)


# ---- the document ----------------------------------------------------------------------------------------------------


def test_the_documents_keys_are_these(coli: Coli) -> None:
    document = json.loads(coli("plan", "--json", "--ram", "0.17,0.01").stdout)
    assert list(document) == ["model", "dense", "experts", "context", "undo", "slots", "snapshots", "server", "threads",
                              "head", "machine", "needs", "plans"]  # fmt: skip
    assert set(document["model"]) == {"path", "engine", "bytes", "imagined", "notes"}
    assert set(document["experts"]) == {"format", "layers", "a_layer", "used", "count", "record_bytes", "bytes"}
    assert set(document["context"]) == {"positions", "most_positions", "token_bytes", "head_token_bytes", "kv_bytes",
                                        "recurrent_bytes"}  # fmt: skip
    assert set(document["undo"]) == {"kind", "drafts", "bytes", "slot_bytes", "snapshot_bytes"}
    assert set(document["head"]) == {"loaded", "why", "dense", "format", "record_bytes"}
    assert set(document["machine"]) == {"available_bytes", "limited_by", "memory", "disk"}
    assert set(document["needs"]) == {"least_bytes", "all_experts_bytes"}
    fits, lacks = document["plans"]
    assert list(fits) == list(lacks) == [
        "budget_bytes", "origin", "fits", "missing_bytes", "why", "hint", "terms", "total_bytes", "left_bytes", "cap",
        "residency", "head", "head_cap", "no_head", "token_bytes", "prediction", "warnings", "actions",
    ]  # fmt: skip
    assert list(fits["terms"]) == list(lacks["terms"]) == list(memory.NAMES)
    assert set(fits["token_bytes"]) == {"memory", "disk"}


def test_its_numbers_are_the_plans_and_add_up() -> None:
    document = report(asked(170 * MB))
    (row,), own = document["plans"], made(170 * MB)
    assert row["fits"] and 1 < row["cap"] == own.cap < 16 and row["residency"] == own.cap / 16
    assert sum(row["terms"].values()) == row["total_bytes"] == own.total
    assert row["total_bytes"] + row["left_bytes"] == 170 * MB and row["left_bytes"] >= 0
    experts = document["experts"]
    assert (experts["layers"], experts["a_layer"], experts["used"], experts["count"]) == (12, 16, 4, 192)
    assert row["terms"]["experts"] == row["cap"] * 12 * experts["record_bytes"]
    assert experts["bytes"] == 16 * own.survey.slot
    assert row["terms"]["head_experts"] == row["head_cap"] * document["head"]["record_bytes"] > 0
    assert row["terms"]["kv"] == document["context"]["positions"] * document["context"]["token_bytes"]
    assert sum(document["dense"].values()) == row["terms"]["dense"]
    assert sum(document["head"]["dense"].values()) == row["terms"]["head"]


def test_undo_is_for_the_deepest_verify_the_settings_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    def undo(**environ: str) -> dict[str, Any]:
        settings, _ = load({}, environ)
        wanted = asked()
        return report(replace(wanted, settings=settings.resolve("qwen38")))["undo"]

    slots = undo(COLI_UNDO="slots", COLI_LOOKUP="0", Q38_MTP_DRAFTS="3")
    assert slots["kind"] == "slots" and slots["drafts"] == 3 and slots["bytes"] == 3 * slots["slot_bytes"] > 0
    assert undo(COLI_UNDO="slots")["drafts"] == 5  # of prompt lookup
    assert undo(COLI_UNDO="slots", COLI_LOOKUP="0", Q38_MTP="0")["bytes"] == 0
    log = undo()
    assert log["kind"] == "log" and 0 < log["bytes"] < 5 * log["slot_bytes"]


def test_a_server_keeps_snapshots() -> None:
    none, four = (plan(10**9, mtp=False, sequences=Sequences(snapshots=n))["terms"]["snapshots"] for n in (0, 4))
    assert none == 0 and four == 5 * report(asked(10**9, mtp=False))["undo"]["snapshot_bytes"]
    assert plan(10**9, sequences=Sequences(snapshots=4))["terms"]["snapshots"] > four, "the head's state as well"


def test_slots_are_of_a_server(coli: Coli) -> None:
    def one(*arguments: str) -> dict[str, Any]:
        return json.loads(coli("plan", "--json", "--ram", "2", *arguments).stdout)

    run, four, few = one(), one("--slots", "4"), one("--slots", "4", "--snapshots", "3")
    assert (run["slots"], run["snapshots"], run["server"]) == (1, 0, False) and run["plans"][0]["terms"]["server"] == 0
    assert (four["slots"], four["snapshots"], four["server"]) == (4, 4 * KEPT, True)
    assert four["plans"][0]["terms"]["kv"] == four["context"]["kv_bytes"] == 4 * run["context"]["kv_bytes"]
    assert four["plans"][0]["terms"]["server"] > memory.SERVER and few["snapshots"] == 3
    text = coli("plan", "--ram", "2", "--slots", "4").stdout
    assert ", in 4 slots" in text and f"{4 * KEPT} of them kept" in text and "server" in text
    assert "slots" not in coli("plan", "--ram", "2").stdout


def test_the_head_is_told_apart() -> None:
    off = report(asked(10**9, mtp=False))
    assert off["head"] == {"loaded": False, "why": "no draft head: left unread (--no-mtp, Q38_MTP=0)"}
    (row,) = off["plans"]
    assert row["head"] is False and not any(row["terms"][name] for name in memory.NAMES if name.startswith("head"))
    own = plan(10**9, mtp_cap=3)
    assert own["head_cap"] == 3 and own["terms"]["head_kv"] > 0 and own["terms"]["head_workspace"] > 0


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_the_budget_says_where_it_comes_from(coli: Coli) -> None:
    def origin(*arguments: str, **environ: str) -> tuple[str, int]:
        (row,) = json.loads(coli("plan", "--json", *arguments, env=environ).stdout)["plans"]
        return row["origin"], row["budget_bytes"]

    assert origin("--ram", "0.5", RAM_GB="1") == ("flag", 5 * 10**8)
    assert origin(RAM_GB="1.5") == ("variable", 15 * 10**8)
    document = json.loads(coli("plan", "--json").stdout)
    (row,), free = document["plans"], document["machine"]["available_bytes"]
    assert row["origin"] == "default" and row["budget_bytes"] == pytest.approx(0.88 * free, rel=0.1)
    text = coli("plan").stdout
    assert ", 0.88 of the " in text and "RAM_GB, beside" in coli("plan", env={"RAM_GB": "1"}).stdout


def test_the_control_group_that_limits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        left, path = 300 * MB, "/jail"

    monkeypatch.setattr("coli.cgroup.groups", lambda *_: (Group(),))
    machine = report(asked(200 * MB))["machine"]
    assert machine["available_bytes"] == 300 * MB and machine["limited_by"] == "/jail"
    (warning,) = plan(10**9, ram=1.0)["warnings"]
    assert warning.startswith("a run here and now would lower the budget to")
    Group.left = 1 << 60
    assert report(asked(200 * MB))["machine"]["limited_by"] is None


def test_several_budgets_are_columns_and_0_when_one_fits(coli: Coli) -> None:
    done = coli("plan", "--ram", "0.05,0.17,1", "-q")
    assert done.returncode == 0 and done.stderr == ""
    (head,) = [line for line in done.stdout.splitlines() if line.startswith("budget   ") and "from" not in line]
    assert head.split() == ["budget", "50.0", "MB", "170", "MB", "1.00", "GB"]
    (share,) = [line for line in done.stdout.splitlines() if line.startswith("share in memory")]
    assert share.split()[3] == "–" and share.split()[-1] == "100%"
    assert "missing" in done.stdout and "does not fit: 50.0 MB: the budget is 50.0 MB" in done.stdout


def test_4_when_no_budget_fits_and_the_report_all_the_same(coli: Coli) -> None:
    one = coli("plan", "--ram", "0.05", "-q")
    assert one.returncode == 4 and one.stderr.count("\n") == 1 and "needs at least" in one.stderr
    assert "dense weights" in one.stdout and "missing" in one.stdout
    many = coli("plan", "--ram", "0.05,0.06", "--json", "-q")
    assert many.returncode == 4 and "none of the 2 budgets holds the model" in many.stderr
    given = coli("plan", "-q", env={"RAM_GB": "0.05"})
    assert given.returncode == 4 and given.stderr.startswith("coli: RAM_GB: the budget is 50.0 MB")
    rows = json.loads(many.stdout)["plans"]
    assert [row["fits"] for row in rows] == [False, False]
    assert rows[0]["missing_bytes"] - rows[1]["missing_bytes"] == 10 * MB


def test_what_is_missing_is_exactly_that() -> None:
    row = plan(50 * MB)
    assert not row["fits"] and sum(row["terms"].values()) == row["total_bytes"] == 50 * MB + row["missing_bytes"]
    assert plan(row["total_bytes"])["fits"] and not plan(row["total_bytes"] - 1)["fits"]
    demanded = plan(50 * MB, mtp=True)
    assert demanded["total_bytes"] > row["total_bytes"] and demanded["terms"]["head"] > 0
    assert plan(demanded["total_bytes"], mtp=True)["head"] and not plan(row["total_bytes"])["head"]


@pytest.mark.parametrize("ram", ["", "x", "nan", "0", "-1", "1,,2", "1,inf", "1;2"])
def test_a_budget_that_is_none_is_2(coli: Coli, ram: str) -> None:
    done = coli("plan", "--ram", ram)
    assert done.returncode == 2 and done.stdout == "" and "--ram" in done.stderr


def test_other_mistakes(coli: Coli) -> None:
    for arguments in (("--plot", "--json"), ("--weights", "fp8"), ("--ctx", "999999"), ("--snapshots", "-1")):
        done = coli("plan", *arguments)
        assert done.returncode == 2 and done.stdout == "", arguments
    assert coli("plan", "nowhere").returncode == 3 and coli("plan", "none.json").returncode == 3


# ---- what to do ------------------------------------------------------------------------------------------------------


def test_the_budget_for_all_experts_is_enough_and_no_more_is() -> None:
    (words,) = [text for text in plan(170 * MB)["actions"] if "all experts" in text]
    enough = round(float(words.split("--ram ")[1].split()[0]) * 1e9)
    full, short = plan(enough), plan(enough - 10 * MB)
    assert full["residency"] == 1.0 > short["residency"] and not any("all experts" in text for text in full["actions"])
    assert report(asked())["needs"]["all_experts_bytes"] == full["total_bytes"] <= enough


def test_int4_experts_are_proposed_with_their_real_size() -> None:
    (words,) = [text for text in plan(170 * MB)["actions"] if "--experts int4" in text]
    record = made(170 * MB, experts="int4").survey.record
    assert f"takes {record / 1000:.1f} kB instead of 98.3 kB" in words
    assert not any("--experts int4" in text for text in plan(170 * MB, experts="int4")["actions"])


def test_what_is_done_already_is_not_proposed(tmp_path: Path) -> None:
    short = 175 * MB
    words = "\n".join(plan(short)["actions"])
    assert "--mirror" in words and "--trunk int8" in words and "coli plan --probe" in words
    words = "\n".join(plan(short, mirror=tmp_path, trunk="int8", measured=FAST)["actions"])
    assert "--mirror" not in words and "--trunk" not in words and "--probe" not in words
    assert f"without --cap 3 a layer keeps {plan(short)['cap']} experts" in plan(short, cap=3)["actions"]
    assert not any("--cap" in text for text in plan(short, cap=16)["actions"])
    assert any("a token uses 4" in text for text in plan(short, cap=3)["warnings"])
    slow = replace(FAST, disk=replace(FAST.disk, record=4 * MB))  # type: ignore[type-var]
    assert any("was measured in reads of 4.00 MB" in text for text in plan(short, measured=slow)["warnings"])


def test_leaving_the_head_out_is_proposed_where_it_brings_experts() -> None:
    least = made(10**9, mtp=True, cap=1).total
    row, bare = plan(least), plan(least, mtp=False)
    assert row["head"] and row["cap"] == 1 and bare["cap"] > 2
    words = f"--no-mtp: without the draft head a layer keeps {bare['cap']} experts instead of 1"
    assert words in row["actions"] and "a layer keeps 1 expert and a token uses 4" in "\n".join(row["warnings"])
    for other in (plan(least, mtp=True), bare, plan(10**9)):
        assert not any("--no-mtp" in text for text in other["actions"])


# ---- models that are not there ---------------------------------------------------------------------------------------


def test_a_bare_config_is_planned_in_any_format(coli: Coli, tmp_path: Path) -> None:
    config = tmp_path / "some.json"
    config.write_text(json.dumps(block36_config("qwen3_5_moe_text")))

    def imagined(*arguments: str) -> dict[str, Any]:
        return json.loads(coli("plan", str(config), "--json", "--ram", "1", *arguments).stdout)

    own, half = imagined(), imagined("--weights", "q8_0")
    assert own["model"]["imagined"] == "config" and half["model"]["imagined"] == "q8_0"
    assert half["experts"]["record_bytes"] < own["experts"]["record_bytes"] and half["experts"]["format"] == "Q8_0"
    done = coli("plan", str(config), "--probe", "--ram", "1")
    assert done.returncode == 0 and "the disk is not measured: there are no weights" in done.stderr
    assert "imagined from its config in the format it names" in done.stdout
    assert coli("plan", str(config), "--weights", "q9").returncode == 2


# ---- what it may load, how it looks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--ram", "0.05,0.17,1"], ["--json"]])
def test_no_heavy_module_is_loaded(arguments: list[str]) -> None:
    code = ("import sys\nfrom coli.commands.app import main\nassert main(sys.argv[1:]) == 0\n"
            "print(sorted({'numba', 'llvmlite', 'tokenizers', 'jinja2', 'rich', 'matplotlib'} & sys.modules.keys()))")
    done = subprocess.run([sys.executable, "-c", code, "plan", "-q", *arguments], env=clean_env(), text=True,
                          capture_output=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_bars(coli: Coli, own_cache: Path) -> None:
    probe.keep(own_cache, FAST)
    done = coli("plan", "--ram", "0.05,0.16,1", "--threads", "2", "--plot")
    bars = [line for line in done.stdout.splitlines() if "█" in line]
    assert len(bars) == 4 and bars[2].split()[-1] == "100%" and bars[2].count("█") > bars[0].count("█")
    assert "tok/s without drafts" in done.stdout and "█" not in coli("plan", "--ram", "1").stdout


def test_settings_without_effect_are_said(coli: Coli) -> None:
    assert "--drafts has no effect" in coli("plan", "--no-mtp", "--drafts", "2").stderr
    assert "Q36_MTP has no effect" in coli("plan", env={"Q36_MTP": "1"}).stderr


# ---- the probe -------------------------------------------------------------------------------------------------------


def test_probe_measures_keeps_and_predicts(coli: Coli, own_cache: Path) -> None:
    before = json.loads(coli("plan", "--json", "--ram", "0.17").stdout)
    assert before["machine"]["memory"] is before["machine"]["disk"] is before["plans"][0]["prediction"] is None
    done = coli("plan", "--json", "--ram", "0.17", "--probe", "--threads", "1")
    assert "measuring memory" in done.stderr and "measuring the disk" in done.stderr
    now = json.loads(done.stdout)
    assert now["machine"]["memory"]["bytes_per_s"] > 0 and now["machine"]["disk"]["record"] == 98304
    found = now["plans"][0]["prediction"]
    assert 0 < found["low"] < found["high"] and found["bottleneck"] in ("disk", "memory", "compute")
    assert (own_cache / "probe.json").is_file()
    later = json.loads(coli("plan", "--json", "--ram", "0.17", "--threads", "1").stdout)
    assert later["machine"]["disk"] == now["machine"]["disk"] and later["plans"] == now["plans"]
    two = json.loads(coli("plan", "--json", "--ram", "0.17", "--threads", "2").stdout)
    assert two["machine"]["memory"] is None and two["machine"]["disk"] is not None


def test_figures_of_others_are_left_alone(own_cache: Path) -> None:
    assert FAST.memory is not None and FAST.disk is not None
    elsewhere = probe.Measured(replace(FAST.memory, machine="other", bytes_per_s=1.0),
                               replace(FAST.disk, device="/mnt 9", bytes_per_s=1.0))  # fmt: skip
    larger = replace(FAST.disk, record=4 * MB)
    for measured in (elsewhere, FAST, probe.Measured(disk=larger)):
        probe.keep(own_cache, measured)
    assert probe.kept(own_cache, NANO, record=100_000, threads=2) == (FAST, [])
    assert probe.kept(own_cache, NANO, record=2 * MB, threads=2)[0].disk == larger
    again = replace(FAST.memory, bytes_per_s=2.0)
    probe.keep(own_cache, probe.Measured(again))
    assert probe.kept(own_cache, NANO, record=100_000, threads=2)[0] == probe.Measured(again, FAST.disk)


@pytest.mark.parametrize("text", ["{", "[]", '{"coli_probe": 2}', '{"coli_probe": 1, "memory": [{}], "disk": []}',
                                  '{"coli_probe": 1, "memory": 7, "disk": []}'])  # fmt: skip
def test_a_damaged_cache_is_said_and_written_anew(own_cache: Path, text: str) -> None:
    own_cache.mkdir()
    (own_cache / "probe.json").write_text(text)
    found, notes = probe.kept(own_cache, NANO, record=1, threads=2)
    assert found == probe.Measured() and len(notes) == 1 and "probe.json" in notes[0]
    probe.keep(own_cache, FAST)
    assert probe.kept(own_cache, NANO, record=98304, threads=2) == (FAST, [])


def test_the_disk_is_read_in_whole_records_of_the_models_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"a.safetensors": 50_000, "b.safetensors": 9_000, "c.safetensors": 100}
    for name, nbytes in sizes.items():
        (folder / name).write_bytes(os.urandom(nbytes))
    (folder / "config.json").write_text("{}")
    read: list[tuple[str, int, int]] = []
    preadv = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        nbytes = preadv(fd, buffers, offset)
        read.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset, nbytes))
        return nbytes

    monkeypatch.setattr(os, "preadv", spy)
    speed = probe.disk(folder, record=8000, seconds=0.05, threads=2)
    records = [(name, offset) for name, offset, nbytes in read if nbytes == 8192]
    assert {name for name, _ in records} == {"a.safetensors", "b.safetensors"}
    assert {offset for name, offset in records if name == "a.safetensors"} == {8192 * i for i in range(6)}
    assert speed.record == 8192 and speed.nbytes == 8192 * len(records) and speed.threads == 2
    assert probe.disk(folder, record=10 * MB, seconds=0.01).record == 49152  # no file is larger


def test_without_direct_reads_nothing_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(probe, "_open", lambda file, opened: (os.open(file, os.O_RDONLY), file.stat().st_size, False))
    speed = probe.disk(tmp_path / "m.gguf", record=1 << 16, seconds=30.0)
    assert speed.nbytes == 1 << 20 and not speed.direct and speed.seconds < 30


def test_files_of_a_model(tmp_path: Path) -> None:
    for name in ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y-00002-of-00002.gguf", "z.gguf", "t.json"):
        (tmp_path / name).touch()
    assert [file.name for file in probe.files(tmp_path / "x-00001-of-00002.gguf")] == [
        "x-00001-of-00002.gguf", "x-00002-of-00002.gguf"
    ]  # fmt: skip
    assert probe.files(tmp_path / "z.gguf") == [tmp_path / "z.gguf"] and len(probe.files(tmp_path)) == 4


def test_holes_and_nothing_are_not_timed(tmp_path: Path) -> None:
    with open(tmp_path / "m.safetensors", "wb") as hollow:
        hollow.truncate(10 * MB)
    for folder in (tmp_path, tmp_path / "none"):
        folder.mkdir(exist_ok=True)
        with pytest.raises(ColiError, match="no weights whose reading could be timed"):
            probe.disk(folder, record=8192)


def test_memory_is_read_by_every_thread() -> None:
    speed = probe.memory(3, seconds=0.01)
    assert speed.threads == 3 and 1e8 < speed.bytes_per_s < 1e13


def test_avx512_is_known_from_the_processors_own_words(tmp_path: Path) -> None:
    (tmp_path / "with").write_text("processor : 0\nflags\t: fpu avx512dq avx512f avx2\n")
    (tmp_path / "without").write_text("processor : 0\nflags\t: fpu avx2 avx512fake\n")
    assert [probe.avx512(tmp_path / name) for name in ("with", "without", "absent")] == [True, False, False]


# ---- the prediction --------------------------------------------------------------------------------------------------

MOVED = Traffic(dense=6 * 10**9, experts=3 * 10**9, recurrent=10**9, kv_quarter=0, kv_full=0, disk_even=10**9,
                disk_skewed=5 * 10**8)  # fmt: skip


def test_a_prediction_by_hand() -> None:
    """10 GB of memory at 50 GB/s and 1 GB, or half of it, of disk at 1 GB/s."""
    found = predict(MOVED, FAST, threads=2, avx512=True)
    assert found is not None and found.bottleneck == "disk"
    assert found.low == pytest.approx(1 / (1 + 0.2 / EFFICIENCY)) and found.high == pytest.approx(1 / 0.5)
    resident = predict(replace(MOVED, disk_even=0, disk_skewed=0), replace(FAST, disk=None), threads=2, avx512=True)
    assert resident is not None and resident.bottleneck == "memory"
    assert resident.low == pytest.approx(5 * EFFICIENCY) and resident.high == pytest.approx(5)


def test_compute_bounds_only_where_it_is_known() -> None:
    moved = replace(MOVED, disk_even=0, disk_skewed=0)
    quick = replace(FAST, memory=replace(FAST.memory, bytes_per_s=1e15))  # type: ignore[type-var]
    found = predict(moved, quick, threads=2, avx512=True)
    assert found is not None and found.bottleneck == "compute"
    assert found.low == pytest.approx(found.high) == pytest.approx(2 * MULTIPLY / 9e9)
    unknown = predict(moved, quick, threads=2, avx512=False)
    assert unknown is not None and unknown.bottleneck == "memory" and unknown.high > 1000 * found.high


def test_nothing_is_predicted_from_what_was_not_measured() -> None:
    assert predict(MOVED, probe.Measured(memory=FAST.memory), threads=2, avx512=True) is None
    assert predict(MOVED, probe.Measured(disk=FAST.disk), threads=2, avx512=True) is None


def test_the_traffic_of_nano_by_hand() -> None:
    own = made(170 * MB)
    moved, g, missing = traffic(own), own.survey.geometry, 1 - own.cap / 16
    assert moved.experts == 4 * 12 * 98304 and moved.disk_even == round(missing * moved.experts)
    assert moved.disk_skewed == round(SKEW * moved.disk_even) and moved.dense == own.terms.dense
    rows = 2 * g.kv_heads * g.head_dim * 4 * g.layer_types.count("attention")
    keys = g.index_dim * 4 * g.layer_types.count("attention") // g.index_ratio
    assert moved.kv_full == min(own.ctx, g.index_budget) * rows + own.ctx * keys
    assert moved.kv_quarter == min(own.ctx // 4, g.index_budget) * rows + own.ctx // 4 * keys
    assert moved.memory_high - moved.memory_low == moved.kv_full - moved.kv_quarter >= 0


def test_more_memory_is_never_slower() -> None:
    rows = report(asked(*(n * MB for n in range(160, 210, 5)), measured=FAST))["plans"]
    ends = [(row["prediction"]["low"], row["prediction"]["high"]) for row in rows]
    assert ends == sorted(ends) and ends[0] < ends[-1] and all(low < high for low, high in ends)
    assert rows[-1]["token_bytes"]["disk"] == [0, 0] and rows[-1]["prediction"]["bottleneck"] == "memory"


def test_settings_reach_the_plan(coli: Coli) -> None:
    def one(*arguments: str) -> dict[str, Any]:
        return json.loads(coli("plan", "--json", "--ram", "1", *arguments).stdout)

    wide = one("--ctx", "512", "--threads", "3", "--cap", "5", "--mtp-cap", "2", "--drafts", "3", "--no-lookup",
               "--trunk", "int8", "--experts", "int8", "--snapshots", "2")  # fmt: skip
    (row,) = wide["plans"]
    assert wide["context"]["positions"] == 512 and wide["threads"] == 3 and (row["cap"], row["head_cap"]) == (5, 2)
    assert wide["undo"]["drafts"] == 3 and row["terms"]["lookup"] == 0 and row["terms"]["snapshots"] > 0
    assert "int8 rows" in wide["dense"] and wide["experts"]["format"].startswith("int8") and wide["snapshots"] == 2
    assert one("--no-mtp")["head"]["loaded"] is False
    assert Settings().ctx == 8192 and one()["context"]["positions"] == one()["context"]["most_positions"] == 2048
