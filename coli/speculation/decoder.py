"""Decoding behind one door: `feed(token)` returns the logits after it, and nobody outside sees a draft.

The caller picks every token, from the main model's logits alone. A source proposes what may follow; one forward over
the pick and its k drafts (a *verify*) returns row 0's logits and keeps the other rows'. A later pick that equals the
next draft is answered from that draft's row without a forward. The first that differs ends the verify: the rows behind
the last one that stands are undone (`state.keep`), and the next verify starts from the caller's pick.
Rules, names and constants: spec_decoding.md sections 1 to 5.

Where we leave those rules, each for a reason:
  - k stays below the tokens the caller may still pick (`begin`): nobody asks for the rows behind them.
  - A copied proposal that no verify carried is judged by the picks all the same, for the gate alone (`Shadow`): beside
    a good head the lookup's estimate would stay at its prior for ever.
  - The head's time until its first draft is kept apart from T(n) (coli/speculation/gate.py), so that verifies of both
    sources share T(n).
  - The head's list of tokens (coli/speculation/vocabulary.py) is scored whatever lm_head is stored as: a listed row of
    a bf16 matrix costs no more than its bytes.
  - Section 3 turns drafting off where a row's result depends on what is resident. Nothing here does: a row has the same
    bits whatever the expert cache holds, so there is no such case and no line about it.
A draft's row that cannot be computed (an expert or an n-gram row that only it needs cannot be read, a value overflows)
is as good as a wrong draft: the answer's rows end before it, and plain decoding decides should it ever come there.

Invariants, over any drafts (tests/speculation/test_exactness.py): the logits are those of plain decoding, byte for
byte; after `finish` so is every byte of state; tokens = forwards + accepted drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from coli.speculation.force import forced
from coli.speculation.gate import Gate
from coli.speculation.lookup import Lookup
from coli.speculation.mtp import Head, HeadPlace, MtpSource
from coli.speculation.options import Speculation
from coli.speculation.proposal import Proposal, Shadow, Verify
from coli.speculation.report import SpeculationReport, VocabularyReport, acceptance_warning
from coli.speculation.tally import Tally
from coli.state import Snapshot, State

Trace = Callable[[dict[str, Any]], None]
Overwrite = Callable[[int, Sequence[int], bool], None]


class Model(Protocol):
    """What the decoder asks of a model. `row_bytes`: file bytes each row of the last forward had read."""

    limit: int

    def forward(self, tokens: Any, state: State, want: str = "last", undoable: bool = False) -> Any: ...
    @property
    def row_bytes(self) -> np.ndarray: ...


class Vocabulary(Protocol):
    """The list a head scores, learned or fixed (coli/speculation/vocabulary.py)."""

    def seat(self) -> Any: ...
    def sit(self, seat: Any) -> None: ...
    def begin(self, conversation: Sequence[int]) -> None: ...
    def read(self, tokens: Sequence[int]) -> None: ...
    def picked(self, token: int) -> None: ...
    def turn_report(self) -> VocabularyReport: ...


@dataclass(frozen=True)
class Place:
    """Where a decoder stood between two turns. K/V and index keys stay where they are until overwritten."""

    trunk: Snapshot
    head: HeadPlace | None

    @property
    def nbytes(self) -> int:
        return self.trunk.nbytes + (0 if self.head is None else self.head.nbytes)


class Decoder:
    """Decodes one sequence; `state` is the trunk's. Made once a session: the gate's averages live as long."""

    def __init__(self, model: Model, state: State, options: Speculation, *, engine: str = "", vocab: int = 0,
                 head: Head | None = None, vocabulary: Vocabulary | None = None,
                 reference: Sequence[int] | None = None, trace: Trace | None = None) -> None:
        self.model, self.state, self.options = model, state, options
        self.gate = Gate()
        self.mtp = MtpSource(head) if head is not None and options.mtp else None
        self.lookup = Lookup() if options.lookup else None
        self._wiring = head.wiring if head is not None else ""
        self._shared_list = vocabulary if self.mtp is not None else None
        self._seat = None if self._shared_list is None else self._shared_list.seat()
        self._engine, self._vocab, self._reference, self._trace = engine, vocab, reference, trace
        self._verify: Verify | None = None
        self._base = options
        self.on_write: Overwrite | None = None  # is told, before they are written: first row, tokens, all stand
        self._start_turn()

    @property
    def _vocabulary(self) -> Vocabulary | None:
        """The list the head scores, as it is to this sequence."""
        if self._shared_list is not None:
            self._shared_list.sit(self._seat)
        return self._shared_list

    def _start_turn(self) -> None:
        self._tallies = {"mtp": Tally("mtp"), "lookup": Tally("lookup")}
        self._tokens = self._forwards = self._bytes = self._rejected_bytes = self._rejected_rows = 0
        self._most: int | None = None  # tokens the caller may pick in this turn
        self._admits: Callable[[Sequence[int]], int] | None = None
        self._mid_verify = self._no_memory = False
        self._shadow: Shadow | None = None
        self.gate.turn()

    # ---- the caller's side
    def reset(self) -> None:
        """Back to an empty sequence."""
        self._verify = None
        self.state.reset()
        if self.mtp is not None:
            self.mtp.reset()
        if self.lookup is not None:
            self.lookup.reset()

    def copy(self) -> Place:
        """The place between two turns, behind what was read or fed last. Raises ValueError inside a turn."""
        self._between_turns()
        return Place(self.state.copy(), None if self.mtp is None else self.mtp.copy())

    def _between_turns(self) -> None:
        if self._verify is not None:
            raise ValueError("a verify is open, and what it drafted in the state: finish() first")

    def load(self, place: Place) -> None:
        """Return to a place of this sequence whose K/V rows are still there."""
        self._verify = None
        self.state.load(place.trunk)
        if self.mtp is not None and place.head is not None:
            self.mtp.load(place.head)
        if self.lookup is not None:
            self.lookup.reset(place.trunk.tokens.tolist())

    def begin(
        self, prompt: Sequence[int], most: int | None = None, *, options: Speculation | None = None,
        prediction: Sequence[int] = (), admits: Callable[[Sequence[int]], int] | None = None,
    ) -> None:  # fmt: skip
        """A turn with this whole prompt starts: its counters, and the list the head scores. `most`: tokens the caller
        will pick at most; nobody asks for logits after the last, so none are drafted. `options`: for this turn, which
        cannot turn on a source that the session lacks; `prediction`: what may follow, to copy from; `admits`: of drafts
        behind the last pick, how many the caller might pick at all."""
        self._start_turn()
        self._most, self._admits, self.options = most, admits, options or self._base
        if self.lookup is not None and (prediction or self.lookup.aside):
            self.lookup.reset(self.state.tokens[: self.state.length].tolist(), aside=prediction)
        if self._vocabulary is not None:
            self._vocabulary.begin(prompt)

    def prefill(self, tokens: Any) -> np.ndarray:
        """Append at most `model.limit` prompt tokens; logits [vocab] of the last. Raises ValueError inside a turn."""
        self._between_turns()
        if len(tokens) > self.model.limit:
            raise ValueError(f"{len(tokens)} tokens in a chunk of {self.model.limit}")
        ids = np.asarray(tokens).tolist()
        if self.on_write is not None:
            self.on_write(self.state.length, ids, True)
        answer = self.model.forward(tokens, self.state)
        if self.lookup is not None:
            for at, token in enumerate(ids, self.state.length - len(ids)):
                self.lookup.push(token, at)
        if self.mtp is not None:
            self.mtp.note(self.state, answer.streams)
        if self._vocabulary is not None:
            self._vocabulary.read(ids)
        return answer.logits[-1]

    def feed(self, token: int) -> np.ndarray:
        """Logits [vocab] after `token`: a view that holds until the next call."""
        logits = self._feed(token)
        self._tokens += 1
        return logits

    def _feed(self, token: int) -> np.ndarray:
        if self.lookup is not None:
            self.lookup.push(token, self._position())
        if self._vocabulary is not None:
            self._vocabulary.picked(token)
        if self._shadow is not None:
            self._judge(self._shadow, token)
        verify = self._verify
        if verify is not None:
            draft = verify.next
            if draft == token:
                verify.accepted += 1
                return verify.logits[verify.accepted]
            self._settle(verify, rejected=draft is not None)
        return self._forward(token, self._admitted(self._propose(token)))

    def _position(self) -> int:
        """Where the token being fed goes."""
        verify = self._verify
        return self.state.length if verify is None else verify.position + 1 + verify.accepted

    def _judge(self, shadow: Shadow, token: int) -> None:
        stands = shadow.drafts[shadow.accepted] == token
        shadow.accepted += stands
        if not stands or shadow.accepted == len(shadow.drafts):
            self._shadow = None
            self.gate.result("lookup", shadow.accepted + (not stands), shadow.accepted)

    def finish(self, last: int | None = None) -> None:
        """End the turn: drafts nobody asked for are undone. `last`: a pick that was not fed, as the last one is not."""
        if last is not None and self._vocabulary is not None:
            self._vocabulary.picked(last)
        verify = self._verify
        if verify is not None:
            self._mid_verify = verify.accepted < len(verify.proposal.drafts)
            self._settle(verify, rejected=False, ended=True)

    # ---- a forward and its end
    def _forward(self, token: int, proposal: Proposal) -> np.ndarray:
        if proposal.drafts and not self.state.reserve(len(proposal.drafts)):
            if proposal.source is not None:
                self.gate.outdone(proposal.source)
            proposal.source, proposal.drafts, proposal.p = None, [], None  # no memory to undo them: a plain step
            self._no_memory = True
        rows, position = 1 + len(proposal.drafts), self.state.length
        if self.on_write is not None:
            self.on_write(position, [token, *proposal.drafts], False)
        start = time.perf_counter()
        answer = self.model.forward([token, *proposal.drafts], self.state, want="all", undoable=rows > 1)
        seconds = max(time.perf_counter() - start, 1e-9)  # a coarse clock may not have moved
        # from here on `finish` undoes the drafts, whatever happens; and other sequences may use the model's buffers
        logits, streams = answer.logits, None
        if rows > 1:
            logits, streams = logits.copy(), answer.streams.copy()
        self._verify = Verify(
            token, position, proposal, logits, streams, seconds, self.model.row_bytes[:rows].tolist()
        )
        self._forwards += 1
        self._bytes += sum(self._verify.bytes)
        self.gate.forward(rows, seconds)
        if rows == 1 and self.mtp is not None:  # it stands already
            self.mtp.note(self.state, answer.streams)
        return logits[0]

    def _settle(self, verify: Verify, *, rejected: bool, ended: bool = False) -> None:
        """The verify is over: undo what does not stand, tell the sources and the gate."""
        self._verify = None
        drafts, accepted, source = verify.proposal.drafts, verify.accepted, verify.proposal.source
        standing, judged = 1 + accepted, accepted + rejected
        undone = sum(verify.bytes[standing:])
        if len(verify.bytes) > 1:
            self.state.keep(standing)
            if self.mtp is not None and verify.streams is not None:
                self.mtp.note(self.state, verify.streams[:standing])
        if source is not None:
            self._tallies[source].settled(len(drafts), accepted, judged)
            if verify.proposal.p is not None:
                self.gate.result_p(source, verify.proposal.p, judged, accepted)
            else:
                self.gate.result(source, judged, accepted)
            self._rejected_rows += len(verify.bytes) - standing
            self._rejected_bytes += undone
        if self._trace is not None:
            self._trace({
                "position": verify.position, "source": source, "k": len(drafts), "written": verify.proposal.written,
                "p": verify.proposal.p, "drafts": list(drafts), "accepted": accepted, "judged": judged,
                "seconds": verify.seconds, "draft_seconds": verify.proposal.seconds,
                "bytes": sum(verify.bytes), "rejected_bytes": undone, "pick": verify.pick, "ended": ended,
            })  # fmt: skip

    # ---- proposals
    def _propose(self, token: int) -> Proposal:
        """What the next verify carries: the source of the higher value; on a tie the longer, or, where the head's must
        be strictly better, the copied one (section 3)."""
        room = self.state.ctx - self.state.length - 1
        if self._most is not None:
            room = min(room, self._most - self._tokens - 2)  # without this pick and the last
        if room < 1:
            return Proposal()
        copied, copied_k, copied_value = self._look_up(room)
        depth, value = self._depth(room)
        if copied_k and (not depth or self._copies((copied_value, copied_k), (value, depth))):
            if depth:
                self.gate.outdone("mtp")
            self._shadow = None
            return Proposal("lookup", copied[:copied_k], written=len(copied))
        if copied_k:
            self.gate.outdone("lookup")
        if copied and self._shadow is None:
            self._shadow = Shadow(copied)
        return self._draft(token, depth) if depth else Proposal()

    def _admitted(self, proposal: Proposal) -> Proposal:
        """Without the drafts that the caller's grammar would refuse: nobody would pick them."""
        if self._admits is None or not proposal.drafts:
            return proposal
        kept = self._admits(proposal.drafts)
        proposal.drafts, proposal.p = proposal.drafts[:kept], proposal.p and proposal.p[:kept]
        if not kept:
            proposal.source, proposal.p = None, None
        return proposal

    def _copies(self, copied: tuple[float, int], drafted: tuple[float, int]) -> bool:
        """Whether the copied proposal is carried before the head's; both are (value, drafts)."""
        return copied[0] >= drafted[0] if self.options.strict else copied > drafted

    def _look_up(self, room: int) -> tuple[list[int], int, float]:
        """(proposal, how much of it is worth carrying, its value)."""
        if self.lookup is None or not self.options.lookup:
            return [], 0, 0.0
        most = min(self.options.lookup_drafts, room)
        drafts = self._forced("lookup", self.options.lookup_force, most)
        if drafts is None:
            drafts = self.lookup.propose(most)
        if not drafts:
            return [], 0, 0.0
        self._tallies["lookup"].wrote(len(drafts))
        if not self.options.gate:
            return drafts, len(drafts), self.gate.value("lookup", len(drafts))
        k, value = self.gate.pick("lookup", len(drafts))
        return drafts, k, value

    def _depth(self, room: int) -> tuple[int, float]:
        """(drafts the head shall write, their value)."""
        if self.mtp is None or not self.options.mtp or self.mtp.warning is not None:
            return 0, 0.0
        most = min(self.options.drafts or self.options.most, room)
        if self.options.drafts or not self.options.gate:
            return most, self.gate.value("mtp", most)
        return self.gate.pick("mtp", most)

    def _draft(self, token: int, depth: int) -> Proposal:
        assert self.mtp is not None
        fixed = self._forced("mtp", self.options.mtp_force, depth)
        if fixed is not None:
            if not fixed:
                return Proposal()
            depth = len(fixed)
        trims, least = self.options.trims, self.options.pmin
        if trims and self.gate.wants_plain():
            return Proposal()
        written = self.mtp.write(
            self.state, token, depth, forced=fixed,
            more=lambda p: p[-1] >= least and (not trims or self.gate.deeper_p("mtp", p)),
        )  # fmt: skip
        if written is None:
            return Proposal()
        self._bytes += written.bytes
        self.gate.first_cost("mtp", written.first_s)
        if len(written.tokens) > 1:
            self.gate.draft_cost("mtp", written.deeper_s / (len(written.tokens) - 1))
        self._tallies["mtp"].wrote(len(written.tokens))
        kept = len(written.p)
        if kept > 1 and written.p[-1] < least:  # which is where the head stopped
            kept -= 1
        if trims:
            kept = self.gate.pick_p("mtp", written.p[:kept], fixed=depth)[0]
        return Proposal("mtp" if kept else None, written.tokens[:kept], written.p[:kept], len(written.tokens),
                         written.behind_s + written.first_s + written.deeper_s)  # fmt: skip

    def _forced(self, source: str, mode: str | None, most: int) -> list[int] | None:
        if mode is None or self._reference is None:
            return None
        verifies = self._tallies[source].verifies
        return forced(mode, verifies, self._reference, self.state.length, most, self._vocab)

    # ---- what it brought
    def report(self) -> SpeculationReport | None:
        """Counters of the turn, complete after `finish`; None when there is nothing to draft with."""
        sources = {"mtp": self.mtp is not None and self.options.mtp,
                   "lookup": self.lookup is not None and self.options.lookup}  # fmt: skip
        if not any(sources.values()):
            return None
        tallies = {
            name: self._tallies[name].report(self.gate.declined(name), self.gate.probes(name)) if on else None
            for name, on in sources.items()
        }
        mtp = tallies["mtp"]
        warnings = [
            self.mtp.warning if self.mtp is not None and self.options.mtp else None,
            acceptance_warning(mtp.drafts, mtp.accepted) if mtp is not None and not self.options.mtp_force else None,
            "some steps ran plain: no memory to undo their drafts" if self._no_memory else None,
        ]
        return SpeculationReport(
            engine=self._engine, tokens=self._tokens, forwards=self._forwards, mtp=mtp, lookup=tallies["lookup"],
            gate=self.gate.describe(self.options.most if sources["mtp"] else 0), gate_on=self.options.gate,
            fixed_depth=self.options.drafts, most=self.options.most, head_gated=self.options.head_gated,
            wiring=self._wiring, mtp_force=self.options.mtp_force, lookup_force=self.options.lookup_force,
            ended_mid_verify=self._mid_verify, expert_bytes=self._bytes, rejected_rows=self._rejected_rows,
            rejected_bytes=self._rejected_bytes,
            vocabulary=self._vocabulary.turn_report() if self._vocabulary is not None and sources["mtp"] else None,
            warnings=tuple(warning for warning in warnings if warning),
        )  # fmt: skip
