"""Token mixers and MoE blocks used by more than one family, by trunks and draft heads."""
from __future__ import annotations

import numpy as np

from tests.oracle import ops


class DeltaNetState:
    def __init__(self, cfg, dtype):
        hk, hv = cfg["linear_num_key_heads"], cfg["linear_num_value_heads"]
        dk, dv = cfg["linear_key_head_dim"], cfg["linear_value_head_dim"]
        self.conv = np.zeros((cfg["linear_conv_kernel_dim"] - 1, 2 * hk * dk + hv * dv), dtype)
        self.s = np.zeros((hv, dk, dv), dtype)

    def copy(self):
        c = object.__new__(DeltaNetState)
        c.conv, c.s = self.conv.copy(), self.s.copy()
        return c


def gdn_inputs(W, p, cfg, x):
    """-> qkv [T, all q | all k | all v], z [T, hv, dv], b [T, hv], a [T, hv], from either layout of the projections.

    qwen3_next has two, whose rows are grouped by key head: q | k | its v | its z, and its b | its a."""
    if p + "in_proj_qkv.weight" in W:
        qkv, z, b, a = (ops.linear(x, W(f"{p}in_proj_{part}.weight")) for part in ("qkv", "z", "b", "a"))
        return qkv, z.reshape(len(x), cfg["linear_num_value_heads"], -1), b, a
    hk, hv = cfg["linear_num_key_heads"], cfg["linear_num_value_heads"]
    dk, dv = cfg["linear_key_head_dim"], cfg["linear_value_head_dim"]
    rep, T = hv // hk, x.shape[0]
    rows = ops.linear(x, W(p + "in_proj_qkvz.weight")).reshape(T, hk, 2 * dk + 2 * rep * dv)
    q, k, v, z = np.split(rows, [dk, 2 * dk, 2 * dk + rep * dv], axis=-1)
    b, a = np.split(ops.linear(x, W(p + "in_proj_ba.weight")).reshape(T, hk, 2 * rep), 2, axis=-1)
    qkv = np.concatenate([t.reshape(T, -1) for t in (q, k, v)], axis=-1)
    return qkv, z.reshape(T, hv, dv), b.reshape(T, hv), a.reshape(T, hv)


def deltanet(W, p, cfg, x, st, gate_act):
    """Gated DeltaNet over rows x [T, H]; st is advanced in place.

    `p` ends in 'linear_attn.'."""
    hk, hv = cfg["linear_num_key_heads"], cfg["linear_num_value_heads"]
    dk, dv = cfg["linear_key_head_dim"], cfg["linear_value_head_dim"]
    rep, T = hv // hk, x.shape[0]
    qkv, z, b, a = gdn_inputs(W, p, cfg, x)
    w = W(p + "conv1d.weight")
    y, st.conv = ops.causal_conv(qkv, st.conv, w.reshape(w.shape[0], w.shape[-1]))
    y = ops.silu(y)
    q = ops.l2_unit(y[:, :hk * dk].reshape(T, hk, dk)) / np.sqrt(dk)
    k = ops.l2_unit(y[:, hk * dk:2 * hk * dk].reshape(T, hk, dk))
    v = y[:, 2 * hk * dk:].reshape(T, hv, dv)
    q, k = np.repeat(q, rep, axis=1), np.repeat(k, rep, axis=1)
    beta = ops.sigmoid(b)
    decay = np.exp(-np.exp(W(p + "A_log")) * ops.softplus(a + W(p + "dt_bias")))
    out = np.empty((T, hv, dv), x.dtype)
    for t in range(T):
        st.s *= decay[t][:, None, None]
        pred = np.einsum("hk,hkv->hv", k[t], st.s)
        st.s += k[t][:, :, None] * ((v[t] - pred) * beta[t][:, None])[:, None, :]
        out[t] = np.einsum("hk,hkv->hv", q[t], st.s)
    out = ops.rms_plain(out, W(p + "norm.weight"), cfg["rms_norm_eps"]) * gate_act(z)
    return ops.linear(out.reshape(T, hv * dv), W(p + "out_proj.weight"))


class KVState:
    def __init__(self):
        self.k = self.v = self.idx = None

    @staticmethod
    def _push(old, new):
        return new if old is None else np.concatenate([old, new], axis=0)

    def append(self, k, v):
        self.k, self.v = self._push(self.k, k), self._push(self.v, v)

    def append_index(self, k):
        self.idx = self._push(self.idx, k)

    def __len__(self):
        return 0 if self.k is None else self.k.shape[0]

    def truncate(self, n):
        for a in ("k", "v", "idx"):
            if getattr(self, a) is not None:
                setattr(self, a, getattr(self, a)[:n])


def gated_attention(W, p, cfg, x, pos, kv, freqs, select=None, gate=True, norm=ops.rms_centred):
    """Qwen full attention with a per-head output gate (none with gate=False).  `p` ends in 'self_attn.'.

    select(t_abs) -> index array of the cache rows row t may read; None = all
    rows up to itself.  Cache row r holds position base + r."""
    nq, nkv, d = cfg["num_attention_heads"], cfg["num_key_value_heads"], cfg["head_dim"]
    eps, T = cfg["rms_norm_eps"], x.shape[0]
    qg = ops.linear(x, W(p + "q_proj.weight")).reshape(T, nq, 2 * d if gate else d)
    q, opening = qg[..., :d], ops.sigmoid(qg[..., d:].reshape(T, nq * d)) if gate else 1
    k = ops.linear(x, W(p + "k_proj.weight")).reshape(T, nkv, d)
    v = ops.linear(x, W(p + "v_proj.weight")).reshape(T, nkv, d)
    q = ops.rope_half(norm(q, W(p + "q_norm.weight"), eps), pos, freqs)
    k = ops.rope_half(norm(k, W(p + "k_norm.weight"), eps), pos, freqs)
    first = len(kv)
    kv.append(k, v)
    out = np.empty((T, nq, d), x.dtype)
    grp = nq // nkv
    for t in range(T):
        row = first + t
        use = np.arange(row + 1) if select is None else select(t, row)
        for h in range(nq):
            s = kv.k[use, h // grp] @ q[t, h] / np.sqrt(d)
            out[t, h] = ops.softmax(s) @ kv.v[use, h // grp]
    out = out.reshape(T, nq * d) * opening
    return ops.linear(out, W(p + "o_proj.weight"))


def softmax_moe(W, p, cfg, x, renorm=True):
    """Softmax router over all experts, top-k, renormalised; plus the shared
    expert, where there is one, scaled by its own sigmoid gate.  `p` ends in 'mlp.'."""
    probs = ops.softmax(ops.linear(x, W(p + "gate.weight")))
    k = cfg["num_experts_per_tok"]
    y = np.zeros_like(x)
    for t in range(x.shape[0]):
        top = ops.top_indices(probs[t], k)
        w = probs[t][top]
        if renorm:
            w = w / w.sum()
        for e, we in zip(top, w, strict=True):
            y[t] += we * ops.swiglu(x[t], *W.expert(p + "experts.", int(e)))
    if p + "shared_expert_gate.weight" not in W:
        return y
    s = p + "shared_expert."
    shared = ops.swiglu(x, W(s + "gate_proj.weight"), W(s + "up_proj.weight"), W(s + "down_proj.weight"))
    return y + ops.sigmoid(ops.linear(x, W(p + "shared_expert_gate.weight"))) * shared
