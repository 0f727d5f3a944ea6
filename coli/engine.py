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
from dataclasses import asdict
from typing import Any, TypeAlias

from coli import memory
from coli.chat import ChatTemplate, stop_ids
from coli.errors import ModelError, UsageError
from coli.experts import ExpertStore, expert_record, stored_kind
from coli.formats.checkpoint import Checkpoint
from coli.models import find, qwen38_layout, qwen38_program
from coli.models.base import Weights, never
from coli.models.qwen38 import Qwen38
from coli.models.qwen38_geometry import Geometry
from coli.program.cache import Kernels
from coli.program.cpu import Team, default_threads, usable_cpus
from coli.report import size
from coli.settings import Settings, no_effect
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
        self.terms = memory.terms(
            qwen38_program.state_spec(g), ctx=self.ctx,
            dense=qwen38_layout.dense_bytes(self.checkpoint, g, trunk_int8=settings.trunk_int8),
            workspace=qwen38_program.workspace_bytes(g, limit=self.limit, ctx=self.ctx, threads=self.threads),
        )
        budget = settings.ram or memory.default_budget()
        fits = memory.choose_cap(budget, self.terms, layers=g.layers, experts=g.experts, slot_bytes=slot)
        self.cap = min(settings.cap or fits, fits, g.experts)
        if settings.cap and self.cap < settings.cap < g.experts:
            self.notes.append(f"--cap {settings.cap} lowered to {self.cap}: the memory budget holds no more")
        store = ExpertStore(self.checkpoint, g, self.cap, threads=max(4, min(self.threads, 32)))
        opened.callback(store.close)
        int8_rows = qwen38_layout.int8_rows if settings.trunk_int8 else never
        weights = Weights(self.checkpoint, int8_rows=int8_rows, activations=settings.act)
        self.model = Qwen38(
            self.checkpoint, g, weights, store, kernels, self.team, ctx=self.ctx, limit=self.limit
        )
        opened.callback(self.model.close)
        self.store, self.weights = store, weights

    def geometry_facts(self) -> dict[str, Any]:
        """The geometry as plain JSON values."""
        facts = asdict(self.geometry)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}

    def banner(self) -> str:
        dense = "int8 rows" if self.settings.trunk_int8 else "as stored"
        return (
            f"coli {self.name} · {self.model_path.name} ({size(self.checkpoint.nbytes)}) · "
            f"experts {self.store.record.kind}, {self.cap} of {self.geometry.experts} a layer in memory · "
            f"dense weights {dense} · context {self.ctx:,} · {self.threads} thread{'s' * (self.threads > 1)}"
        )

    def close(self) -> None:
        self._closing.close()
        self.checkpoint.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _context(settings: Settings, geometry: Geometry) -> int:
    """Positions to keep: the default is cut to the model's limit, a larger wish is an error."""
    if settings.ctx > geometry.max_context and settings.origin("ctx") != "default":
        where = "--ctx" if settings.origin("ctx") == "flag" else "COLI_CTX"
        raise UsageError(f"a context of {settings.ctx:,} is beyond the model's limit of {geometry.max_context:,}",
                         where, f"give at most {geometry.max_context}")  # fmt: skip
    return min(settings.ctx, geometry.max_context)
