"""From a plan and what was measured of a machine to tokens a second: a range, and what it is bound by.

Idea: plain decoding of one sequence, everything warm. A token reads, of memory, all dense weights, its chosen experts
(resident or just read), the K/V rows it attends to, and the recurrent state, which it also writes; of the disk it reads
the chosen experts that memory does not hold. Bytes over measured speeds are seconds. Drafts are left out: what they
bring depends on the text (`coli bench` measures it).

    slow end   a context that is full; a router that likes all experts alike, so that with a share r resident a token
               misses top_k (1 - r) experts a layer; no read overlaps with any computing; kernels that get EFFICIENCY
               of what a bare read of memory gets
    fast end   a context a quarter full; SKEW times as many misses; reads wholly behind computing; kernels as fast as
               a bare read

EFFICIENCY is the slowest one-row kernel beside a bare read in the README's "Measured" (int4 at 80 GB/s: 83 %), rounded
down. SKEW is an assumption: routers have favourites, and the store keeps them. Nano's, trained to use its 16 experts
evenly, misses 0.72 to 0.95 times what the even router would (caps 2 to 14, no history); half is what a router with
marked favourites may reach. MULTIPLY is what one thread with AVX-512 multiplies when memory does not hold it up: six
rows against FP8, the slowest format, at 51 % of 50 GB/s on two threads (README). Other processors are not known.
Pure functions of numbers. Guarded by tests/cli/test_plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from coli.planning.plan import Plan
from coli.planning.probe import Measured

EFFICIENCY = 0.8
SKEW = 0.5
MULTIPLY = 6 * 0.51 * 50e9 / 2  # bytes of weights a second
_PART = 4  # the fast end's share of the context: a quarter


@dataclass(frozen=True)
class Traffic:
    """Bytes a token of plain decoding moves. `kv_*`: K/V and index rows read at a quarter of the context and at its
    end; `disk_*`: expected misses of an even and of a skewed router."""

    dense: int
    experts: int
    recurrent: int
    kv_quarter: int
    kv_full: int
    disk_even: int
    disk_skewed: int

    @property
    def weights(self) -> int:
        return self.dense + self.experts

    @property
    def memory_low(self) -> int:
        return self.weights + self.recurrent + self.kv_quarter

    @property
    def memory_high(self) -> int:
        return self.weights + self.recurrent + self.kv_full


@dataclass(frozen=True)
class Prediction:
    """Tokens a second, slow and fast end; `bottleneck`: what takes most of the slow end's time: "disk", "memory" (its
    bandwidth) or "compute"."""

    low: float
    high: float
    bottleneck: str


def traffic(plan: Plan) -> Traffic:
    """What a token of this plan moves."""
    survey, g = plan.survey, plan.survey.geometry
    spec = survey.family.state_spec(g)
    experts = g.top_k * survey.slot if survey.slots else 0
    missed = round(experts * (1 - plan.residency))

    def rows(context: int) -> int:
        """Bytes of a context's rows that are read: with an indexer all pooled keys, and K/V of what it picks."""
        attended = min(context, g.index_budget) if spec.index_dim else context
        keys = spec.index_dim * (context // spec.index_ratio)
        return 4 * spec.attention_layers * (2 * spec.kv_heads * spec.head_dim * attended + keys)

    return Traffic(
        dense=plan.terms.dense, experts=experts, recurrent=2 * spec.recurrent_bytes(),
        kv_quarter=rows(plan.ctx // _PART), kv_full=rows(plan.ctx), disk_even=missed, disk_skewed=round(SKEW * missed),
    )  # fmt: skip


def predict(moved: Traffic, measured: Measured, *, threads: int, avx512: bool) -> Prediction | None:
    """The range for a plan's traffic; None where a speed that it needs was not measured."""
    if measured.memory is None or (moved.disk_even and measured.disk is None):
        return None
    memory, disk = measured.memory.bytes_per_s, measured.disk.bytes_per_s if measured.disk else float("inf")
    compute = moved.weights / (threads * MULTIPLY) if avx512 else 0.0
    slow = {"disk": moved.disk_even / disk, "memory": moved.memory_high / (EFFICIENCY * memory), "compute": compute}
    fast = max(moved.disk_skewed / disk, moved.memory_low / memory, compute)
    return Prediction(
        low=1 / (slow["disk"] + max(slow["memory"], slow["compute"])), high=1 / fast,
        bottleneck=max(slow, key=lambda name: slow[name]),
    )  # fmt: skip
