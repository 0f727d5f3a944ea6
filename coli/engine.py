"""Opening a model: settings in, a ready engine out.

Everything that can be wrong with a checkpoint is found here, before memory is allocated: headers, shapes, scales
(coli/formats, coli/models/*_layout), the context against the model's limit, the budget against the floor. The
tokenizer is read on a thread meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, BinaryIO, TypeAlias

from coli import memory
from coli.chat import ChatTemplate, stop_ids
from coli.errors import DoesNotFit, ModelError, UsageError
from coli.experts.forms import KINDS
from coli.experts.plan import ExpertPlan
from coli.experts.reader import ExpertReader
from coli.experts.store import ExpertStore, NoExperts
from coli.experts.usage import Shape, open_usage
from coli.formats.checkpoint import Checkpoint
from coli.formats.readers import HEAD_READERS, reading_threads
from coli.guard import Guard
from coli.kernels.blocked import BLOCKED, base_kind
from coli.models import find
from coli.models.base import Weights, never
from coli.models.families import Family, family_of
from coli.models.head import DraftHead
from coli.planning.plan import Plan, Sequences, make_plan
from coli.planning.survey import HeadSurvey, Survey, survey
from coli.program.cache import Kernels
from coli.program.cpu import Team, default_threads, usable_cpus
from coli.report import size
from coli.settings import Settings, no_effect
from coli.speculation.options import idle
from coli.speculation.vocabulary import FixedVocabulary, Vocabulary, open_vocabulary
from coli.tokenizer import Tokenizer

Progress: TypeAlias = Callable[[str], None]


class Engine:
    """A loaded model with its tokenizer, thread team and expert cache. Use `Engine.open`; close it when done."""

    def __init__(self, checkpoint: Checkpoint, family: Family, plan: Plan, on_progress: Progress | None,
                 start: float, held: int) -> None:  # fmt: skip
        """`start`, `held`: the time, and the bytes this process held, before anything was opened."""
        self.checkpoint, self.family, self.name, self.plan = checkpoint, family, family.name, plan
        self.settings, self.geometry, self.model_path = plan.settings, plan.survey.geometry, checkpoint.folder
        self.ctx, self.threads, self.limit, self.cap = plan.ctx, plan.threads, plan.limit, plan.cap
        self.terms = plan.terms
        self.notes: list[str] = no_effect(self.settings, self.name)
        self.say: Callable[[str], None] = self.notes.append  # is given what happens later, when it happens
        if self.threads > usable_cpus():
            self.notes.append(
                f"{self.threads} threads on {usable_cpus()} CPUs wait for each other: --threads {default_threads()} is "
                "faster"
            )
        self.vocabulary: Vocabulary | FixedVocabulary | None = None
        self._closing = ExitStack()  # what is open so far, should a later step fail
        with self._closing as opened, ThreadPoolExecutor(1) as pool:
            text = pool.submit(self._open_text)
            kernels = Kernels(self.settings.cache_dir, simd=self.settings.simd, on_progress=on_progress)
            self.team = Team(kernels, self.threads)
            opened.callback(self.team.close)
            self._open_model(kernels, opened)
            self.guard = Guard(plan.budget, self.terms, self.stores, say=lambda text: self.say(text),
                               on=self.settings.guard, held=held)  # fmt: skip
            self.model.player.on_wait = self.guard.tick  # a prompt's forward takes long
            self.tokenizer, self.chat, self.stop_ids = text.result()
            self.notes += kernels.notes
            self._closing = opened.pop_all()
        self.load_s = time.perf_counter() - start

    @classmethod
    def open(cls, settings: Settings, on_progress: Progress | None = None, *, slots: int = 1, snapshots: int = 0,
             server: bool = False) -> Engine:  # fmt: skip
        """Memory is planned for `slots` sequences at a time, which keep `snapshots` of prefixes and pins between them,
        and for a `server` in this process. Raises ModelError, DoesNotFit or UsageError; nothing stays open then."""
        start, held = time.perf_counter(), memory.resident()
        path = find.find(settings.model)
        with ExitStack() as opened:
            checkpoint = opened.enter_context(Checkpoint.open(path))
            family = family_of(checkpoint)
            settings = settings.resolve(family.name)
            geometry = family.geometry(checkpoint.config, checkpoint.config_path)
            family.check(checkpoint, geometry)
            surveyed, sequences = survey(checkpoint, family, geometry, settings), Sequences(slots, snapshots, server)
            plan = _planned(surveyed, settings, sequences)
            engine = cls(checkpoint, family, plan, on_progress, start, held)
            opened.pop_all()
            return engine

    def _open_text(self) -> tuple[Tokenizer, ChatTemplate | None, frozenset[int]]:
        tokenizer = Tokenizer.open(self.checkpoint)
        return tokenizer, ChatTemplate.open(self.checkpoint, tokenizer), stop_ids(self.checkpoint, tokenizer)

    def _open_model(self, kernels: Kernels, opened: ExitStack) -> None:
        settings, plan, family = self.settings, self.plan, self.family
        self.notes += plan.notes
        self.head_line = plan.no_head
        self.reader = self._open_reader(opened)
        self.store = self._open_store(plan.survey.experts, plan.cap, reading_threads(self.threads), opened)
        self.weights = Weights(self.checkpoint, int8_rows=self._int8_rows, activations=settings.act,
                               centred=self.geometry.centred)  # fmt: skip
        self.model = family.trunk(
            self.checkpoint, self.geometry, self.weights, self.store, kernels, self.team, ctx=self.ctx,
            limit=self.limit, undo=settings.undo, prefetch=settings.prefetch,
        )  # fmt: skip
        opened.callback(self.model.close)
        self.dense_bytes = self.weights.nbytes  # of the trunk's weights, before the head's
        self.stores = [self.store]  # the trunk's, then the head's
        self.head: DraftHead | None = None
        if plan.head and plan.survey.head is not None:
            self._load_head(plan.survey.head, kernels, opened)
        self.notes += self._format_notes() + idle(settings, head=self.head is not None)
        self._open_usage()

    def _open_usage(self) -> None:
        """Pin the experts that earlier runs used most and, with --warm-start, begin to read the hottest."""
        shape = Shape.of(self.name, self.geometry, self.store.layers)
        self.usage, notes = open_usage(self.settings, self.model_path, shape)
        self.notes += notes
        if self.usage is not None:
            self.store.pin(self.usage.pins())
            if self.settings.warm_start:
                self.store.fill(self.usage.hottest())

    def _format_notes(self) -> list[str]:
        """What weights became that are not computed on as they are stored, and wishes that changed none."""
        notes = list(dict.fromkeys(note for store in self.stores for note in store.notes))  # head and trunk, once
        notes += [f"dense weights of {dtype} have no kernel: decoded to float32, {size(nbytes)} of memory"
                  for dtype, nbytes in self.weights.decoded.items()]  # fmt: skip
        if self.settings.trunk_int8 and not any(kind.startswith("int8") for kind in self.weights.kinds):
            notes.append("--trunk int8 has no effect: no dense matrix is stored as floats")
        if self.settings.experts != "stored" and not self.geometry.experts:
            notes.append(f"--experts {self.settings.experts} has no effect: the model has no experts")
        if not self.geometry.experts:
            wishes = ("direct", "mirror", "page_cache", "prefetch")  # of the history's, open_usage says it
            notes += [f"{self.settings.named(name)} has no effect: the model has no experts" for name in wishes
                      if self.settings.origin(name) != "default"]  # fmt: skip
        return notes

    @property
    def _int8_rows(self) -> Callable[[str], bool]:
        """Which dense matrices become int8 rows."""
        return self.family.int8_rows if self.settings.trunk_int8 else never

    def _open_reader(self, opened: ExitStack) -> ExpertReader | None:
        """What every store reads its experts with; None for a model without any."""
        settings, found, experts = self.settings, self.plan.survey, self.geometry.experts
        plans = [plan for plan in (found.experts, found.head and found.head.experts) if plan and plan.layers]
        if not plans:
            return None
        files = {path for plan in plans for path in plan.files(experts)} if settings.mirror else None
        reader = ExpertReader(self.checkpoint, direct=settings.direct, mirror=settings.mirror,
                              release=self.plan.release, files=files, record=max(found.slots))  # fmt: skip
        opened.callback(reader.close)
        self.notes += reader.notes
        reader.say = lambda text: self.say(text)
        return reader

    def _open_store(self, plan: ExpertPlan | None, cap: int, threads: int, opened: ExitStack) -> ExpertStore:
        if plan is None or not plan.layers:
            return NoExperts()
        store = ExpertStore(self.checkpoint, self.geometry, cap, threads, plan=plan, reader=self.reader)
        opened.callback(store.close)
        return store

    def _load_head(self, head: HeadSurvey, kernels: Kernels, opened: ExitStack) -> None:
        """Open the head, or say why there is none. Raises ModelError where one is demanded."""
        with ExitStack() as mine:
            try:
                self.head = self._open_head(head, kernels, mine)
            except ModelError as error:
                if self.settings.mtp:
                    raise
                self.head_line, self.vocabulary = f"no draft head: {error.what}", None
                self.terms, self.stores = self.terms.without_head(), [self.store]
                return
            opened.push(mine.pop_all())

    def _open_head(self, head: HeadSurvey, kernels: Kernels, opened: ExitStack) -> DraftHead:
        settings, g, family, cap = self.settings, self.geometry, self.family, self.plan.head_cap
        store = self._open_store(head.experts, cap, HEAD_READERS, opened)
        self.stores.append(store)
        wiring = settings.mtp_wiring if family.has_wirings else ""
        words = f"wiring {wiring}, " if wiring else ""
        besides = f" besides experts {store.format}, {cap} of {g.experts} in memory" if head.slot else ""
        self.head_line = f"draft head: {words}RoPE base {head.theta:,.0f}, {size(self.terms.of_head)} resident{besides}"
        self.vocabulary, notes = open_vocabulary(settings, self.model_path, g.vocab)
        self.notes += notes
        writer = family.head_writer(g, self.weights, store, self.team, self.ctx, wiring, head.theta)
        return DraftHead(
            writer, family.head_spec(g), self.model.lm_head, kernels, wiring=wiring, vocabulary=self.vocabulary,
            dump=_open_dump(settings, opened), dump_name=settings.row("mtp_dump").name,
        )

    def save_history(self) -> list[str]:
        """Write what was learned for later runs (USAGE_SAVE=0: nothing); says what could not be written."""
        notes: list[str] = []
        if not self.settings.usage_save:
            return notes
        if self.usage is not None:
            notes += self.usage.save(self.store.uses)
        if self.vocabulary is not None:
            self.vocabulary.save()
            notes += self.vocabulary.notes
            self.vocabulary.notes.clear()
        return notes

    def geometry_facts(self) -> dict[str, Any]:
        """The geometry as plain JSON values."""
        facts = asdict(self.geometry)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}

    def banner(self) -> str:
        parts = [f"coli {self.name}", f"{self.model_path.name} ({size(self.checkpoint.nbytes)})"]
        if self.geometry.experts:
            parts.append(f"experts {self.store.format}, {self.cap} of {self.geometry.experts} a layer in memory")
        parts += [f"dense weights {self._dense_words()}", f"context {self.ctx:,}",
                  f"{self.threads} thread{'s' * (self.threads > 1)}"]  # fmt: skip
        return f"{' · '.join(parts)}\n{self.head_line}"

    def _dense_words(self) -> str:
        """The formats dense matrices run in, the largest first."""
        kinds = sorted(self.weights.kinds, key=lambda kind: -self.weights.kinds[kind])
        words = ", ".join(dict.fromkeys(map(_kind_words, kinds)))
        exact = self.settings.act == "f32" and any(kind not in KINDS.values() for kind in kinds)
        return words + " with float32 activations" * exact

    def close(self) -> None:
        try:
            self.save_history()
            self._closing.close()
        finally:
            self.checkpoint.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _planned(surveyed: Survey, settings: Settings, sequences: Sequences) -> Plan:
    """The plan for --ram, or for as much of it as there is; raises as `make_plan`."""
    own = memory.PROCESS + memory.SERVER * sequences.server
    budget, notes = memory.granted(settings.ram, own) if settings.ram else (None, [])
    try:
        plan = make_plan(surveyed, settings, budget, sequences)
    except DoesNotFit as error:
        raise DoesNotFit("; ".join([*notes, error.what]), error.where, error.hint) from None
    return replace(plan, notes=(*notes, *plan.notes))


def _kind_words(kind: str) -> str:
    """A GEMV kind as a user knows the format: floats in lower case, GGUF's types and FP8 in upper case."""
    base = base_kind(kind)
    return "int8 rows" if base.startswith("int8") else base.upper() if base in BLOCKED or base == "fp8" else base


def _open_dump(settings: Settings, opened: ExitStack) -> BinaryIO | None:
    path = settings.mtp_dump
    if path is None:
        return None
    try:
        return opened.enter_context(open(path, "ab", buffering=0))  # what cannot be written is known at once
    except OSError as error:
        hint = "give a file in a folder you may write"
        raise UsageError(f"cannot write {path}: {error.strerror}", settings.row("mtp_dump").name, hint) from error
