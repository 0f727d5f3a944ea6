"""The gate: how many drafts pay for themselves in the next verify (spec_decoding.md section 5).

Idea: an expected number of tokens over a measured price. a_j is the probability that draft j is accepted given those
before it were, T(n) the seconds of a forward of n rows, d what a source spends on each draft past its first, f what it
spends before its first draft is there:
    E(k) = 1 + a1 + a1 a2 + ... + a1..ak      cost(k) = (T(k+1) + f + (k-1) d) / T(1)      value(k) = E(k) / cost(k)
value(0) = 1, and the smallest k with the greatest value is carried. A row count not measured costs 1 + (n-1) rho plain
steps; before any plain step was timed so does every row count, and f and d have no price. f is ours (the law counts
the head's first draft in the verify): kept apart, T(n) means the same for every source.

Averages: `if w < M: w += 1; x += (v - x) / w`, a mean that becomes an EMA. M: 16 verifies, 8 forwards. Prior weight: 2.
What we add to the law, each guarded by the tests with the word in brackets in their names:
  - T(1) is wanted early: a gate that never saw a plain step asks for one at its first pick, and once more 8 forwards
    later, because a first sample is often a cold one. Until T(1) is known nothing says whether drafting pays
    [plain_step]. A plain step asked for and not taken (a fixed depth) is asked for again 64 forwards later, not at
    every pick.
  - Times err upwards. A sample over 3 times the estimate (of two samples and more) is let off, once in 8 samples of its
    row count; what comes again is real and counts in full. One hiccup of a busy machine else sets T(1) too high, drafts
    look free, and no plain step corrects it for 64 forwards [hiccup].
  - f has no price before 4 samples, and starts at the smallest of them: a head's first drafts read its experts, and one
    cold sample would decline it for 16 picks, and then for 16 more [cold].
  - An estimate without news for 8 forwards is out of its memory: the next sample moves it by half, or replaces it where
    that estimate was 3 times slower, so that the rare probes of a declining gate see a store that warmed up [row_27].
  - A probe in the place of a plain step whose drafts all stood is followed by another at once where such a verify could
    pay at all, until one is rejected; then none is for 64 picks. With one sample in 16 picks, acceptance that returns
    from 0 would take hundreds of picks to be seen, not 32 [row_29]. Where it does not return, this loses at most one
    plain step in 64 picks: a / (1 - a) probes more, each short of its cost (below 2) by less than 1 - a.
Invariant: no clock, no engine, no array in here: times come in as numbers, and a pick, a forward and a result cost
2 to 3 us together. Guarded by tests/speculation/test_gate.py and tests/complaints/test_gate_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from coli.speculation.report import GateReport

MOST_DRAFTS = 8
PROBE_EVERY, PLAIN_EVERY, PLAIN_SOON = 16, 64, 8  # picks of a source; forwards; forwards while T(1) is one sample
PRIORS = {"mtp": (0.8, 0.6), "lookup": (0.5,)}  # of a_j by position; every later one starts at LATER_PRIOR
LATER_PRIOR, RHO_PRIOR, MOST_RHO = 0.5, 0.5, 4.0
PRIOR_WEIGHT, VERIFIES, FORWARDS = 2, 16, 8  # the weight of a prior, the memories of acceptance and of times
HICCUP = 3.0  # times the estimate
TRIALS = 4  # drafts written before their cost counts
BINS = 10  # of p
REPORTED = 5  # positions


class _Seconds:
    """A damped average of times; unmeasured while its weight is 0. `now` counts forwards."""

    __slots__ = ("at", "spared", "weight", "x")

    def __init__(self) -> None:
        self.x, self.weight, self.at = 0.0, 0, 0
        self.spared = 0  # samples until a hiccup is let off again

    def add(self, seconds: float, now: int) -> None:
        weight = self.weight
        if weight:
            if now - self.at > FORWARDS:
                weight = 1
            self.at = now
            if self.spared:
                self.spared -= 1
            elif seconds > HICCUP * self.x and self.weight > 1:  # of two samples nobody knows which is the odd one
                self.spared = FORWARDS
                return
            if weight == 1 and self.x > HICCUP * seconds:
                weight = 0
        if weight < FORWARDS:
            weight += 1
        self.x += (seconds - self.x) / weight
        self.weight, self.at = weight, now


class _FirstCost(_Seconds):
    """f: the smallest of its first TRIALS samples, which has no price before they are all there."""

    __slots__ = ("trials",)

    def __init__(self) -> None:
        super().__init__()
        self.trials = 0

    def add(self, seconds: float, now: int) -> None:
        if self.trials == TRIALS:
            super().add(seconds, now)
        else:
            self.x = min(seconds, self.x) if self.trials else seconds
            self.trials += 1
            self.weight, self.at = self.trials, now

    @property
    def price(self) -> float:
        return self.x if self.trials == TRIALS else 0.0


class _Acceptance:
    """Probabilities, one average each."""

    __slots__ = ("weights", "x")

    def __init__(self, priors: list[float]) -> None:
        self.x, self.weights = priors, [PRIOR_WEIGHT] * len(priors)

    def add(self, index: int, accepted: bool) -> None:
        weight = self.weights[index]
        if weight < VERIFIES:
            self.weights[index] = weight = weight + 1
        self.x[index] += ((1.0 if accepted else 0.0) - self.x[index]) / weight


class _Source:
    """What is known of one source, its counters, and where its probing stands."""

    __slots__ = (
        "again", "bins", "by_position", "declined", "due", "extra", "first", "from_plain", "picks", "probes", "probing",
        "repeated", "rests", "used",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        priors = PRIORS[name]
        self.by_position = _Acceptance([*priors, *[LATER_PRIOR] * (MOST_DRAFTS - len(priors))])
        self.bins = _Acceptance([(b + 0.5) / BINS for b in range(BINS)])
        self.first, self.extra = _FirstCost(), _Seconds()  # f and d
        self.used = False
        self.picks = self.declined = self.probes = 0
        self.probing = self.from_plain = False  # the last pick was a probe; instead of a plain step
        self.due = False  # a probe is owed
        self.again = self.repeated = False  # the last probe calls for another; was one itself
        self.rests = 0  # until this many picks no probe calls for another

    def probed(self, stood: bool, cheap: bool) -> None:
        """How the probe under way ended: whether all its drafts stood, and whether such a verify could ever pay."""
        if self.probing and self.from_plain:
            if stood and cheap:
                self.again = self.picks >= self.rests
            elif self.repeated:
                self.rests = self.picks + PLAIN_EVERY
        self.probing = False


class Gate:
    """Sources are "mtp" and "lookup". It lives as long as a session; `turn` starts the counters anew and keeps what was
    learned. All times are seconds and positive. A name, row count or draft count that cannot be raises.

    Per step: `pick` for every source with a proposal (`outdone` for the one not carried), the forward, `forward` with
    its rows and time; when the verify has settled, `result`.
    """

    def __init__(self) -> None:
        self._sources = {name: _Source(name) for name in PRIORS}
        self._times = [_Seconds() for _ in range(MOST_DRAFTS + 2)]  # T(n); 0 is not used
        self._rho, self._rho_weight = RHO_PRIOR, PRIOR_WEIGHT
        self._forwards, self._until_plain = 0, 0
        self._asked_first = False  # the next plain step is the first, and one that the gate asked for
        self._last = 0.0  # seconds of the last forward
        self._decided = False

    # -- what happened -------------------------------------------------------------------------------------------------

    def forward(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows (1 is a plain step, at most 9) took `seconds`."""
        if not 1 <= rows <= MOST_DRAFTS + 1 or not seconds > 0.0:
            raise ValueError(f"a forward of {rows} rows in {seconds} s")
        self._forwards = now = self._forwards + 1
        self._last = seconds
        self._times[rows].add(seconds, now)
        plain = self._times[1].x
        if rows == 1 or self._until_plain <= 0:
            self._until_plain = PLAIN_SOON if self._asked_first and rows == 1 else PLAIN_EVERY
            self._asked_first = False
        if rows == 1:
            return
        self._until_plain -= 1
        if plain:
            rho = (seconds / plain - 1.0) / (rows - 1)
            rho = 0.0 if rho < 0.0 else MOST_RHO if rho > MOST_RHO else rho
            if self._rho_weight < FORWARDS:
                self._rho_weight += 1
            self._rho += (rho - self._rho) / self._rho_weight

    def first_cost(self, source: str, seconds: float) -> None:
        """`source` took `seconds` until its first draft was there."""
        found = self._sources[source]
        found.used = True
        found.first.add(seconds, self._forwards)

    def draft_cost(self, source: str, seconds: float) -> None:
        """`source` took `seconds` for one draft past its first."""
        found = self._sources[source]
        found.used = True
        found.extra.add(seconds, self._forwards)

    def result(self, source: str, judged: int, accepted: int) -> None:
        """A verify settled: the first `accepted` drafts stood; one more was judged if the next was rejected."""
        if not 0 <= accepted <= judged <= accepted + 1:
            raise ValueError(f"{judged} drafts judged, {accepted} accepted")
        found = self._sources[source]
        found.used = True
        if judged and found.probing:
            found.probed(judged == accepted, self._last + found.first.price < 2.0 * self._times[1].x)
        known = found.by_position
        for j in range(accepted):
            known.add(j, True)
        if judged > accepted:
            known.add(accepted, False)

    def result_p(self, source: str, p: Sequence[float], judged: int, accepted: int) -> None:
        """`result` for a source that gave its drafts' probabilities `p` (of the carried ones at least)."""
        self.result(source, judged, accepted)
        bins = self._sources[source].bins
        for j in range(judged):
            bins.add(_bin(p[j]), j < accepted)

    def outdone(self, source: str) -> None:
        """The last pick of `source` was not carried: another source's was worth more. If it was a probe it does not
        count, and the next pick is one."""
        found = self._sources[source]
        if found.probing:
            found.probes -= 1
            found.probing, found.due = False, True

    def turn(self) -> None:
        """A new answer: counters start at 0."""
        self._decided = False
        for source in self._sources.values():
            source.declined = source.probes = 0

    # -- what to do ----------------------------------------------------------------------------------------------------

    def wants_plain(self) -> bool:
        """Whether the next step should be a plain one for its time alone: then drafts need not be written either."""
        due = self._until_plain <= 0
        if due:
            self._asked_first = not self._times[1].weight
        return due

    def pick(self, source: str, proposed: int) -> tuple[int, float]:
        """(k, value(k)): how many of at most `proposed` drafts of `source` to carry. 0 is a plain step."""
        if proposed <= 0:
            return 0, 1.0
        found = self._sources[source]
        found.used = self._decided = True
        if self.wants_plain():
            return 0, 1.0
        limit = proposed if proposed < MOST_DRAFTS else MOST_DRAFTS
        return self._decide(found, found.by_position.x, limit, found.first.price, found.extra.x, 1.0)

    def pick_p(self, source: str, p: Sequence[float], fixed: int | None = None) -> tuple[int, float]:
        """`pick` among drafts already written, each with its probability `p`. With a `fixed` depth the first draft is
        always kept and at most `fixed` are; from a depth of 2 on a plain step is still taken every 64 forwards."""
        if not p:
            return 0, 1.0
        found = self._sources[source]
        found.used = self._decided = True
        if fixed != 1 and self.wants_plain():
            return 0, 1.0
        limit = min(len(p), fixed or MOST_DRAFTS, MOST_DRAFTS)
        acceptance = [found.bins.x[_bin(probability)] for probability in p[:limit]]
        return self._decide(found, acceptance, limit, 0.0, 0.0, 0.0 if fixed else 1.0)

    def deeper_p(self, source: str, p: Sequence[float]) -> bool:
        """Whether to write one more draft after those with probabilities `p`: no shorter verify is already worth more
        than all of them, and with a draft of the gate's best bin they would beat both a plain step and themselves."""
        count = len(p)
        if count >= MOST_DRAFTS:
            return False
        bins = self._sources[source].bins.x
        acceptance = [bins[_bin(probability)] for probability in p] + [max(bins)]
        values = [self._value(acceptance, k, 0.0, 0.0) for k in range(count + 2)]
        *shorter, now, deeper = values
        return all(value <= now for value in shorter[1:]) and deeper > max(1.0, now)

    def _decide(
        self, source: _Source, acceptance: Sequence[float], limit: int, first: float, extra: float, floor: float
    ) -> tuple[int, float]:
        """The best k of 0..limit whose value is above `floor`, or a probe one deeper; counts. The loop is `_value` for
        every k, written out because it runs once a token."""
        times, rho, plain = self._times, self._rho, self._times[1].x
        best, top, tokens, chance = 0, floor, 1.0, 1.0
        for k in range(1, limit + 1):
            chance *= acceptance[k - 1]
            tokens += chance
            if plain:
                row = times[k + 1]
                seconds = row.x if row.weight else plain * (1.0 + k * rho)
                value = tokens * plain / (seconds + first + (k - 1) * extra)
            else:
                value = tokens / (1.0 + k * rho)
            if value > top:
                best, top = k, value
        source.picks += 1
        again = source.again and not best
        due = again or source.due or source.picks % PROBE_EVERY == 0
        source.due = source.again = source.probing = False
        if due and best < limit:
            source.probes += 1
            source.probing, source.from_plain, source.repeated = True, not best, again
            return best + 1, self._value(acceptance, best + 1, first, extra)
        if not best:
            source.declined += 1
            return 0, 1.0
        return best, top

    # -- the numbers ---------------------------------------------------------------------------------------------------

    def E(self, source: str, k: int) -> float:
        """Tokens expected of a verify with `k` drafts."""
        return _expected(self._sources[source].by_position.x, k)

    def cost(self, source: str, k: int) -> float:
        """Plain steps that a verify with `k` drafts takes, the drafts' own time included."""
        found = self._sources[source]
        return self._cost(k, found.first.price, found.extra.x)

    def value(self, source: str, k: int) -> float:
        """Tokens per plain step's time."""
        found = self._sources[source]
        return self._value(found.by_position.x, k, found.first.price, found.extra.x)

    def _value(self, acceptance: Sequence[float], k: int, first: float, extra: float) -> float:
        return _expected(acceptance, k) / self._cost(k, first, extra)

    def _cost(self, k: int, first: float, extra: float) -> float:
        if not 0 <= k <= MOST_DRAFTS:
            raise ValueError(f"{k} drafts; the gate knows 0 to {MOST_DRAFTS}")
        plain, row = self._times[1].x, self._times[k + 1]
        if k == 0:
            return 1.0
        if not plain:
            return 1.0 + k * self._rho
        return ((row.x if row.weight else plain * (1.0 + k * self._rho)) + first + (k - 1) * extra) / plain

    def declined(self, source: str) -> int:
        """Proposals of this turn of which nothing was worth carrying. A plain step taken for its time is not one."""
        return self._sources[source].declined

    def probes(self, source: str) -> int:
        """Picks of this turn that went one deeper than the best, to learn. One with nothing deeper to try is none."""
        return self._sources[source].probes

    def describe(self, positions: int = 0) -> GateReport:
        """What was measured so far; acceptance of the head if there was ever word of it, else of the lookup, at so many
        positions where they are more than REPORTED."""
        head, plain = self._sources["mtp"], self._times[1].x
        source = head if head.used else self._sources["lookup"]
        rows = [(n, row.x / plain) for n, row in enumerate(self._times) if n > 1 and row.weight and plain]
        return GateReport(
            t1_s=plain or None, rows=tuple(rows), rho=self._rho, draft_s=head.extra.x, first_s=head.first.x,
            acceptance=tuple(source.by_position.x[: max(positions, REPORTED)]), decided=self._decided,
        )  # fmt: skip


def _expected(acceptance: Sequence[float], k: int) -> float:
    tokens = chance = 1.0
    for j in range(k):
        chance *= acceptance[j]
        tokens += chance
    return tokens


def _bin(p: float) -> int:
    return min(int(p * BINS), BINS - 1)
