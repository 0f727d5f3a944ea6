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
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from coli import memory
from coli.chat import ChatTemplate, stop_ids
from coli.errors import DoesNotFit, ModelError, UsageError
from coli.experts import ExpertStore, expert_record, stored_kind
from coli.formats.checkpoint import Checkpoint
from coli.models import find, qwen38_layout, qwen38_program
from coli.models.base import Weights, never
from coli.models.qwen38 import Qwen38
from coli.models.qwen38_geometry import Geometry
from coli.models.qwen38_mtp import HeadPlan, Qwen38Head, plan_head
from coli.program.cache import Kernels
from coli.program.cpu import Team, default_threads, usable_cpus
from coli.report import size
from coli.settings import Settings, no_effect
from coli.speculation import lookup
from coli.speculation.options import Speculation, idle
from coli.speculation.vocabulary import Vocabulary, usage_path
from coli.tokenizer import Tokenizer

Progress: TypeAlias = Callable[[str], None]


class Engine:
    """A loaded model with its tokenizer, thread team and expert cache. Use `Engine.open`; close it when done."""

    name = "qwen38"

    def __init__(
        self, settings: Settings, checkpoint: Checkpoint, geometry: Geometry, on_progress: Progress | None, start: float
    ) -> None:
        self.settings, self.checkpoint, self.geometry = settings, checkpoint, geometry
        self.model_path = checkpoint.folder
        self.notes: list[str] = no_effect(settings, self.name)
        self.ctx = _context(settings, geometry)
        self.threads = settings.threads or default_threads()
        if self.threads > usable_cpus():
            self.notes.append(
                f"{self.threads} threads on {usable_cpus()} CPUs wait for each other: --threads {default_threads()} is "
                "faster"
            )
        self.vocabulary: Vocabulary | None = None
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
            if checkpoint.config.get("model_type") not in qwen38_layout.MODEL_TYPES:
                raise ModelError(f"model type {checkpoint.config.get('model_type')!r} is not one coli runs",
                                 path / "config.json", f"it runs {', '.join(qwen38_layout.MODEL_TYPES)}")  # fmt: skip
            geometry = qwen38_layout.geometry(checkpoint.config, path / "config.json")
            qwen38_layout.check(checkpoint, geometry)
            engine = cls(settings, checkpoint, geometry, on_progress, start)
            opened.pop_all()
            return engine

    def _open_text(self) -> tuple[Tokenizer, ChatTemplate | None, frozenset[int]]:
        tokenizer = Tokenizer.load(self.model_path)
        chat = ChatTemplate.load(self.model_path, tokenizer)
        return tokenizer, chat, stop_ids(self.model_path, self.checkpoint.raw_config)

    def _open_model(self, kernels: Kernels, opened: ExitStack) -> None:
        g, settings = self.geometry, self.settings
        self.limit = min(settings.prefill_chunk, self.ctx)
        kind, block = stored_kind(self.checkpoint, g)
        slot = expert_record(kind, g, block).nbytes
        plan, self.head_line = self._plan_head()
        plan, fits = self._fit(slot, plan)
        self.cap = min(settings.cap or fits, fits, g.experts)
        if settings.cap and self.cap < settings.cap < g.experts:
            self.notes.append(f"--cap {settings.cap} lowered to {self.cap}: the memory budget holds no more")
        store = ExpertStore(self.checkpoint, g, self.cap, threads=max(4, min(self.threads, 32)))
        opened.callback(store.close)
        int8_rows = qwen38_layout.int8_rows if settings.trunk_int8 else never
        weights = Weights(self.checkpoint, int8_rows=int8_rows, activations=settings.act)
        self.model = Qwen38(
            self.checkpoint, g, weights, store, kernels, self.team, ctx=self.ctx, limit=self.limit, undo=settings.undo
        )
        opened.callback(self.model.close)
        self.store, self.weights = store, weights
        self.stores = [store]  # the trunk's, then the head's
        self.head: Qwen38Head | None = None
        if plan is not None:
            self._load_head(plan, kernels, opened)
        self.notes += idle(settings, head=self.head is not None)

    def _fit(self, slot: int, plan: HeadPlan | None) -> tuple[HeadPlan | None, int]:
        """(the head that fits, experts a layer): a head's own --mtp-cap gives way first, then a head nobody demanded.
        Raises DoesNotFit."""
        if plan is None:
            return None, self._budget(slot, None, 0)
        own = min(self.settings.mtp_cap or 0, self.geometry.experts)
        for self.mtp_cap in sorted({own, 0}, reverse=True):
            with suppress(DoesNotFit):
                fits = self._budget(slot, plan, self.mtp_cap)
                if self.mtp_cap != own:
                    self.notes.append(f"--mtp-cap {own} is more than the memory budget holds: the head keeps as many "
                                      "experts as a layer")  # fmt: skip
                return plan, fits
        if self.settings.mtp:
            return plan, self._budget(slot, plan, 0)  # raises
        self.head_line = "no draft head: the memory budget holds the model only without it"
        return None, self._budget(slot, None, 0)

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

    def _budget(self, slot: int, plan: HeadPlan | None, mtp_cap: int) -> int:
        """Experts a layer that the budget holds beside everything else; `mtp_cap`: those of the head, 0 for as many as
        a layer keeps. Raises DoesNotFit."""
        g, settings, spec = self.geometry, self.settings, qwen38_program.state_spec(self.geometry)
        head, each = 0, g.layers * slot
        if plan is not None:
            head = plan.nbytes + mtp_cap * plan.slot
            each += 0 if mtp_cap else plan.slot
        self.terms = memory.terms(
            spec, ctx=self.ctx, undo=spec.undo_bytes(settings.undo, Speculation.of(settings).deepest), head=head,
            dense=qwen38_layout.dense_bytes(self.checkpoint, g, trunk_int8=settings.trunk_int8),
            workspace=qwen38_program.workspace_bytes(g, limit=self.limit, ctx=self.ctx, threads=self.threads),
            lookup=self.ctx * lookup.TOKEN_BYTES * settings.lookup,
        )
        budget = settings.ram or memory.default_budget()
        return memory.choose_cap(budget, self.terms, experts=g.experts, each=each)

    def _plan_head(self) -> tuple[HeadPlan | None, str]:
        """The head to load, or None and why not. Raises ModelError where one is demanded."""
        settings = self.settings
        if settings.mtp is False:
            return None, "no draft head: left unread (--no-mtp, Q38_MTP=0)"
        try:
            plan = plan_head(
                self.checkpoint, self.geometry, ctx=self.ctx, threads=self.threads, trunk_int8=settings.trunk_int8
            )
        except ModelError as error:
            if settings.mtp:
                raise
            return None, f"no draft head: {error.what}"
        return plan, ""

    def _open_head(self, plan: HeadPlan, kernels: Kernels, opened: ExitStack) -> Qwen38Head:
        settings, g = self.settings, self.geometry
        cap = self.mtp_cap or self.cap
        store = ExpertStore(self.checkpoint, g, cap, threads=4, layers=(qwen38_layout.HEAD,))
        opened.callback(store.close)
        self.stores.append(store)
        self.head_line = (
            f"draft head: wiring {settings.mtp_wiring}, RoPE base {plan.theta:,.0f}, {size(plan.nbytes)} resident "
            f"besides experts {plan.kind}, {cap} of {g.experts} in memory"
        )
        self.vocabulary = None if settings.mtp_dump else self._open_vocabulary()
        return Qwen38Head(
            g, self.weights, self.model.lm_head, store, kernels, self.team, ctx=self.ctx, wiring=settings.mtp_wiring,
            theta=plan.theta, vocabulary=self.vocabulary, dump=_open_dump(settings.mtp_dump, opened),
        )

    def _open_vocabulary(self) -> Vocabulary | None:
        """The tokens the head scores; None where it scores all."""
        settings, vocab = self.settings, self.geometry.vocab
        if not 0 < settings.mtp_vocab < vocab:
            return None
        path, off = usage_path(self.model_path, settings)
        if path is None:
            self.notes.append(off)
            return None
        vocabulary = Vocabulary(vocab, settings.mtp_vocab, path)
        self.notes += vocabulary.notes
        vocabulary.notes.clear()
        return vocabulary

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
        dense = "int8 rows" if self.settings.trunk_int8 else "as stored"
        return (
            f"coli {self.name} · {self.model_path.name} ({size(self.checkpoint.nbytes)}) · "
            f"experts {self.store.record.kind}, {self.cap} of {self.geometry.experts} a layer in memory · "
            f"dense weights {dense} · context {self.ctx:,} · {self.threads} thread{'s' * (self.threads > 1)}\n"
            f"{self.head_line}"
        )

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


def _open_dump(path: Path | None, opened: ExitStack) -> BinaryIO | None:
    if path is None:
        return None
    try:
        return opened.enter_context(open(path, "ab", buffering=0))  # what cannot be written is known at once
    except OSError as error:
        hint = "give a file in a folder you may write"
        raise UsageError(f"cannot write {path}: {error.strerror}", "Q38_MTP_DUMP", hint) from error


def _context(settings: Settings, geometry: Geometry) -> int:
    """Positions to keep: the default is cut to the model's limit, a larger wish is an error."""
    if settings.ctx > geometry.max_context and settings.origin("ctx") != "default":
        where = "--ctx" if settings.origin("ctx") == "flag" else "COLI_CTX"
        raise UsageError(f"a context of {settings.ctx:,} is beyond the model's limit of {geometry.max_context:,}",
                         where, f"give at most {geometry.max_context}")  # fmt: skip
    return min(settings.ctx, geometry.max_context)
