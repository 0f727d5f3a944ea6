"""Decoding with drafts is plain decoding on quantised files too: GGUF, containers and a sidecar, on both engines.

tests/speculation/test_exactness.py says what is compared, and tests the harness itself."""

from __future__ import annotations

import pytest

from coli.speculation.options import Speculation
from tests.speculation import harness
from tests.speculation.engines import FILES, QUOTAS_FILES, open_model
from tests.speculation.harness import Compared, compare, counts, forced_counts, fuzz
from tests.speculation.test_exactness import NATURAL
from tests.speculation.test_exactness36 import NATURAL as NATURAL36
from tests.tiny36 import FAMILIES

HYBRID = [name for name, (form, _) in FILES.items() if form["config"]["model_type"] in FAMILIES]
WAYS = {name: NATURAL36 if name in HYBRID else NATURAL for name in FILES}
SOME = ("gate's depth", "the default", "lookup", "lookup, no gate, 2", "both by the gate", "both forced",
        "per step with lookup", "only likely drafts")  # fmt: skip
DEPTHS = [(name, depth) for name in FILES for depth in ((1, 2, 3, 5, 7) if name in HYBRID else (1, 2, 3))]
FORCED = ("accept", "reject", "mixed")


def options(name: str, **changes) -> Speculation:
    """As the settings make them for the engine."""
    own = dict(most=7, strict=True) if name in HYBRID else {}
    return Speculation(**own | changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_random_walks(engines, name):
    before = Compared.tokens
    assert engines.walk(name, QUOTAS_FILES[name]) == Compared.tokens - before >= QUOTAS_FILES[name]


@pytest.mark.parametrize(("name", "depth"), DEPTHS)
def test_forced_drafts_of_the_head(engines, name, depth):
    recording = engines.recording(name, 1)
    modes = {"cycle"} if "one expert" in name else {FORCED[depth % 3], "cycle", f"row{depth + 1}"}
    for mode in sorted(modes):
        chosen = options(name, drafts=depth, lookup=False, gate=False, mtp_force=mode)
        report = compare(recording, chosen, f"{name}, {mode}, {depth}", absorb=mode == "mixed")
        assert counts(report, "mtp") == forced_counts(mode, depth, len(recording.tokens)), mode


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("depth", [2, 5])
def test_forced_drafts_of_the_lookup(engines, name, depth):
    recording = engines.recording(name, 1)
    for mode in ("cycle", "mixed"):
        report = compare(recording, options(name, mtp=False, lookup_drafts=depth, gate=False, lookup_force=mode))
        assert counts(report, "lookup") == forced_counts(mode, depth, len(recording.tokens))


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in FILES for what in SOME if what in WAYS[name]])
def test_every_way_to_choose_drafts(engines, name, what):
    recording = engines.repeating(name) if "lookup" in what or "both" in what else engines.recording(name, 1)
    compare(recording, WAYS[name][what], f"{name}, {what}", absorb=True)


@pytest.mark.parametrize("cap", [1, 8])
@pytest.mark.parametrize("name", FILES)
def test_bytes_do_not_depend_on_how_many_experts_fit(engines, name, cap):
    """A recording made by one engine judges another."""
    made = engines.recording(name, 1)
    with open_model(made.engine.model_path, FILES[name][1] | dict(cap=cap, mtp_cap=cap)) as engine:
        other = harness.Recording(engine, made.ids, made.prompt, made.logits, made.states, made.heads)
        compare(other, options(name, drafts=3, gate=False, mtp_force="cycle", lookup=False))
        fuzz(other, 5, f"{name}, {cap}")
        assert (engine.store.misses > 8 * len(engine.store.records)) == (cap == 1)
