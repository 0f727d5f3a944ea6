"""qwen4_exp (Qwen3.8-Flash-Next) and its MTP head."""
from __future__ import annotations

import math

import numpy as np

from tests.oracle import ops
from tests.oracle.blocks import DeltaNetState, KVState, deltanet, gated_attention, softmax_moe

M64 = (1 << 64) - 1
GAMMA, MUL1, MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(v):
    v = (v + GAMMA) & M64
    v = ((v ^ (v >> 30)) * MUL1) & M64
    v = ((v ^ (v >> 27)) * MUL2) & M64
    return v ^ (v >> 31)


def hash_multipliers(vocab, n, ple_index, seed):
    half = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
    base = seed + 10007 * ple_index
    return [2 * (splitmix64((base + GAMMA * (i + 1)) & M64) % half) + 1 for i in range(n)]


def prime_sizes(first, skip, count):
    """`count` successive primes >= first, after skipping `skip` of them."""
    out, v = [], first
    while len(out) < skip + count:
        if v > 1 and all(v % d for d in range(2, math.isqrt(v) + 1)):
            out.append(v)
        v += 1
    return out[skip:]


class NGram:
    """Row ids of the hashed n-gram table for one PLE layer."""

    def __init__(self, cfg, ple_index):
        self.n, self.per = cfg["ngram_size"], cfg["heads_per_ngram"]
        heads = (self.n - 1) * self.per
        eos = cfg["eos_token_id"]
        self.eos = eos[0] if isinstance(eos, (list, tuple)) else eos
        self.mult = hash_multipliers(cfg["vocab_size"], self.n, ple_index, cfg.get("seed", 1234))
        self.size = prime_sizes(cfg["ngram_vocab_size_base"], ple_index * heads, heads)
        self.offset = [sum(self.size[:h]) for h in range(heads)]
        div = cfg["make_ngram_vocab_size_divisible_by"]
        self.rows = -(-sum(self.size) // div) * div

    def ids(self, history, token):
        """history: earlier tokens, newest last (may be shorter than n-1)."""
        win, cut = [token], False
        for s in range(1, self.n):
            t = history[-s] if len(history) >= s else self.eos
            cut = cut or t == self.eos
            win.append(self.eos if cut else t)
        out, mix = [], win[0] * self.mult[0]
        for g in range(2, self.n + 1):
            mix ^= win[g - 1] * self.mult[g - 1]
            for j in range(self.per):
                h = (g - 2) * self.per + j
                out.append(mix % self.size[h] + self.offset[h])
        return out


class PLEState:
    def __init__(self, cfg, dtype):
        d = cfg["ngram_size"]
        self.tokens = []
        self.conv = np.zeros(((cfg["ple_conv_kernel_size"] - 1) * d, cfg["hc_count"] * cfg["hidden_size"]), dtype)


class Qwen4Model:
    def __init__(self, cfg, W, prefix="model."):
        self.c, self.W, self.p = cfg, W, prefix
        rp = cfg["rope_parameters"]
        self.rot = int(cfg["head_dim"] * rp.get("partial_rotary_factor", cfg.get("partial_rotary_factor", 0.25)))
        self.freqs = ops.inv_freq(self.rot, rp["rope_theta"], W.dtype)
        gate = cfg.get("output_gate_type") or cfg.get("hidden_act", "silu")
        self.gate_act = {"sigmoid": ops.sigmoid, "silu": ops.silu, "swish": ops.silu}[gate]
        self.ngram = {i - 1: NGram(cfg, j) for j, i in enumerate(sorted(cfg.get("ple_layer_ids") or []))}
        self.reset()

    def reset(self):
        self.n = 0
        self.state = [DeltaNetState(self.c, self.W.dtype) if t == "linear_attention" else KVState()
                      for t in self.c["layer_types"]]
        self.ple_state = {i: PLEState(self.c, self.W.dtype) for i in self.ngram}

    def embed(self, ids):
        return self.W(self.p + "embed_tokens.weight")[np.asarray(ids)]

    def head(self, h):
        name = "lm_head.weight"
        return ops.linear(h, self.W(name if name in self.W else self.p + "embed_tokens.weight"))

    # ---- four-stream gated residual -------------------------------------
    def mix(self, p, s):
        """s [T, hc*H] -> (block input [T, H], injection weights [T, hc] or None)."""
        hc, H, eps = self.c["hc_count"], self.c["hidden_size"], self.c["rms_norm_eps"]
        n = ops.rms_grouped(s, self.W(p + "hc_norm.weight"), H, eps)
        low = ops.silu(ops.linear(n, self.W(p + "input_mix_weight_down.weight")) / hc)
        w = ops.sigmoid(ops.linear(low, self.W(p + "input_mix_weight_up.weight")))
        x = (w * n).reshape(-1, hc, H).mean(axis=1)
        name = p + "block_inject_weight.weight"
        inj = 2.0 * ops.sigmoid(ops.linear(n, self.W(name)) / hc) if name in self.W else None
        return x, inj

    def residual(self, p, s, block):
        x, inj = self.mix(p, s)
        y = block(x)
        return s + (inj[:, :, None] * y[:, None, :]).reshape(s.shape)

    # ---- QSA indexer ------------------------------------------------------
    def indexer(self, p, x, pos, kv, freqs):
        """-> select(t, row): the cache rows token t attends to."""
        c, W = self.c, self.W
        nh, d, eps = c["indexer_n_heads"], c["indexer_head_dim"], c["rms_norm_eps"]
        R, top = c["indexer_compress_ratio"], c["indexer_budget"] // c["indexer_compress_ratio"]
        qk = ops.linear(x, W(p + "index_qk_proj.weight"))
        q = ops.rms_centred(qk[:, :nh * d].reshape(-1, nh, d), W(p + "q_layernorm.weight"), eps)
        q = ops.rope_half(q, pos, freqs)
        base = int(pos[0]) - (0 if kv.idx is None else kv.idx.shape[0])
        kv.append_index(qk[:, nh * d:])

        def select(t, row):
            full = (row + 1) // R
            tail = np.arange(full * R, row + 1)
            if full == 0:
                return tail
            pooled = kv.idx[:full * R].reshape(full, R, d).mean(axis=1)
            pooled = ops.rms_centred(pooled, W(p + "k_layernorm.weight"), eps)
            keys = ops.rope_half(pooled, base + R * np.arange(full), freqs)
            score = np.maximum(q[t] @ keys.T, 0).sum(axis=0) / math.sqrt(d)
            pick = np.sort(ops.top_indices(score, min(top, full)))
            return np.concatenate([(pick[:, None] * R + np.arange(R)).ravel(), tail])
        return select

    def attention(self, p, x, pos, kv, freqs):
        sel = self.indexer(p + "indexer.", x, pos, kv, freqs)
        return gated_attention(self.W, p, self.c, x, pos, kv, freqs, sel)

    # ---- PLE ----------------------------------------------------------------
    def ple(self, p, ids, s, i):
        c, W, st, ng = self.c, self.W, self.ple_state[i], self.ngram[i]
        hc, H, eps = c["hc_count"], c["hidden_size"], c["rms_norm_eps"]
        rows = []
        for t in ids:
            rows.append(ng.ids(st.tokens, int(t)))
            st.tokens = (st.tokens + [int(t)])[-(ng.n - 1):]
        emb = self.ngram_rows(p + "ple_embedding.ngram_embedding.", np.asarray(rows))
        T = len(ids)
        key = ops.rms_grouped(ops.linear(emb, W(p + "key_proj.weight")), W(p + "norm_key.weight"), H, eps)
        qry = ops.rms_grouped(s, W(p + "norm_query.weight"), H, eps)
        val = ops.linear(emb, W(p + "value_proj.weight"))
        g = (key * qry).reshape(T, hc, H).sum(-1) / math.sqrt(H)
        g = ops.sigmoid(np.sign(g) * np.sqrt(np.maximum(np.abs(g), 1e-6)))
        u = (g[:, :, None] * val[:, None, :]).reshape(T, hc * H)
        nu = ops.rms_grouped(u, W(p + "norm_conv.weight"), H, eps)
        w = W(p + "conv1d.weight")
        y, st.conv = ops.causal_conv(nu, st.conv, w.reshape(w.shape[0], w.shape[-1]), dilation=c["ngram_size"])
        return u + ops.silu(y)

    def ngram_rows(self, p, rows):
        """rows [T, heads] -> [T, heads*dim]; whole table or checkpoint shards."""
        W = self.W
        if p + "weight" in W:
            e = W(p + "weight")[rows]
        else:
            per = W(p + "shard_0.weight").shape[0]
            e = np.stack([W(f"{p}shard_{r // per}.weight")[r % per] for r in rows.ravel()])
            e = e.reshape(rows.shape + (-1,))
        if p + "weight_scale" in W:
            e = e * float(np.asarray(W(p + "weight_scale")).ravel()[0])
        return e.reshape(rows.shape[0], -1)

    def layer(self, p, i, kind, ids, pos, s):
        if i in self.ngram:
            s = s + self.ple(p + "ple.", ids, s, i)

        def mixer(x):
            if kind == "linear_attention":
                return deltanet(self.W, p + "linear_attn.", self.c, x, self.state[i], self.gate_act)
            return self.attention(p + "self_attn.", x, pos, self.state[i], self.freqs)

        s = self.residual(p + "attn_hyper_connection.", s, mixer)
        return self.residual(p + "mlp_hyper_connection.", s,
                             lambda x: softmax_moe(self.W, p + "mlp.", self.c, x, self.c.get("norm_topk_prob", True)))

    # ---- forward -------------------------------------------------------------
    def forward(self, ids):
        """-> (logits [T, V], streams [T, hc*H] BEFORE the final mixer)."""
        s = np.tile(self.embed(ids), (1, self.c["hc_count"]))
        pos = self.n + np.arange(len(ids))
        for i, kind in enumerate(self.c["layer_types"]):
            s = self.layer(f"{self.p}layers.{i}.", i, kind, ids, pos, s)
        self.n += len(ids)
        return self.head(self.mix(self.p + "hyper_connection_mixer.", s)[0]), s


class Qwen4MTP:
    """mtp.*: one QSA + MoE layer over the four streams.

    wiring 'b' (recommended): pre_fc_norm_hidden has one statistic per stream;
    wiring 'a': one statistic over all hc*H features (what vLLM/SGLang/ATOM run)."""

    def __init__(self, model, wiring="b", shift=1, rope_theta=None):
        self.m, self.wiring, self.shift = model, wiring, shift
        theta = rope_theta or (model.c.get("mtp") or {}).get("rope_theta") or model.c["rope_parameters"]["rope_theta"]
        self.freqs = ops.inv_freq(model.rot, theta, model.W.dtype)
        self.reset()

    def reset(self):
        self.kv = KVState()

    def rows(self, s, next_ids):
        """s [T, hc*H]: trunk streams (or this head's own, for deeper drafts)."""
        m, W, c = self.m, self.m.W, self.m.c
        hc, H, eps = c["hc_count"], c["hidden_size"], c["rms_norm_eps"]
        e = ops.rms_centred(m.embed(next_ids), W("mtp.pre_fc_norm_embedding.weight"), eps)
        e = ops.linear(e, W("mtp.fc_embedding.weight"))
        g = ops.rms_grouped(s, W("mtp.pre_fc_norm_hidden.weight"), H if self.wiring == "b" else hc * H, eps)
        g = ops.linear(g.reshape(-1, hc, H), W("mtp.fc_hidden.weight"))
        x = (e[:, None, :] + g).reshape(-1, hc * H)
        pos = self.shift + len(self.kv) + np.arange(len(next_ids))
        p = "mtp.layers.0."
        x = m.residual(p + "attn_hyper_connection.", x,
                       lambda y: m.attention(p + "self_attn.", y, pos, self.kv, self.freqs))
        x = m.residual(p + "mlp_hyper_connection.", x,
                       lambda y: softmax_moe(W, p + "mlp.", c, y, c.get("norm_topk_prob", True)))
        return m.head(m.mix("mtp.hyper_connection_mixer.", x)[0]), x

    def draft(self, s_last, token, depth):
        keep, out, s = len(self.kv), [], s_last[None]
        for _ in range(depth):
            logits, s = self.rows(s, [token])
            token = int(logits[0].argmax())
            out.append(token)
        self.kv.truncate(keep)
        return out
