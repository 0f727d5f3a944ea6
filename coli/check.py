"""`--check`: the proof, on the user's own model and prompt, that drafting changed nothing.

The answer is decoded once more on a fresh session without drafts, with the same request and the seed that the first
run drew, for exactly as many tokens as were emitted (so a cancelled answer can be checked too). Ids must be equal and
the logits that chose the last token must be equal byte for byte. On a difference the plain run is repeated up to that
token for its logits: the margin between the two tokens tells a near tie (adaptive placement) from a fault.
Guarded by tests/cli/test_speculation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.engine import Engine
from coli.session import Request, Session
from coli.speculation.options import Speculation

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """Where an answer and plain decoding part. `position` counts the answer's tokens from 0; `plain_token` is None
    where plain decoding had ended. `margin`, in the plain run's logits: of `plain_token` over `token`, or over the
    runner-up when only the last logits differ."""

    position: int
    token: int
    plain_token: int | None
    margin: float | None
    logits_differ: bool

    def __str__(self) -> str:
        where = f"token {self.position} of the answer"
        if self.plain_token is None:
            return f"{where} is {self.token}, plain decoding ended before it"
        if self.plain_token == self.token:
            said = f"the logits that chose {where} ({self.token}) are not plain decoding's"
        else:
            said = f"{where} is {self.token}, plain decoding has {self.plain_token}"
        return f"{said}, logit margin {self.margin:.6g}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(
    engine: Engine, request: Request, ids: Sequence[int], last_logits: Floats | None, seed: int | None
) -> Difference | None:
    """None when plain decoding picks `ids` with `last_logits`. `seed`: of the sampler that drew them, None when greedy.
    The session that answered must be at rest."""
    if not ids or last_logits is None:
        return None
    mine = last_logits.tobytes()  # now: the replay computes into the same buffers
    request = replace(request, sampling=replace(request.sampling, seed=seed))
    plain, logits = replay(engine, request, len(ids))
    differ = logits.tobytes() != mine
    at = next((i for i, (a, b) in enumerate(zip(ids, plain, strict=False)) if a != b), len(plain))
    if at == len(ids):
        return Difference(at - 1, ids[-1], plain[-1], _lead(logits, plain[-1]), True) if differ else None
    if at == len(plain):
        return Difference(at, ids[at], None, None, differ)
    _, chose = replay(engine, request, at + 1)
    return Difference(at, ids[at], plain[at], float(chose[plain[at]]) - float(chose[ids[at]]), differ)


def replay(engine: Engine, request: Request, tokens: int) -> tuple[tuple[int, ...], Floats]:
    """(ids, logits that chose the last one) of plain decoding, `tokens` at most."""
    session = Session(engine, Speculation.off())
    for _ in session.generate(replace(request, max_tokens=tokens)):
        pass  # the text is known
    assert session.last_logits is not None
    return session.picked_ids, session.last_logits.copy()


def _lead(logits: Floats, token: int) -> float:
    """The logit of `token` over the best of the others."""
    others = np.delete(logits, token)
    return float(logits[token]) - float(others.max())
