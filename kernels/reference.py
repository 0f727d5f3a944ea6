"""NumPy twins of the kernels that are not products of matrices (those: kernels/linear_reference.py).

Plain array functions in the dtype of their inputs: float64 for a reference, float32 for a check of the same kind.
Shapes are written in the kernels' letters: R rows, H features of a stream, d/di/dk/dv head widths. Nothing is
modified in place; what a kernel updates is returned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coli.kernels.packing import block_width

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


def sigmoid(x: Floats) -> Floats:
    return np.exp(-np.logaddexp(0, -x))


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def best(scores: Floats, k: int) -> Ints:
    """Indices of the k largest of a row, best first; of equal ones the lower index first."""
    return np.argsort(-scores, kind="stable")[:k]


# ---- norm.py, streams.py -----------------------------------------------------------------------------------------
def rms_group_numpy(x: Floats, w: Floats, group: int, eps: float) -> Floats:
    """x [R, width], w [width] (already 1 + weight) -> [R, width]."""
    g = x.reshape(len(x), -1, group)
    return (g / np.sqrt((g * g).mean(-1, keepdims=True) + eps)).reshape(x.shape) * w


def silu_scaled_numpy(x: Floats, scale: float) -> Floats:
    return silu(x * scale)


def embed_numpy(ids: Ints, table: Floats, copies: int) -> Floats:
    """table [V, H] -> [R, copies*H]."""
    return np.tile(table[ids], (1, copies))


def stream_mix_numpy(m: Floats, n: Floats, copies: int) -> Floats:
    """m, n [R, copies*H] -> [R, H]."""
    return (sigmoid(m) * n).reshape(len(m), copies, -1).mean(1)


def stream_inject_numpy(s: Floats, y: Floats, inject: Floats) -> Floats:
    """s [R, copies*H], y [R, H], inject [R, copies] -> the new s."""
    gate = 2 * sigmoid(inject / inject.shape[1])
    return s + (gate[:, :, None] * y[:, None, :]).reshape(s.shape)


# ---- deltanet.py -------------------------------------------------------------------------------------------------
def conv_silu_numpy(x: Floats, before: Floats, w: Floats, dilation: int) -> Floats:
    """x [R, C], the inputs before it [n >= (K-1)*dilation, C] (zeros where there are none), w [K, C] -> silu(conv)."""
    rows, taps = np.concatenate([before, x]), len(w)
    y = np.zeros_like(x)
    for k in range(taps):
        start = len(before) - (taps - 1 - k) * dilation
        y += w[k] * rows[start : start + len(x)]
    return silu(y)


def gdn_prep_numpy(
    u: Floats, a: Floats, b: Floats, neg_exp_a: Floats, dt: Floats, hk: int, dk: int
) -> tuple[Floats, Floats, Floats]:
    """u [R, 2*hk*dk + hv*dv], a, b [R, hv] -> (u with q and k made unit vectors, decay [R, hv], beta [R, hv])."""
    u, width = u.copy(), hk * dk
    heads = u[:, : 2 * width].reshape(len(u), 2, hk, dk)
    heads = heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + 1e-6)
    heads[:, 0] /= np.sqrt(dk)
    u[:, : 2 * width] = heads.reshape(len(u), -1)
    return u, np.exp(neg_exp_a * np.logaddexp(0, a + dt)), sigmoid(b)


def pack_state(state: Floats) -> Floats:
    """[hv, dk, dv] -> the kernel's [hv, dv/bw, dk, bw]."""
    hv, dk, dv = state.shape
    bw = block_width(dv)
    return np.ascontiguousarray(state.reshape(hv, dk, dv // bw, bw).transpose(0, 2, 1, 3))


def unpack_state(blocks: Floats) -> Floats:
    """The kernel's [hv, dv/bw, dk, bw] -> [hv, dk, dv]."""
    hv, n, dk, bw = blocks.shape
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(hv, dk, n * bw)


def deltanet_numpy(
    state: Floats, u: Floats, decay: Floats, beta: Floats, hk: int, *, tiled: bool = False
) -> tuple[Floats, Floats]:
    """state [hv, dk, dv], u [R, 2*hk*dk + hv*dv], decay, beta [R, hv] -> (out [R, hv*dv], states [R, hv, dk, dv])."""
    hv, dk, dv = state.shape
    q, k = u[:, : hk * dk].reshape(-1, hk, dk), u[:, hk * dk : 2 * hk * dk].reshape(-1, hk, dk)
    v = u[:, 2 * hk * dk :].reshape(-1, hv, dv)
    key = np.arange(hv) % hk if tiled else np.arange(hv) // (hv // hk)
    out, states = [], []
    for r in range(len(u)):
        state = state * decay[r][:, None, None]
        delta = (v[r] - np.einsum("hk,hkv->hv", k[r, key], state)) * beta[r][:, None]
        state = state + k[r, key][:, :, None] * delta[:, None, :]
        out.append(np.einsum("hk,hkv->hv", q[r, key], state).ravel())
        states.append(state)
    return np.array(out), np.array(states)


def gated_norm_numpy(o: Floats, z: Floats, w: Floats, eps: float, *, gate: str) -> Floats:
    """o, z [R, heads*dv], w [dv], gate "silu" or "sigmoid" -> [R, heads*dv]."""
    act = {"silu": silu, "sigmoid": sigmoid}[gate]
    heads = o.shape[1] // len(w)
    return rms_group_numpy(o, np.tile(w, heads), len(w), eps) * act(z)


# ---- attention.py ------------------------------------------------------------------------------------------------
def rope_table(positions: Ints, rot: int, theta: float) -> Floats:
    """[n, 2, rot/2]: cos and sin of position * theta**(-2j/rot), float64."""
    angle = positions[:, None] * theta ** (-np.arange(0, rot, 2) / rot)[None, :]
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def norm_rope_numpy(x: Floats, w: Floats, eps: float, table: Floats) -> Floats:
    """x [R, heads, d], w [d], table [R, 2, rot/2] -> normed, the first rot features rotated as pairs (j, j + rot/2)."""
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w
    half = table.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = table[:, None, 0], table[:, None, 1]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def block_keys_numpy(raw: Floats, w: Floats, eps: float, table: Floats, ratio: int) -> Floats:
    """raw [n*ratio, di], table [n, 2, rot/2] for the blocks' first positions -> [n, di]."""
    return norm_rope_numpy(raw.reshape(-1, ratio, raw.shape[1]).mean(1)[:, None], w, eps, table)[:, 0]


def index_scores_numpy(q: Floats, keys: Floats) -> Floats:
    """q [nh, di] of one row, keys [F, di] -> [F]."""
    return np.maximum(q @ keys.T, 0).sum(0) / np.sqrt(keys.shape[1])


def index_pick_numpy(scores: Floats, budget: int) -> Ints:
    """The budget best of a row's F > budget block scores, ascending."""
    return np.sort(best(scores, budget))


def attended_rows(t: int, picked: Ints | None, ratio: int) -> Ints:
    """The cache rows that row t attends: all up to itself, or the picked blocks' and those behind the last block."""
    if picked is None:
        return np.arange(t + 1)
    tail = np.arange((t + 1) // ratio * ratio, t + 1)
    return np.concatenate([(np.asarray(picked)[:, None] * ratio + np.arange(ratio)).ravel(), tail])


def attention_numpy(q: Floats, gate: Floats, k: Floats, v: Floats, use: Ints) -> Floats:
    """One row: q, gate [nq, d], k, v [nkv, ctx, d], cache rows `use` -> gated output [nq*d]."""
    nq, d = q.shape
    kv = np.arange(nq) // (nq // len(k))
    p = softmax(np.einsum("hd,hnd->hn", q, k[kv][:, use]) / np.sqrt(d))
    return (np.einsum("hn,hnd->hd", p, v[kv][:, use]) * sigmoid(gate)).ravel()


# ---- moe.py, ple.py ----------------------------------------------------------------------------------------------
def router_numpy(logits: Floats, k: int, *, norm: bool) -> tuple[Ints, Floats]:
    """logits [R, E] -> (ids [R, k] best first, weights [R, k]: p, or p over their sum)."""
    p = softmax(logits)
    ids = np.array([best(row, k) for row in p])
    weights = np.take_along_axis(p, ids, 1)
    return ids, weights / weights.sum(1, keepdims=True) if norm else weights


def swiglu_numpy(gate: Floats, up: Floats) -> Floats:
    return silu(gate) * up


def combine_numpy(d: Floats, weights: Floats, shared: Floats, gate: Floats) -> Floats:
    """d [R, K, H], weights [R, K], shared [R, H], gate [R] -> [R, H]."""
    return np.einsum("rk,rkh->rh", weights, d) + sigmoid(gate)[:, None] * shared


def ple_gate_numpy(key: Floats, query: Floats, val: Floats, copies: int) -> Floats:
    """key, query [R, copies*H], val [R, H] -> [R, copies*H]."""
    g = (key * query).reshape(len(val), copies, -1).sum(-1) / np.sqrt(val.shape[1])
    gate = sigmoid(np.sign(g) * np.sqrt(np.maximum(np.abs(g), 1e-6)))
    return (gate[:, :, None] * val[:, None, :]).reshape(key.shape)


# ---- draft.py ----------------------------------------------------------------------------------------------------
def draft_numpy(scores: Floats) -> tuple[int, float]:
    """scores [n] -> (place of the best, 1 / sum of exp(s - best) over those within 20 of it)."""
    below = scores.astype(np.float64) - scores.max()
    return int(np.argmax(scores)), float(1 / np.exp(below[below >= -20]).sum())
