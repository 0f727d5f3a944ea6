"""What every endpoint shares: the engine, its scheduler, and what is counted and kept of past turns.

    request.app.state.service    the Service; no endpoint runs before there is one (guards.Ready)
    request.state.content        the body, a JSON object with valid text in it (guards.Body)
    request.state.request_id     as in the header x-request-id

Whatever an endpoint raises becomes a refusal in the API's shape (guards.Answered, errors.ApiError.of), as long as its
answer has not begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coli.server.errors import ApiError, model_not_found
from coli.server.job import Busy, Draining, Job
from coli.server.metrics import Metrics
from coli.server.observers import Observers
from coli.server.options import ServeOptions
from coli.server.profile import Profile
from coli.server.scheduler import Scheduler
from coli.server.turn_lines import TurnLines
from coli.speculation.options import Speculation

if TYPE_CHECKING:
    from coli.engine import Engine
    from coli.server.ask import Prepared


class Service:
    """One model being served; `close` it before its engine. `model_id` is its name on the wire; report lines of every
    turn go to `say`, on the engine's thread."""

    def __init__(self, engine: Engine, options: ServeOptions, say: Callable[[str], None]) -> None:
        self.engine, self.options, self.say = engine, options, say
        self.metrics, self.profile = Metrics(engine), Profile()
        self.scheduler = Scheduler(
            engine, slots=options.slots, max_queue=options.max_queue, queue_timeout=options.queue_timeout,
            checkpoints=options.checkpoints, pins=options.pins,
            observe=Observers(self.metrics, self.profile, TurnLines(say)),
        )  # fmt: skip
        self.metrics.sessions = self.scheduler.sessions
        self.scheduler.start()
        self.model_id = options.model_id or model_name(engine.model_path)
        self.created = int(time.time())
        self.draining = False

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 unless `name` is the model served."""
        if name != self.model_id:
            raise model_not_found(name, self.model_id)

    def models(self) -> list[dict[str, Any]]:
        """The one model, with the fields that OpenAI's clients read and those that Anthropic's do."""
        created = datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return [{
            "id": self.model_id, "object": "model", "created": self.created, "owned_by": "coli",
            "max_model_len": self.engine.ctx,
            "type": "model", "display_name": self.model_id, "created_at": created, "lifecycle": "active",
            "max_input_tokens": self.engine.ctx, "max_tokens": self.engine.ctx,
        }]  # fmt: skip

    @property
    def drafts(self) -> dict[str, Any]:
        """What turns draft with unless they say otherwise, after all was decided; `most` in one verify."""
        own = Speculation.of(self.engine.settings)
        own = replace(own, mtp=own.mtp and self.engine.head is not None)
        return {"head": own.mtp, "lookup": own.lookup, "most": own.deepest}

    def submit(self, prepared: Prepared, request_id: str) -> Job:
        """Put a turn into the queue. Raises ApiError 429 or 503 where that cannot be."""
        try:
            return self.scheduler.submit(prepared.request, request_id)
        except (Busy, Draining) as refusal:
            raise ApiError.of(refusal) from None

    async def drain(self) -> None:
        """Take no more turns; returns when the last one has ended."""
        self.draining = True
        await self.scheduler.drain()

    def close(self) -> list[str]:
        """End every turn and the engine's thread, save what was learned; says what could not be saved."""
        self.scheduler.close()
        return self.engine.save_history()


def model_name(path: Path) -> str:
    """The folder's or the file's name; of a snapshot in Hugging Face's cache the id."""
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return "/".join(path.parent.parent.name.split("--")[1:])
    return path.name.removesuffix(".gguf")
