"""Open a checkpoint as the engine does and run rows through it; and the same rows through the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from coli.engine import Engine
from coli.settings import load
from coli.state import MAX_UNDOABLE, State
from tests import oracle


def text_config(folder: Path) -> dict:
    raw = json.loads((folder / "config.json").read_text())
    return raw.get("text_config", raw)


def random_ids(count: int, folder: Path, seed: int = 5) -> np.ndarray:
    """Random tokens with a few segment ends and a repeated stretch."""
    config = text_config(folder)
    eos = config["eos_token_id"]
    eos = eos[0] if isinstance(eos, list) else eos
    ids = np.random.default_rng(seed).integers(2, config["vocab_size"], count)
    ids[[at for at in (9, 10, 30, 55) if at < count]] = eos
    if count > 48:
        ids[40:48] = ids[12:20]
    return ids


def oracle_logits(
    folder: Path, ids: np.ndarray, dtype: type, change: Callable[[str, np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    return oracle.load(folder, dtype, **({"change": change} if change else {})).forward(ids)[0]


class Opened:
    """An engine on `folder` with one state, closed at the end of the `with`."""

    def __init__(self, folder: Path, **flags) -> None:
        self.engine = Engine.open(load({"model": str(folder), "threads": 2} | flags, {})[0])
        self.state: State = self.engine.model.new_state()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def logits(self, ids: np.ndarray, chunks: list[int]) -> tuple[list[int], np.ndarray]:
        """(positions, their logits) of a fresh sequence run in pieces of these sizes, the last one repeated: of every
        row for pieces up to 8 rows, of the last row for longer ones (prefill never asks for more)."""
        self.state.reset()
        positions, out, at, sizes = [], [], 0, list(chunks)
        while at < len(ids):
            piece = ids[at : at + (sizes.pop(0) if len(sizes) > 1 else sizes[0])]
            want = "all" if len(piece) <= MAX_UNDOABLE else "last"
            out.append(self.engine.model.forward(piece, self.state, want=want).logits.copy())
            at += len(piece)
            positions += list(range(at - len(out[-1]), at))
        return positions, np.concatenate(out)


# ---- what holds for every engine -----------------------------------------------------------------------------------


def every_row_of_a_long_piece(folder: Path) -> None:
    """Asking for all rows of more than a piece gives each row its own."""
    ids = random_ids(30, folder)
    with Opened(folder) as opened:
        _, single = opened.logits(ids, [1])
        opened.state.reset()
        answer = opened.engine.model.forward(ids, opened.state, want="all")
        assert answer.logits.tobytes() == single.tobytes()
        assert len({row.tobytes() for row in answer.streams}) == len(ids)


def any_chunking(folder: Path, seed: int) -> None:
    """However the tokens come in, logits and state are the same."""
    ids = random_ids(90, folder, seed)
    with Opened(folder) as opened:
        _, one = opened.logits(ids, [1])
        content = opened.state.content()
        at, many = opened.logits(ids, np.random.default_rng(seed).integers(1, 30, 90).tolist())
        assert many.tobytes() == one[at].tobytes()
        assert opened.state.content() == content
