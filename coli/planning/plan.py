"""Budget in, expert caches out: how a model will use the memory it is given, computed before anything is allocated.

Idea: `make_plan` lists the terms of coli/memory.py from a survey and the settings, and spends what is left on expert
slots. `Engine` loads what the plan says and `coli plan` prints it: there is no second arithmetic. What a sequence needs
for itself (its context, recurrent state, undo, lookup, rows of logits) counts once a slot of `Sequences`.
What gives way when memory is short, in this order: the number of experts kept; a head's own `--mtp-cap`; a head that
nobody demanded. Below one expert a layer the plan is refused with both numbers and with what would fit instead.
Guarded by tests/models/test_plan.py and, against the process's real memory, tests/models/test_plan_reality.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from coli import memory
from coli.errors import DoesNotFit, ModelError, UsageError
from coli.experts.reader import bounce_bytes
from coli.formats.readers import HEAD_READERS, reading_threads
from coli.models.head import LIMIT
from coli.planning.survey import Survey
from coli.program.cpu import default_threads
from coli.report import size
from coli.server.options import ServeOptions
from coli.settings import Settings
from coli.speculation import lookup, vocabulary
from coli.speculation.options import Speculation

_SMALLEST_CONTEXT = 256  # worth proposing where a larger one does not fit
KEPT = ServeOptions.checkpoints + ServeOptions.pins  # of a slot of a server, unless told
_PICKING = 4  # rows of logits an answer holds besides those of its verify: the last, and what penalties and a mask need


@dataclass(frozen=True)
class Sequences:
    """What memory is shared among: `slots` sequences at a time, `snapshots` of prefixes and pins that all of them keep
    together, and, where `server`, what serves HTTP."""

    slots: int = 1
    snapshots: int = 0
    server: bool = False

    @classmethod
    def served(cls, slots: int, kept: int = KEPT) -> Sequences:
        """Those of a server that keeps `kept` prefixes and pins a slot."""
        return cls(slots, slots * kept, server=True)


@dataclass(frozen=True)
class Plan:
    """What a model takes of a budget. `terms`: all but the experts; `cap`: experts a layer keeps on average (0: the
    model has none); `head_cap`: experts of the draft head; `no_head`: why there is none, where `head` is False."""

    survey: Survey
    settings: Settings
    sequences: Sequences
    budget: int
    ctx: int  # of each slot
    threads: int
    limit: int  # rows computed together
    terms: memory.Terms
    cap: int
    release: bool  # whether an expert that was read leaves the page cache
    head: bool
    head_cap: int
    no_head: str
    notes: tuple[str, ...]

    @property
    def snapshot(self) -> int:
        """Bytes of one prefix or pin, when it is as long as the context."""
        return snapshot_bytes(self.survey, self.ctx, head=self.head)

    @property
    def experts(self) -> int:
        """Bytes of the trunk's expert cache, when it is full."""
        return self.cap * self.survey.slot

    @property
    def head_experts(self) -> int:
        """Bytes of the head's."""
        return self.head_cap * self.survey.head.slot if self.head and self.survey.head else 0

    @property
    def total(self) -> int:
        return self.terms.total + self.experts + self.head_experts

    @property
    def residency(self) -> float:
        """Share of the routed experts that memory holds; 1.0 for a model without any."""
        return self.cap / self.survey.geometry.experts if self.survey.slots else 1.0


def make_plan(
    survey: Survey, settings: Settings, budget: int | None = None, sequences: Sequences | None = None
) -> Plan:
    """Plan for these settings, which have been resolved for the survey's engine. `budget` in bytes, by default --ram or
    0.88 of what is free; `sequences`: by default one, of a command.

    Raises UsageError for a context beyond the model's, ModelError where a head is demanded that is not there, and
    DoesNotFit with what is needed and what would fit."""
    budget = settings.ram or memory.default_budget() if budget is None else budget
    sequences = sequences or Sequences()
    try:
        return _plan(survey, settings, budget, sequences)
    except DoesNotFit as error:
        fits = next(_instead(survey, settings, budget, sequences), None)
        if fits is None:
            raise
        raise DoesNotFit(error.what, error.where, f"{error.hint}, or {fits}, which fits") from None


def snapshot_bytes(survey: Survey, ctx: int, *, head: bool) -> int:
    """A prefix of a whole context as it is kept: state, the head's where there is one, logits of its last row. K and V
    stay where they are."""
    g, family = survey.geometry, survey.family
    own = family.head_spec(g).snapshot_bytes(ctx) + 4 * min(LIMIT, ctx) * family.head_width(g) if head else 0
    return family.state_spec(g).snapshot_bytes(ctx) + own + 4 * g.vocab


def context(settings: Settings, geometry: Any) -> int:
    """Positions to keep: the default is cut to the model's limit, a larger wish is an error."""
    if settings.ctx > geometry.max_context and settings.origin("ctx") != "default":
        where = "--ctx" if settings.origin("ctx") == "flag" else "COLI_CTX"
        raise UsageError(f"{settings.ctx:,} positions, the model was made for {geometry.max_context:,}", where,
                         f"give at most {geometry.max_context}")  # fmt: skip
    return min(settings.ctx, geometry.max_context)


def _plan(survey: Survey, settings: Settings, budget: int, sequences: Sequences) -> Plan:
    head, no_head = _head(survey, settings)
    if not head:
        return _fit(survey, settings, budget, sequences, head=False, own=0, no_head=no_head)
    own = min(settings.mtp_cap or 0, survey.geometry.experts)
    for cap in sorted({own, 0}, reverse=True):
        with suppress(DoesNotFit):
            plan = _fit(survey, settings, budget, sequences, head=True, own=cap, no_head="")
            if cap == own:
                return plan
            note = f"--mtp-cap {own} is more than the memory budget holds: the head keeps as many experts as a layer"
            return replace(plan, notes=(*plan.notes, note))
    if settings.mtp:
        return _fit(survey, settings, budget, sequences, head=True, own=0, no_head="")  # raises
    no_head = "no draft head: the memory budget holds the model only without it"
    return _fit(survey, settings, budget, sequences, head=False, own=0, no_head=no_head)


def _head(survey: Survey, settings: Settings) -> tuple[bool, str]:
    """(whether the draft head is to be loaded, why not). Raises ModelError where one is demanded."""
    row = settings.row("mtp").name
    if settings.mtp is False:
        if settings.origin("mtp") != "default":
            return False, f"no draft head: left unread (--no-mtp, {row}=0)"
        if survey.has_head:
            return False, f"no draft head: the checkpoint has one, --mtp ({row}=1) drafts with it"
        return False, "no draft head: the checkpoint has none"
    if survey.head is not None:
        return True, ""
    what, hint = survey.no_head
    if settings.mtp:
        raise ModelError(what, survey.path, hint)
    return False, f"no draft head: {what}"


def _fit(
    survey: Survey, settings: Settings, budget: int, sequences: Sequences, *, head: bool, own: int, no_head: str
) -> Plan:
    """The plan with or without the head; `own`: experts the head keeps, 0 for as many as a layer. Raises DoesNotFit."""
    g = survey.geometry
    ctx, threads = context(settings, g), settings.threads or default_threads()
    limit = min(settings.prefill_chunk, ctx)
    terms = _terms(survey, settings, sequences, ctx=ctx, threads=threads, limit=limit, head=head)
    slot = survey.head.slot if head and survey.head else 0
    each = survey.slot + (0 if own else slot)
    if not (settings.direct or settings.page_cache == "drop"):
        # experts that are all kept are read once, and through the page cache: no buffers to read past it
        without = replace(terms, reading=0)
        every = min(settings.cap or g.experts, _slots(without, budget, each, own * slot)) >= g.experts
        terms = without if every or settings.page_cache == "keep" else terms
    fits = _slots(terms, budget, each, own * slot)
    if fits < 1:
        raise _too_small(terms, settings, budget, each, own * slot)
    fits = min(g.experts, fits)
    cap = min(settings.cap or fits, fits)
    release = {"auto": cap < g.experts, "keep": False, "drop": True}[settings.page_cache]
    notes = []
    if settings.cap and cap < settings.cap < g.experts:
        notes.append(f"--cap {settings.cap} lowered to {cap}: the memory budget holds no more")
    return Plan(survey=survey, settings=settings, sequences=sequences, budget=budget, ctx=ctx, threads=threads,
                limit=limit, terms=terms, cap=cap, release=release, head=head, head_cap=(own or cap) if slot else 0,
                no_head=no_head, notes=tuple(notes))  # fmt: skip


def _slots(terms: memory.Terms, budget: int, each: int, own: int) -> int:
    """Experts a layer that the budget holds beside the terms and `own` bytes of the head's; `each`: bytes of one. Of a
    model without experts 1 where it fits."""
    left = budget - terms.total - own
    return left // each if each else int(left >= 0)


def _terms(
    survey: Survey, settings: Settings, sequences: Sequences, *, ctx: int, threads: int, limit: int, head: bool
) -> memory.Terms:
    g, family, slots = survey.geometry, survey.family, sequences.slots
    spec, heads = family.state_spec(g), {}
    if head and survey.head is not None:
        kv = ctx * family.head_spec(g).kv_bytes_per_token()
        listed = settings.mtp_dump is None and (settings.mtp_vocab_ids or 0 < settings.mtp_vocab < g.vocab)
        heads = {
            "head": sum(survey.head.dense.values()), "head_kv": slots * kv,
            "head_workspace": family.head_workspace_bytes(g, ctx=ctx, threads=threads, codes=survey.codes),
            "vocabulary": g.vocab * (vocabulary.TOKEN_BYTES + slots * vocabulary.SEAT_BYTES) if listed else 0,
        }  # fmt: skip
    readers = 0
    if survey.slots:
        readers = reading_threads(threads) + (HEAD_READERS if head and survey.head and survey.head.slot else 0)
    drafts = Speculation.of(settings) if head else replace(Speculation.of(settings), mtp=False)
    server = (memory.SERVER + survey.tokens * memory.GRAMMAR_BYTES) * sequences.server
    kept = sequences.snapshots + bool(sequences.snapshots)  # one more while it is made
    return memory.Terms(
        process=memory.PROCESS, server=server, tokenizer=survey.tokens * memory.TOKEN_BYTES,
        dense=sum(survey.dense.values()), kv=slots * ctx * spec.kv_bytes_per_token(),
        recurrent=slots * (spec.recurrent_bytes() + spec.ring_bytes()),
        workspace=family.workspace_bytes(g, limit=limit, ctx=ctx, threads=threads, codes=survey.codes),
        undo=slots * spec.undo_bytes(settings.undo, drafts.deepest),
        snapshots=kept * snapshot_bytes(survey, ctx, head=head),
        lookup=slots * ctx * (1 + sequences.server) * lookup.TOKEN_BYTES * settings.lookup,  # a client's prediction too
        logits=slots * (1 + drafts.deepest + _PICKING) * 4 * g.vocab,
        reading=readers * bounce_bytes(max(survey.slots, default=0)), **heads,
    )  # fmt: skip


def enough(nbytes: int) -> str:
    """Gigabytes that hold so many bytes, with two digits behind the point."""
    return f"{-(-nbytes // 10_000_000) / 100:.2f}"


def _too_small(terms: memory.Terms, settings: Settings, budget: int, each: int, own: int) -> DoesNotFit:
    floor = terms.total + own + each
    head = terms.of_head + own
    rest = floor - terms.dense - terms.kv - each - head
    return DoesNotFit(
        f"the budget is {size(budget)}, this model needs at least {size(floor)}, {size(floor - budget)} more "
        f"({size(terms.dense)} weights, {size(terms.kv)} context, {size(each)} for one expert a layer, {size(head)} "
        f"draft head, {size(rest)} the rest)",
        "--ram" if settings.ram is None else settings.named("ram"), f"give --ram {enough(floor)}",
    )  # fmt: skip


def _instead(survey: Survey, settings: Settings, budget: int, sequences: Sequences) -> Iterator[str]:
    """What would fit the budget, the mildest first: a shorter context, no head, both; fewer slots."""
    for words, changes in (("", {}), (" --no-mtp", {"mtp": False})):
        tried = settings.override(**changes) if changes else settings
        if changes and settings.mtp:
            break  # the head is demanded
        ctx = context(settings, survey.geometry)
        while ctx > _SMALLEST_CONTEXT:
            with suppress(DoesNotFit):
                _plan(survey, tried.override(ctx=ctx), budget, sequences)
                yield " ".join(filter(None, (f"--ctx {ctx}", words.strip()))) if ctx < settings.ctx else words.strip()
                return
            ctx //= 2
    slots = sequences.slots
    while (slots := slots // 2) and sequences.server:
        fewer = replace(sequences, slots=slots, snapshots=sequences.snapshots * slots // sequences.slots)
        with suppress(DoesNotFit):
            _plan(survey, settings, budget, fewer)
            yield f"--slots {slots}"
            return
