"""The proof of tests/oracle/qwen_hybrid.py: transformers runs the same tiny checkpoints, and its logits are ours.

    cd CHECKOUT && python3 -m venv ~/v && ~/v/bin/pip install -e . "torch==2.13.0" "transformers==5.24.*"
    ~/v/bin/python -m tests.oracle.check_hybrid [--f32]

No test runs this: the project installs neither torch nor transformers. The checkpoints are those of tests/tiny36.py, so
that its table of names and shapes is proved as well: transformers takes every tensor, and misses none. float64 on both
sides unless --f32 is given (transformers' own casts to float32 are widened by rebinding torch.float32, so that rounding
does not limit the comparison); --f32 loads the folders as transformers does, from the releases' spellings.

Trunk: 72 tokens at once; 50 and then one by one through caches ("decode"); ours in sevens. transformers has no MTP
module, so the head is assembled from its decoder layer and norms: rows at once and one by one, two deeper drafts, and
RoPE positions shifted by 39. Prints max |logit difference|; ends with an error where one is above the bar.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

F32 = "--f32" in sys.argv
if not F32:
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
DTYPE = np.float32 if F32 else np.float64
BAR = 2e-3 if F32 else 1e-11

from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: E402

from tests import oracle  # noqa: E402
from tests.tiny36 import FAMILIES, HEAD, HEADED, odd36_config, tiny36_config, tiny36_weights, write_tiny36  # noqa: E402

CASES = {family: tiny36_config(family) for family in FAMILIES} | {
    f"{family}, odd sizes": odd36_config(family) for family in FAMILIES
} | {
    "qwen3_moe, some layers dense": tiny36_config("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2),
    "qwen3_moe, not renormalised": tiny36_config("qwen3_moe", norm_topk_prob=False),
    "qwen3_next, some layers dense": tiny36_config("qwen3_next", mlp_only_layers=[0, 3], norm_topk_prob=False),
    "qwen3_5_moe_text, tied": tiny36_config("qwen3_5_moe_text", tie_word_embeddings=True),
}  # fmt: skip
CLASSES = {"qwen3_next": "Qwen3Next", "qwen3_5_moe_text": "Qwen3_5Moe", "qwen3_5_text": "Qwen3_5"}
T = torch.tensor


def reference(folder, config, weights):
    """transformers' model with these weights."""
    if F32:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        problems = {key: found for key, found in info.items() if found}
        assert set(problems) <= {"unexpected_keys"}, problems
        assert all(name.startswith("mtp.") for name in problems.get("unexpected_keys", ())), problems
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        named = {n if n.startswith("lm_head.") else f"model.{n}": T(w, dtype=torch.float64)
                 for n, w in weights.items() if not n.startswith("mtp.")}  # fmt: skip
        if config["tie_word_embeddings"]:
            named["lm_head.weight"] = named["model.embed_tokens.weight"]
        model.load_state_dict(named, strict=True)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    return model.eval()


def tokens(vocab):
    ids = np.random.default_rng(5).integers(2, vocab, size=72)
    ids[40:48] = ids[12:20]
    return ids


def apart(ours, theirs):
    return float(np.abs(np.asarray(ours) - np.asarray(theirs)).max())


def trunk(model, ours, ids, split=50):
    """The figures of one trunk; `ours` ends behind `ids`."""
    full = model(T(ids)[None], use_cache=False).logits[0].numpy()
    out = model(T(ids[:split])[None], use_cache=True)
    steps = [out.logits[0].numpy()]
    for token in ids[split:]:
        out = model(T([[int(token)]]), cache=out.cache, use_cache=True)
        steps.append(out.logits[0].numpy())
    theirs = np.concatenate(steps)
    pieces = {"prefill": [ids], "decode": [ids[:split], *ids[split:, None]], "chunk7": np.split(ids, range(7, 72, 7))}
    found = {}
    for name, parts in pieces.items():
        ours.reset()
        logits = np.concatenate([ours.forward(part)[0] for part in parts])
        right = theirs if name == "decode" else full
        found[name] = apart(logits, right)
        assert (logits.argmax(-1) == right.argmax(-1)).all(), f"{name}: another argmax"
    return found | {"hf decode vs prefill": apart(theirs, full), "largest logit": float(np.abs(full).max())}


class Head:
    """The MTP head wired from transformers' decoder layer and norms."""

    def __init__(self, model, weights, family):
        module, base = importlib.import_module(type(model).__module__), CLASSES[family]
        self.model, self.config = model, copy.deepcopy(model.config)
        self.config.layer_types, self.config.num_hidden_layers = ["full_attention"], 1
        self.config.mlp_only_layers = []
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        norm = getattr(module, f"{base}RMSNorm")
        self.layer = getattr(module, f"{base}DecoderLayer")(self.config, 0)
        self.embedding, self.hidden, self.final = (norm(hidden, eps=eps) for _ in range(3))
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        parts = {HEAD: self.layer, "mtp.pre_fc_norm_embedding.": self.embedding, "mtp.norm.": self.final,
                 "mtp.pre_fc_norm_hidden.": self.hidden, "mtp.fc.": self.fc}  # fmt: skip
        for prefix, part in parts.items():
            mine = {n.removeprefix(prefix): T(w.astype(DTYPE)) for n, w in weights.items() if n.startswith(prefix)}
            part.eval().load_state_dict(mine, strict=True)

    def rows(self, hidden, ids, positions, cache):
        embedded = self.embedding(self.model.model.embed_tokens(T(ids)[None]))
        x = self.fc(torch.cat([embedded, self.hidden(hidden)], -1))
        at, n = T(positions)[None], len(positions)
        rope = self.model.model.rotary_emb(x, at if self.config.model_type == "qwen3_next" else at.expand(3, 1, n))
        seen = n if cache is None else cache.get_seq_length() + n
        mask = torch.full((n, seen), torch.finfo(x.dtype).min).triu(seen - n + 1)[None, None]
        y = self.final(self.layer(x, position_embeddings=rope, attention_mask=mask, cache=cache))
        return self.model.lm_head(y)[0].numpy(), y


def head(model, ours, weights, ids, family):
    """The figures of one head."""
    theirs, n = Head(model, weights, family), len(ids) - 1
    hf_hidden = model.model(T(ids)[None], use_cache=False).last_hidden_state
    full, _ = theirs.rows(hf_hidden[:, :n], ids[1:], list(range(1, n + 1)), None)
    ours.reset()
    hidden, cache = ours.forward(ids)[1], DynamicCache(config=theirs.config)
    single, deep, mine, mine_deep, own = [], [], [], [], oracle.HybridMTP(ours)
    for t in range(n):
        scores, y = theirs.rows(hf_hidden[:, t : t + 1], ids[t + 1 : t + 2], [t + 1], cache)
        single.append(scores[0])
        scores, last = own.rows(hidden[t : t + 1], ids[t + 1 : t + 2])
        mine.append(scores[0])
    drafts = [int(single[-1].argmax())]
    for depth in range(2):
        scores, y = theirs.rows(y, drafts[-1:], [n + 1 + depth], cache)
        deep.append(scores[0])
        scores, last = own.rows(last, drafts[-1:])
        mine_deep.append(scores[0])
        drafts.append(int(deep[-1].argmax()))
    chain = oracle.HybridMTP(ours)
    chain.rows(hidden[: n - 1], ids[1:n])
    assert chain.draft(hidden[n - 1], int(ids[n]), 3) == drafts, "other drafts"
    rows, shifted = (oracle.HybridMTP(ours, shift).rows(hidden[:n], ids[1:])[0] for shift in (1, 40))
    return {"head rows": apart(rows, full), "head one by one": apart(mine, single), "deeper": apart(mine_deep, deep),
            "shifted": apart(shifted, rows)}  # fmt: skip


def check(name, config, folder):
    write_tiny36(folder, config, seed=11)
    weights, family = tiny36_weights(config, 11), config["model_type"]
    model, ours, ids = reference(folder, config, weights), oracle.load(folder, DTYPE), tokens(config["vocab_size"])
    with torch.no_grad():
        found = trunk(model, ours, ids)
        if family in HEADED:
            found |= head(model, ours, weights, ids, family)
    print(f"{name}: " + ", ".join(f"{key} {value:.2g}" for key, value in found.items()), flush=True)
    return max(value for key, value in found.items() if key not in ("largest logit", "hf decode vs prefill"))


if __name__ == "__main__":
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        worst = max(check(name, config, Path(folder) / str(i)) for i, (name, config) in enumerate(CASES.items()))
    print(f"{'float32' if F32 else 'float64'}: at most {worst:.2g} apart, the bar is {BAR:g}")
    sys.exit(worst > BAR)
