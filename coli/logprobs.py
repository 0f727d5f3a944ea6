"""How likely the model held each token: natural logarithms of the softmax of its own logits.

They come from the row that the token was picked from, before bias, mask, penalties and temperature: what the model
says, whatever the request does with it, and the same with drafts and without, bit for bit (complaint row 31,
tests/speculation/test_logprobs.py). Sums are float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coli.sampling import ranked

Floats = NDArray[np.float32]


class Scored(NamedTuple):
    """A token of an answer; `logprob` None and `top` empty where nobody asked. `top`: the likeliest tokens with their
    logarithms, the best first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def scored(logits: Floats, token: int, alternatives: int) -> Scored:
    """`token` with its logprob and those of the `alternatives` likeliest, from float32 logits [vocab] without NaN."""
    best = float(logits.max())
    with np.errstate(under="ignore"):
        whole = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
    ids = ranked(logits, alternatives) if alternatives else ()
    return Scored(token, float(logits[token]) - whole, tuple((int(i), float(logits[i]) - whole) for i in ids))
