"""Opening a model: settings in, a ready engine out.

Everything that can be wrong with a checkpoint is found here, before memory is allocated: headers, shapes, scales
(coli/formats, coli/models/*_layout), the context against the model's limit, the budget against the floor. The
tokenizer is read on a thread meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any, BinaryIO, TypeAlias

from coli import memory
from coli.chat import ChatTemplate, stop_ids
from coli.errors import DoesNotFit, ModelError, UsageError
from coli.expert_forms import KINDS
from coli.experts import ExpertPlan, ExpertStore, NoExperts, plan_experts
from coli.formats.checkpoint import Checkpoint
from coli.kernels.blocked import BLOCKED, base_kind
from coli.models import find
from coli.models.base import Weights, never
from coli.models.families import Family, family_of, plan_head
from coli.models.head import DraftHead, HeadPlan
from coli.models.layout import dense_bytes
from coli.program.cache import Kernels
from coli.program.cpu import Team, default_threads, usable_cpus
from coli.report import size
from coli.settings import Settings, no_effect
from coli.speculation import lookup
from coli.speculation.options import Speculation, idle
from coli.speculation.vocabulary import FixedVocabulary, Vocabulary, open_vocabulary
from coli.tokenizer import Tokenizer

Progress: TypeAlias = Callable[[str], None]


class Engine:
    """A loaded model with its tokenizer, thread team and expert cache. Use `Engine.open`; close it when done."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, family: Family, geometry: Any,
                 on_progress: Progress | None, start: float) -> None:  # fmt: skip
        self.settings, self.checkpoint, self.geometry = settings, checkpoint, geometry
        self.family, self.name = family, family.name
        self.model_path = checkpoint.folder
        self.notes: list[str] = no_effect(settings, self.name)
        self.ctx = _context(settings, geometry)
        self.threads = settings.threads or default_threads()
        if self.threads > usable_cpus():
            self.notes.append(
                f"{self.threads} threads on {usable_cpus()} CPUs wait for each other: --threads {default_threads()} is "
                "faster"
            )
        self.vocabulary: Vocabulary | FixedVocabulary | None = None
        self.terms: memory.Terms
        self._closing = ExitStack()  # what is open so far, should a later step fail
        with self._closing as opened, ThreadPoolExecutor(1) as pool:
            text = pool.submit(self._open_text)
            kernels = Kernels(settings.cache_dir, simd=settings.simd, on_progress=on_progress)
            self.team = Team(kernels, self.threads)
            opened.callback(self.team.close)
            self._open_model(kernels, opened)
            self.tokenizer, self.chat, self.stop_ids = text.result()
            self.notes += kernels.notes
            self._closing = opened.pop_all()
        self.load_s = time.perf_counter() - start

    @classmethod
    def open(cls, settings: Settings, on_progress: Progress | None = None) -> Engine:
        """Raises ModelError, DoesNotFit or UsageError; nothing stays open then."""
        start = time.perf_counter()
        path = find.find(settings.model)
        with ExitStack() as opened:
            checkpoint = opened.enter_context(Checkpoint.open(path))
            family = family_of(checkpoint)
            settings = settings.resolve(family.name)
            geometry = family.geometry(checkpoint.config, checkpoint.config_path)
            family.check(checkpoint, geometry)
            engine = cls(settings, checkpoint, family, geometry, on_progress, start)
            opened.pop_all()
            return engine

    def _open_text(self) -> tuple[Tokenizer, ChatTemplate | None, frozenset[int]]:
        tokenizer = Tokenizer.open(self.checkpoint)
        return tokenizer, ChatTemplate.open(self.checkpoint, tokenizer), stop_ids(self.checkpoint, tokenizer)

    def _open_model(self, kernels: Kernels, opened: ExitStack) -> None:
        g, settings, family = self.geometry, self.settings, self.family
        self.limit = min(settings.prefill_chunk, self.ctx)
        self.experts = plan_experts(self.checkpoint, g, family.expert_layers(g), settings.experts, settings.act)
        plan, self.head_line = self._plan_head()
        plan, fits = self._fit(self.experts.nbytes, plan)
        self.cap = min(settings.cap or fits, fits, g.experts)
        if settings.cap and self.cap < settings.cap < g.experts:
            self.notes.append(f"--cap {settings.cap} lowered to {self.cap}: the memory budget holds no more")
        self.store = self._open_store(self.experts, self.cap, max(4, min(self.threads, 32)), opened)
        self.weights = Weights(self.checkpoint, int8_rows=self._int8_rows, activations=settings.act,
                               centred=g.centred)  # fmt: skip
        self.model = family.trunk(
            self.checkpoint, g, self.weights, self.store, kernels, self.team, ctx=self.ctx, limit=self.limit,
            undo=settings.undo,
        )
        opened.callback(self.model.close)
        self.stores = [self.store]  # the trunk's, then the head's
        self.head: DraftHead | None = None
        if plan is not None:
            self._load_head(plan, kernels, opened)
        self.notes += self._format_notes() + idle(settings, head=self.head is not None)

    def _format_notes(self) -> list[str]:
        """What weights became that are not computed on as they are stored, and wishes that changed none."""
        notes = list(dict.fromkeys(note for store in self.stores for note in store.notes))  # head and trunk, once
        notes += [f"dense weights of {dtype} have no kernel: decoded to float32, {size(nbytes)} of memory"
                  for dtype, nbytes in self.weights.decoded.items()]  # fmt: skip
        if self.settings.trunk_int8 and not any(kind.startswith("int8") for kind in self.weights.kinds):
            notes.append("--trunk int8 has no effect: no dense matrix is stored as floats")
        if self.settings.experts != "stored" and not self.geometry.experts:
            notes.append(f"--experts {self.settings.experts} has no effect: the model has no experts")
        return notes

    @property
    def _int8_rows(self) -> Callable[[str], bool]:
        """Which dense matrices become int8 rows."""
        return self.family.int8_rows if self.settings.trunk_int8 else never

    @property
    def _codes(self) -> int:
        """How many kinds of int8 codes of its inputs the model's integer weights want: each keeps its own."""
        if self.settings.act == "f32":
            return 0
        kinds = {kind for layer in self.experts.layers for kind in layer.kinds}
        kinds |= {tensor.dtype.lower() for tensor in self.checkpoint.tensors.values()}
        kinds |= {"int8"} if self.settings.trunk_int8 else set()
        return len({"int4", "int8"} & kinds) + bool(kinds & BLOCKED.keys())

    def _open_store(self, plan: ExpertPlan | None, cap: int, threads: int, opened: ExitStack) -> ExpertStore:
        if plan is None or not plan.layers:
            return NoExperts()
        store = ExpertStore(self.checkpoint, self.geometry, cap, threads, plan=plan)
        opened.callback(store.close)
        return store

    def _fit(self, slots: int, plan: HeadPlan | None) -> tuple[HeadPlan | None, int]:
        """(the head that fits, experts a layer): a head's own --mtp-cap gives way first, then a head nobody demanded.
        `slots`: bytes of one expert in every layer. Raises DoesNotFit."""
        if plan is None:
            return None, self._budget(slots, None, 0)
        own = min(self.settings.mtp_cap or 0, self.geometry.experts)
        for self.mtp_cap in sorted({own, 0}, reverse=True):
            with suppress(DoesNotFit):
                fits = self._budget(slots, plan, self.mtp_cap)
                if self.mtp_cap != own:
                    self.notes.append(f"--mtp-cap {own} is more than the memory budget holds: the head keeps as many "
                                      "experts as a layer")  # fmt: skip
                return plan, fits
        if self.settings.mtp:
            return plan, self._budget(slots, plan, 0)  # raises
        self.head_line = "no draft head: the memory budget holds the model only without it"
        return None, self._budget(slots, None, 0)

    def _load_head(self, plan: HeadPlan, kernels: Kernels, opened: ExitStack) -> None:
        """Open the head, or say why there is none. Raises ModelError where one is demanded."""
        with ExitStack() as mine:
            try:
                self.head = self._open_head(plan, kernels, mine)
            except ModelError as error:
                if self.settings.mtp:
                    raise
                self.head_line, self.vocabulary = f"no draft head: {error.what}", None
                self.terms, self.stores = replace(self.terms, head=0), [self.store]
                return
            opened.push(mine.pop_all())

    def _budget(self, slots: int, plan: HeadPlan | None, mtp_cap: int) -> int:
        """Experts a layer that the budget holds beside everything else; `mtp_cap`: those of the head, 0 for as many as
        a layer keeps. Raises DoesNotFit."""
        g, settings, spec = self.geometry, self.settings, self.family.state_spec(self.geometry)
        head, each = 0, slots
        if plan is not None:
            head = plan.nbytes + mtp_cap * plan.slot
            each += 0 if mtp_cap else plan.slot
        self.terms = memory.terms(
            spec, ctx=self.ctx, undo=spec.undo_bytes(settings.undo, Speculation.of(settings).deepest), head=head,
            dense=dense_bytes(self.checkpoint, g, self._int8_rows),
            workspace=self.family.workspace_bytes(g, limit=self.limit, ctx=self.ctx, threads=self.threads,
                                                  codes=self._codes),
            lookup=self.ctx * lookup.TOKEN_BYTES * settings.lookup,
        )
        budget = settings.ram or memory.default_budget()
        return memory.choose_cap(budget, self.terms, experts=g.experts, each=each)

    def _plan_head(self) -> tuple[HeadPlan | None, str]:
        """The head to load, or None and why not. Raises ModelError where one is demanded."""
        settings = self.settings
        if settings.mtp is False:
            return None, self._unread()
        try:
            plan = plan_head(
                self.family, self.checkpoint, self.geometry, ctx=self.ctx, threads=self.threads,
                trunk_int8=settings.trunk_int8, mode=settings.experts, activations=settings.act, codes=self._codes,
            )
        except ModelError as error:
            if settings.mtp:
                raise
            return None, f"no draft head: {error.what}"
        return plan, ""

    def _unread(self) -> str:
        """Why there is no head, where the settings leave it out."""
        row = self.settings.row("mtp").name
        if self.settings.origin("mtp") != "default":
            return f"no draft head: left unread (--no-mtp, {row}=0)"
        if any(name.startswith("mtp.") for name in self.checkpoint):
            return f"no draft head: the checkpoint has one, --mtp ({row}=1) drafts with it"
        return "no draft head: the checkpoint has none"

    def _open_head(self, plan: HeadPlan, kernels: Kernels, opened: ExitStack) -> DraftHead:
        settings, g, family = self.settings, self.geometry, self.family
        cap = self.mtp_cap or self.cap
        store = self._open_store(plan.experts, cap, 4, opened)
        self.stores.append(store)
        wiring = settings.mtp_wiring if family.has_wirings else ""
        words = f"wiring {wiring}, " if wiring else ""
        besides = f" besides experts {store.format}, {cap} of {g.experts} in memory" if plan.slot else ""
        self.head_line = f"draft head: {words}RoPE base {plan.theta:,.0f}, {size(plan.nbytes)} resident{besides}"
        self.vocabulary, notes = open_vocabulary(settings, self.model_path, g.vocab)
        self.notes += notes
        writer = family.head_writer(g, self.weights, store, self.team, self.ctx, wiring, plan.theta)
        return DraftHead(
            writer, family.head_spec(g), self.model.lm_head, kernels, wiring=wiring, vocabulary=self.vocabulary,
            dump=_open_dump(settings, opened), dump_name=settings.row("mtp_dump").name,
        )

    def save_history(self) -> list[str]:
        """Write what was learned for later runs (USAGE_SAVE=0: nothing); says what could not be written."""
        if self.vocabulary is None or not self.settings.usage_save:
            return []
        self.vocabulary.save()
        notes = list(self.vocabulary.notes)
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


def _context(settings: Settings, geometry: Any) -> int:
    """Positions to keep: the default is cut to the model's limit, a larger wish is an error."""
    if settings.ctx > geometry.max_context and settings.origin("ctx") != "default":
        where = "--ctx" if settings.origin("ctx") == "flag" else "COLI_CTX"
        raise UsageError(f"a context of {settings.ctx:,} is beyond the model's limit of {geometry.max_context:,}",
                         where, f"give at most {geometry.max_context}")  # fmt: skip
    return min(settings.ctx, geometry.max_context)
