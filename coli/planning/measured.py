"""What a run's memory was planned to be, term by term, and what it came to.

Idea: every buffer knows its size, so each term of the plan has a number to stand beside it: weights as they were
loaded, rows of K and V that were written, slots that hold an expert. What no buffer owns (interpreter, libraries,
allocator) is the rest of the process's peak. A term may stay below its plan, because a run need not fill its context
or its expert cache; the plan must hold for one that does (tests/models/test_plan_reality.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from coli import memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coli.engine import Engine
    from coli.session import Session


@dataclass(frozen=True)
class Term:
    """Bytes of one kind of memory."""

    name: str
    planned: int
    held: int


@dataclass(frozen=True)
class MemoryReport:
    """`planned` is the plan's total, `peak` the most the process ever held, `budget` what it was allowed; bytes."""

    terms: tuple[Term, ...]
    budget: int
    planned: int
    peak: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"terms": {term.name: {"planned": term.planned, "held": term.held}
                                         for term in self.terms}}  # fmt: skip


def measured(engine: Engine, *sessions: Session) -> MemoryReport:
    """The terms of an open engine's plan against what is held now, after answers of all its `sessions`."""
    plan, terms = engine.plan, engine.terms
    held = in_use(engine, sessions)
    planned = {name: getattr(terms, name) for name in memory.NAMES if name not in ("experts", "head_experts")}
    planned |= {"experts": plan.experts, "head_experts": plan.head_experts if engine.head else 0}
    peak = memory.peak_rss()
    held["tokenizer"] = terms.tokenizer  # a library's: nobody can tell it from the process
    held["process"] = max(0, peak - sum(held.values()))
    return MemoryReport(
        tuple(Term(name, planned[name], held.get(name, 0)) for name in memory.NAMES if planned[name] or held.get(name)),
        plan.budget, sum(planned.values()), peak,
    )


def in_use(engine: Engine, sessions: Sequence[Session]) -> dict[str, int]:
    """Bytes of every term that a buffer owns, now."""
    held = {
        "dense": engine.dense_bytes, "workspace": engine.model.workspace_bytes, "experts": engine.store.filled_bytes,
        "reading": engine.reader.bounce_bytes if engine.reader is not None else 0,
    }  # fmt: skip
    if engine.head is not None:
        held |= {
            "head": engine.weights.nbytes - engine.dense_bytes, "head_workspace": engine.head.workspace_bytes,
            "head_experts": engine.stores[1].filled_bytes if len(engine.stores) > 1 else 0,
            "vocabulary": engine.vocabulary.nbytes if engine.vocabulary is not None else 0,
        }  # fmt: skip
    for session in sessions:
        for name, nbytes in _of_sequence(engine, session).items():
            held[name] = held.get(name, 0) + nbytes
    return held


def _of_sequence(engine: Engine, session: Session) -> dict[str, int]:
    state, decoder, logits, prefixes = session.state, session.decoder, session.last_logits, session.prefixes
    held = {
        "kv": state.length * engine.model.spec.kv_bytes_per_token(),
        "recurrent": state.recurrent.live.nbytes + sum(ring.nbytes for ring in state.rings),
        "undo": state.recurrent.undo_bytes, "snapshots": prefixes.nbytes,
        "lookup": decoder.lookup.nbytes if decoder.lookup is not None else 0,
        "logits": logits.nbytes if logits is not None else 0,
    }  # fmt: skip
    if engine.head is not None and decoder.mtp is not None:
        held["head_kv"] = decoder.mtp.state.kv.length * engine.head.spec.kv_bytes_per_token()
    return held
