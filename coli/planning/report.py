"""What `coli plan` says, as one document of plain values: `--json` prints it, commands/_plan_view.py draws it.

Idea: nothing is reckoned for the report alone. Sizes are the plan's terms (coli/planning/plan.py), what would be the
case with another budget or with int4 experts is asked of `make_plan` again, speeds are `predict`'s. Bytes everywhere;
keys are pinned by tests/cli/test_plan.py. `plans` has one entry a budget. One that does not fit has the terms of the
least that would do and says what is missing, the rest of it is null or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coli import cgroup, memory
from coli.errors import DoesNotFit
from coli.kernels.packing import packed_bytes
from coli.planning.plan import Plan, Sequences, enough, make_plan
from coli.planning.predict import Prediction, Traffic, predict, traffic
from coli.planning.probe import Measured
from coli.planning.survey import Survey
from coli.report import count, size
from coli.settings import Settings
from coli.speculation.options import Speculation

_UNBOUNDED = 1 << 60
_HALVED = ("BF16", "F16")  # formats that int8 rows take about half of
_WORTH = 0.8  # a smaller record is proposed where it takes at most this share of the present one
_NEAR = 2  # times another size of reads: about as fast
_MORE = 1.5  # times as many experts are worth a word
_LARGE = 0.2  # share from which something is worth a word


@dataclass(frozen=True)
class Asked:
    """What is planned for, and what is known of the machine. `settings` are resolved for the survey's engine;
    `imagined`: the weights that a bare config was given, "" for a model that is there; `threads`: as measured."""

    survey: Survey
    settings: Settings
    budgets: Sequence[int]
    imagined: str
    sequences: Sequences
    measured: Measured
    threads: int
    avx512: bool


def report(asked: Asked) -> dict[str, Any]:
    """The whole document. Raises UsageError and ModelError for settings that no budget would help."""
    survey, settings = asked.survey, asked.settings
    available, group = _available()
    largest = make_plan(survey, settings.override(cap=None), _UNBOUNDED, asked.sequences)
    return {
        "model": {"path": str(survey.path), "engine": survey.engine, "bytes": survey.nbytes,
                  "imagined": asked.imagined or None, "notes": list(survey.notes)},
        "dense": dict(survey.dense),
        "experts": _experts(survey),
        "context": _context(survey, largest),
        "undo": _undo(survey, settings, largest),
        "slots": asked.sequences.slots,
        "snapshots": asked.sequences.snapshots,
        "server": asked.sequences.server,
        "threads": largest.threads,
        "head": _head(survey, largest),
        "machine": {"available_bytes": available, "limited_by": group, **asdict(asked.measured)},
        "needs": {"least_bytes": _least(asked).total, "all_experts_bytes": largest.total},
        "plans": [_row(asked, budget, largest) for budget in asked.budgets],
    }  # fmt: skip


def _available() -> tuple[int, str | None]:
    """(bytes that are free for a process, the control group that says so where it is not the machine)."""
    available = memory.available()
    groups = [(left, group.path) for group in cgroup.groups() if (left := group.left) is not None]
    left, path = min(groups, default=(available + 1, ""))
    return available, path if left <= available else None


# ---- the model, whatever the budget ----------------------------------------------------------------------------------


def _experts(survey: Survey) -> dict[str, Any] | None:
    if not survey.slots:
        return None
    g, layers = survey.geometry, len(survey.slots)
    return {
        "format": survey.format, "layers": layers, "a_layer": g.experts, "used": g.top_k, "count": layers * g.experts,
        "record_bytes": survey.record, "bytes": survey.slot * g.experts,
    }  # fmt: skip


def _context(survey: Survey, plan: Plan) -> dict[str, Any]:
    family = survey.family
    head = family.head_spec(survey.geometry).kv_bytes_per_token() if plan.head else 0
    spec = family.state_spec(survey.geometry)
    return {"positions": plan.ctx, "most_positions": survey.geometry.max_context,
            "token_bytes": spec.kv_bytes_per_token(), "head_token_bytes": head,
            "kv_bytes": plan.terms.kv, "recurrent_bytes": plan.terms.recurrent}  # fmt: skip


def _undo(survey: Survey, settings: Settings, plan: Plan) -> dict[str, Any]:
    spec, drafts = survey.family.state_spec(survey.geometry), Speculation.of(settings)
    deepest = replace(drafts, mtp=drafts.mtp and plan.head).deepest
    return {"kind": settings.undo, "drafts": deepest, "bytes": plan.terms.undo,
            "slot_bytes": spec.recurrent_bytes(), "snapshot_bytes": plan.snapshot}  # fmt: skip


def _head(survey: Survey, plan: Plan) -> dict[str, Any]:
    """The draft head, where memory does not matter."""
    if not plan.head or survey.head is None:
        return {"loaded": False, "why": plan.no_head}
    return {"loaded": True, "why": "", "dense": dict(survey.head.dense), "format": survey.head.format,
            "record_bytes": survey.head.slot}  # fmt: skip


# ---- one budget ------------------------------------------------------------------------------------------------------


def _row(asked: Asked, budget: int, largest: Plan) -> dict[str, Any]:
    plan = _try(asked, budget)
    found = _fits(asked, plan, largest) if isinstance(plan, Plan) else _lacks(asked, budget, plan)
    return {"budget_bytes": budget, "origin": asked.settings.origin("ram"), **found}


def _fits(asked: Asked, plan: Plan, largest: Plan) -> dict[str, Any]:
    moved = traffic(plan)
    found = predict(moved, asked.measured, threads=asked.threads, avx512=asked.avx512)
    return {
        "fits": True, "missing_bytes": 0, "why": "", "hint": "", "terms": _terms(plan), "total_bytes": plan.total,
        "left_bytes": plan.budget - plan.total, "cap": plan.cap, "residency": plan.residency, "head": plan.head,
        "head_cap": plan.head_cap, "no_head": plan.no_head,
        "token_bytes": {"memory": [moved.memory_low, moved.memory_high], "disk": [moved.disk_skewed, moved.disk_even]},
        "prediction": None if found is None else asdict(found),
        "warnings": [*plan.notes, *_warnings(asked, plan, largest)],
        "actions": list(_actions(asked, plan, largest, moved, found)),
    }  # fmt: skip


def _lacks(asked: Asked, budget: int, error: DoesNotFit) -> dict[str, Any]:
    least = _least(asked)
    return {
        "fits": False, "missing_bytes": max(0, least.total - budget), "why": error.what, "hint": error.hint,
        "terms": _terms(least), "total_bytes": least.total, "left_bytes": None, "cap": None, "residency": None,
        "head": None, "head_cap": None, "no_head": None, "token_bytes": None, "prediction": None, "warnings": [],
        "actions": [],
    }  # fmt: skip


def _terms(plan: Plan) -> dict[str, int]:
    """Every term in the order of memory.NAMES."""
    own = {"experts": plan.experts, "head_experts": plan.head_experts}
    return {name: own[name] if name in own else getattr(plan.terms, name) for name in memory.NAMES}


def _try(asked: Asked, budget: int) -> Plan | DoesNotFit:
    try:
        return make_plan(asked.survey, asked.settings, budget, asked.sequences)
    except DoesNotFit as error:
        return error


def _least(asked: Asked) -> Plan:
    """The plan below which no budget will do: one expert a layer, and a head only where it is demanded."""
    least = asked.settings.override(cap=1, mtp_cap=None, mtp=asked.settings.mtp or False)
    return make_plan(asked.survey, least, _UNBOUNDED, asked.sequences)


# ---- words -----------------------------------------------------------------------------------------------------------


def _warnings(asked: Asked, plan: Plan, largest: Plan) -> Iterator[str]:
    """What a user would not expect of this plan."""
    granted, lowered = memory.granted(plan.budget)
    if lowered and plan.settings.origin("ram") != "default":
        yield f"a run here and now would lower the budget to {size(granted)}: no more memory is free"
    if largest.head and not plan.head:
        yield plan.no_head
    if plan.survey.slots and plan.cap < plan.survey.geometry.top_k:
        yield (f"a layer keeps {count(plan.cap, 'expert')} and a token uses {plan.survey.geometry.top_k}: every token "
               "reads from the disk")  # fmt: skip
    disk, record = asked.measured.disk, plan.survey.record
    if plan.residency < 1 and disk is not None and not record / _NEAR <= disk.record <= _NEAR * record:
        yield f"the disk was measured in reads of {size(disk.record)}, an expert is {size(record)}"


def _actions(asked: Asked, plan: Plan, largest: Plan, moved: Traffic, found: Prediction | None) -> Iterator[str]:
    """What to do for more speed, what helps most first."""
    settings = asked.settings
    if plan.residency < 1:
        yield from _more_experts(asked, plan, largest)
        yield from _without_head(asked, plan)
        yield from _smaller_experts(asked, plan)
        if plan.terms.kv > _LARGE * plan.budget and plan.ctx > 1024:
            yield f"--ctx {plan.ctx // 2} frees {size(plan.terms.kv // 2)} for experts"
        if settings.mirror is None and (found is None or found.bottleneck == "disk"):
            yield "a copy of the model on a second disk is read as well: --mirror FOLDER"
    floats = sum(nbytes for name, nbytes in plan.survey.dense.items() if name in _HALVED)
    if not settings.trunk_int8 and floats > _LARGE * moved.weights:
        yield f"--trunk int8 takes about half of the {size(floats)} of float weights (slightly other numbers)"
    if found is None:
        yield "coli plan --probe measures disk and memory, and then predicts tok/s"


def _more_experts(asked: Asked, plan: Plan, largest: Plan) -> Iterator[str]:
    if not asked.settings.cap:
        yield f"all experts stay in memory from --ram {enough(largest.total)} on"
        return
    free = _try(replace(asked, settings=asked.settings.override(cap=None)), plan.budget)
    if isinstance(free, Plan) and free.cap > plan.cap:
        yield f"without --cap {asked.settings.cap} a layer keeps {free.cap} experts"


def _without_head(asked: Asked, plan: Plan) -> Iterator[str]:
    """To leave the draft head out, where it takes much of what experts could have."""
    if not plan.head or asked.settings.mtp:
        return
    other = _try(replace(asked, settings=asked.settings.override(mtp=False)), plan.budget)
    if isinstance(other, Plan) and other.cap >= _MORE * plan.cap:
        yield f"--no-mtp: without the draft head a layer keeps {count(other.cap, 'expert')} instead of {plan.cap}"


def _smaller_experts(asked: Asked, plan: Plan) -> Iterator[str]:
    """Experts as int4, where that makes them clearly smaller."""
    survey = asked.survey
    record = _int4(survey)
    if asked.settings.experts == "stored" and record <= _WORTH * survey.record:
        yield (f"--experts int4: an expert takes {size(record)} instead of {size(survey.record)}, "
               f"{survey.record / record:.1f} times as many stay in memory (`coli convert` writes them once: the disk "
               "reads less too)")  # fmt: skip


def _int4(survey: Survey) -> int:
    """Bytes of an expert as int4, its parts on 64-byte boundaries (coli/experts/records.py)."""
    g = survey.geometry
    parts = (g.moe_inter, g.hidden), (g.moe_inter, g.hidden), (g.hidden, g.moe_inter)
    return sum(-(-packed_bytes("int4", n, k) // 64) * 64 for n, k in parts)
