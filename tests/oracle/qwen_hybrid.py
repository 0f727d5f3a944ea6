"""qwen3_next, qwen3_5 (dense), qwen3_5_moe and qwen3_moe, and the MTP head of the first three.

    x = E[id];  x += mixer(norm(x, input_layernorm));  x += mlp(norm(x, post_attention_layernorm))  for every layer
    h = norm(x, norm);  logits = lm_head(h)

mixer: Gated DeltaNet or full attention; mlp: experts, with or without a shared one, or SwiGLU, by the tensors there.
qwen3_moe has attention in every layer, no output gate, RoPE over whole heads and norms that multiply by w, not 1 + w.
Proved against transformers by tests/oracle/check_hybrid.py."""
from __future__ import annotations

import numpy as np

from tests.oracle import ops
from tests.oracle.blocks import DeltaNetState, KVState, deltanet, gated_attention, softmax_moe

MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe")


def completed(config):
    """The config with what it may leave out, or say in another way: layer_types, rope_parameters, norm_topk_prob."""
    c, plain = dict(config), config["model_type"] == "qwen3_moe"
    rope = dict(c.get("rope_parameters") or {})
    rope.setdefault("rope_theta", c.get("rope_theta", 10000.0))
    rope.setdefault("partial_rotary_factor", c.get("partial_rotary_factor", 1.0 if plain else 0.25))
    every = 1 if plain else c.get("full_attention_interval", 4)
    types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(c["num_hidden_layers"])]
    c["rope_parameters"], c["layer_types"] = rope, types if plain else c.get("layer_types") or types
    c.setdefault("head_dim", c["hidden_size"] // c["num_attention_heads"] if plain else 256)
    c["norm_topk_prob"] = c.get("norm_topk_prob", not plain)
    return c


class HybridModel:
    """Feed rows in any chunking: forward(ids) appends them to the state.

    cfg is the checkpoint's text config as a dict; prefix is 'model.' or
    'model.language_model.' (lm_head.weight carries no prefix)."""

    def __init__(self, cfg, W, prefix="model."):
        self.c, self.W, self.p = completed(cfg), W, prefix
        self.plain = cfg["model_type"] == "qwen3_moe"
        self.norm = ops.rms_plain if self.plain else ops.rms_centred
        rp = self.c["rope_parameters"]
        self.freqs = ops.inv_freq(int(self.c["head_dim"] * rp["partial_rotary_factor"]), rp["rope_theta"], W.dtype)
        self.reset()

    def reset(self):
        self.n = 0
        self.state = [DeltaNetState(self.c, self.W.dtype) if t == "linear_attention" else KVState()
                      for t in self.c["layer_types"]]

    def embed(self, ids):
        return self.W(self.p + "embed_tokens.weight")[np.asarray(ids)]

    def head(self, h):
        name = "lm_head.weight"
        return ops.linear(h, self.W(name if name in self.W else self.p + "embed_tokens.weight"))

    def normed(self, name, x):
        return self.norm(x, self.W(name + ".weight"), self.c["rms_norm_eps"])

    def mlp(self, p, x):
        if p + "gate.weight" in self.W:
            return softmax_moe(self.W, p, self.c, x, self.c["norm_topk_prob"])
        W = self.W
        return ops.swiglu(x, W(p + "gate_proj.weight"), W(p + "up_proj.weight"), W(p + "down_proj.weight"))

    def block(self, p, x, mixer):
        x = x + mixer(self.normed(p + "input_layernorm", x))
        return x + self.mlp(p + "mlp.", self.normed(p + "post_attention_layernorm", x))

    def attention(self, p, x, pos, kv):
        return gated_attention(self.W, p, self.c, x, pos, kv, self.freqs, gate=not self.plain, norm=self.norm)

    def forward(self, ids):
        """-> (logits [T, V], h [T, H]) with h = the rows AFTER the final norm."""
        x = self.embed(ids)
        pos = self.n + np.arange(len(ids))
        for i, kind in enumerate(self.c["layer_types"]):
            p, st = f"{self.p}layers.{i}.", self.state[i]

            def mixer(y, p=p, st=st, kind=kind):
                if kind == "linear_attention":
                    return deltanet(self.W, p + "linear_attn.", self.c, y, st, ops.silu)
                return self.attention(p + "self_attn.", y, pos, st)

            x = self.block(p, x, mixer)
        self.n += len(ids)
        h = self.normed(self.p + "norm", x)
        return self.head(h), h


class HybridMTP:
    """The one-layer draft head (mtp.*).

    Row p is the pair (h_p, token_{p+1}) and scores token_{p+2}.  RoPE position
    of row p is p + shift (any constant shift gives the same result)."""

    def __init__(self, model, shift=1):
        self.m, self.shift = model, shift
        self.reset()

    def reset(self):
        self.kv = KVState()

    def rows(self, h, next_ids):
        """Advance the head by len(next_ids) rows; -> (logits, hidden for the next recursive row)."""
        m = self.m
        e = m.normed("mtp.pre_fc_norm_embedding", m.embed(next_ids))
        g = m.normed("mtp.pre_fc_norm_hidden", h)
        x = ops.linear(np.concatenate([e, g], axis=-1), m.W("mtp.fc.weight"))
        pos = self.shift + len(self.kv) + np.arange(len(next_ids))
        p = "mtp.layers.0."
        x = m.block(p, x, lambda y: m.attention(p + "self_attn.", y, pos, self.kv))
        x = m.normed("mtp.norm", x)
        return m.head(x), x

    def draft(self, h_last, token, depth):
        """Greedy chain after the settled rows: h_last [H] belongs to the last
        fed position, `token` is the token picked after it.  The rows written
        here are provisional and are dropped again."""
        keep, out, h = len(self.kv), [], h_last[None]
        for _ in range(depth):
            logits, h = self.rows(h, [token])
            token = int(logits[0].argmax())
            out.append(token)
        self.kv.truncate(keep)
        return out
