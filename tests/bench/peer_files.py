"""Random-weight GGUF files of the qwen35moe architecture with the layers of Qwen3.6-35B-A3B, fewer of them.

    python -m tests.bench.peer_files OUT.gguf [--type q8_0] [--layers 8] [--mtp]

llama.cpp and coli both read them, so they can be timed on the same bytes. Every weight matrix has the type asked for:
random codes under one scale, with a deviation near 0.02, so that a forward stays finite; norms, convolutions, decays
and routers are F32, as llama.cpp's converter leaves them. The mean must be 0: weights that share one, be it a tenth of
the deviation (plain codes of q4_0), turn every token's stream into the same vector, and all of them choose the same
experts. With none, random routers choose near uniformly: n rows touch about n x 8 distinct experts, the worst case of a
verify. Tensors are made and written one at a time (the largest of q8_0 has 285 MB), into `.part` and then renamed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

ARCH = "qwen35moe"
SD = 0.02
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model; the defaults are a layer of the real one, with a smaller vocabulary."""

    layers: int = 8
    mtp: bool = False
    hidden: int = 2048
    vocab: int = 32768
    experts: int = 256
    top_k: int = 8
    inter: int = 512
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    key_heads: int = 16
    value_heads: int = 32
    state: int = 128
    kernel: int = 4
    interval: int = 4  # every so many layers, one of attention


@dataclass(frozen=True)
class Kind:
    """A stored type: blocks of `elements` in `nbytes`, with the float16 scales at these offsets; `signed`: of any sign,
    as quantisers write them too, and which centres the values."""

    elements: int
    nbytes: int
    scales: tuple[tuple[int, float], ...] = ()
    signed: bool = False


KINDS = {
    "f32": Kind(1, 4),
    "bf16": Kind(1, 2),
    "q8_0": Kind(32, 34, ((0, SD / 74),)),
    "q4_0": Kind(32, 18, ((0, SD / 4.6),), signed=True),
    "q4_k": Kind(256, 144, ((0, SD / 257), (2, 7.5 * SD / 257))),  # the minima centre the values
    "q6_k": Kind(256, 210, ((208, SD / 1368),)),
}
TYPES = tuple(KINDS)[1:]  # of weight matrices


@dataclass(frozen=True)
class Tensor:
    """`shape` is [out, in]. `value`: what all of it is; None: random."""

    name: str
    shape: tuple[int, ...]
    kind: str = "f32"
    value: float | None = None

    @property
    def nbytes(self) -> int:
        kind = KINDS[self.kind]
        return math.prod(self.shape) // kind.elements * kind.nbytes


# ---- what is in a file -----------------------------------------------------------------------------------------------


def tensors(g: Geometry, kind: str) -> Iterator[Tensor]:
    """All tensors of a file, in its order."""
    yield Tensor("token_embd.weight", (g.vocab, g.hidden), kind)
    yield Tensor("output_norm.weight", (g.hidden,), value=1.0)
    yield Tensor("output.weight", (g.vocab, g.hidden), kind)
    for layer in range(g.layers + g.mtp):
        head = layer == g.layers
        parts = [_norms(g), _attention(g, kind) if head or (layer + 1) % g.interval == 0 else _deltanet(g, kind)]
        for part in (*parts, *([_nextn(g, kind)] if head else []), _moe(g, kind)):
            for t in part:
                yield Tensor(f"blk.{layer}.{t.name}", t.shape, t.kind, t.value)


def _norms(g: Geometry) -> list[Tensor]:
    return [Tensor(f"{name}.weight", (g.hidden,), value=1.0) for name in ("attn_norm", "post_attention_norm")]


def _attention(g: Geometry, kind: str) -> list[Tensor]:
    rows, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    return [
        Tensor("attn_q.weight", (2 * rows, g.hidden), kind),  # queries and their gates
        Tensor("attn_k.weight", (kv, g.hidden), kind),
        Tensor("attn_v.weight", (kv, g.hidden), kind),
        Tensor("attn_output.weight", (g.hidden, rows), kind),
        Tensor("attn_q_norm.weight", (g.head_dim,), value=1.0),
        Tensor("attn_k_norm.weight", (g.head_dim,), value=1.0),
    ]


def _deltanet(g: Geometry, kind: str) -> list[Tensor]:
    keys, values = g.key_heads * g.state, g.value_heads * g.state
    return [
        Tensor("attn_qkv.weight", (2 * keys + values, g.hidden), kind),
        Tensor("attn_gate.weight", (values, g.hidden), kind),
        Tensor("ssm_conv1d.weight", (2 * keys + values, g.kernel)),
        Tensor("ssm_dt.bias", (g.value_heads,), value=1.0),
        Tensor("ssm_a", (g.value_heads,), value=-0.5),
        Tensor("ssm_beta.weight", (g.value_heads, g.hidden), kind),
        Tensor("ssm_alpha.weight", (g.value_heads, g.hidden), kind),
        Tensor("ssm_norm.weight", (g.state,), value=1.0),
        Tensor("ssm_out.weight", (g.hidden, values), kind),
    ]


def _nextn(g: Geometry, kind: str) -> list[Tensor]:
    norms = [Tensor(f"nextn.{name}.weight", (g.hidden,), value=1.0) for name in ("enorm", "hnorm", "shared_head_norm")]
    return [Tensor("nextn.eh_proj.weight", (g.hidden, 2 * g.hidden), kind), *norms]


def _moe(g: Geometry, kind: str) -> list[Tensor]:
    up, down = (g.inter, g.hidden), (g.hidden, g.inter)
    return [
        Tensor("ffn_gate_inp.weight", (g.experts, g.hidden)),
        Tensor("ffn_gate_exps.weight", (g.experts, *up), kind),
        Tensor("ffn_up_exps.weight", (g.experts, *up), kind),
        Tensor("ffn_down_exps.weight", (g.experts, *down), kind),
        Tensor("ffn_gate_inp_shexp.weight", (g.hidden,)),
        Tensor("ffn_gate_shexp.weight", up, kind),
        Tensor("ffn_up_shexp.weight", up, kind),
        Tensor("ffn_down_shexp.weight", down, kind),
    ]


def moved(g: Geometry, kind: str, rows: int = 1) -> float:
    """Weight bytes that `rows` rows together have to read: all dense ones but the embedding, and the experts that so
    many independent choices are expected to hit."""
    hit = 1 - (1 - g.top_k / g.experts) ** rows
    trunk = [t for t in tensors(g, kind) if t.name != "token_embd.weight" and not t.name.startswith(f"blk.{g.layers}.")]
    return sum(t.nbytes * (hit if "_exps." in t.name else 1) for t in trunk)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(path: Path, g: Geometry, kind: str, seed: int = 1) -> Path:
    """Write the file, unless it is there."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part, rng = path.with_name(path.name + ".part"), np.random.Generator(np.random.SFC64(seed))
    writer = gguf.GGUFWriter(part, ARCH)
    _metadata(writer, g, f"random {ARCH} {kind}, {g.layers} layers")
    _vocabulary(writer, g.vocab)
    for t in tensors(g, kind):
        block = KINDS[t.kind]
        stored = (*t.shape[:-1], t.shape[-1] // block.elements * block.nbytes)
        if t.kind == "f32":
            writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes)
        else:
            raw = gguf.GGMLQuantizationType[t.kind.upper()]
            writer.add_tensor_info(t.name, stored, np.dtype(np.uint8), t.nbytes, raw_dtype=raw)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        step()
    for t in tensors(g, kind):
        writer.write_tensor_data(_values(t, rng))
    writer.close()
    part.rename(path)
    return path


def _values(t: Tensor, rng: np.random.Generator) -> np.ndarray:
    if t.value is not None:
        return np.full(t.shape, t.value, np.float32)
    if t.kind == "f32":
        deviation = 0.3 if t.name.endswith("conv1d.weight") else SD
        return rng.standard_normal(t.shape, np.float32) * np.float32(deviation)
    raw = rng.integers(0, 1 << 64, t.nbytes // 8, np.uint64).view(np.uint8)
    if t.kind == "bf16":  # any sign and mantissa, one exponent: 1/64 to 1/32
        words = raw.view(np.uint16)
        words &= 0x807F
        words |= (127 - 6) << 7
        return raw
    block = KINDS[t.kind]
    blocks = raw.reshape(-1, block.nbytes)
    for at, scale in block.scales:
        sign = blocks[:, at + 1] & (0x80 if block.signed else 0)
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        blocks[:, at + 1] |= sign
    if t.kind == "q8_0":  # the one code quantisers never write; without it the others are centred
        codes = blocks[:, 2:]
        codes[codes == 0x80] = 0
    return raw


def _metadata(w: gguf.GGUFWriter, g: Geometry, name: str) -> None:
    w.add_name(name)
    w.add_block_count(g.layers + g.mtp)
    w.add_context_length(32768)
    w.add_embedding_length(g.hidden)
    w.add_feed_forward_length(g.inter)
    w.add_head_count(g.heads)
    w.add_head_count_kv(g.kv_heads)
    w.add_key_length(g.head_dim)
    w.add_value_length(g.head_dim)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e7)
    w.add_rope_dimension_count(g.head_dim // 4)
    w.add_rope_dimension_sections([11, 11, 10, 0])
    w.add_expert_count(g.experts)
    w.add_expert_used_count(g.top_k)
    w.add_expert_feed_forward_length(g.inter)
    w.add_expert_shared_feed_forward_length(g.inter)
    w.add_ssm_conv_kernel(g.kernel)
    w.add_ssm_inner_size(g.value_heads * g.state)
    w.add_ssm_state_size(g.state)
    w.add_ssm_time_step_rank(g.value_heads)
    w.add_ssm_group_count(g.key_heads)
    w.add_uint32(f"{ARCH}.full_attention_interval", g.interval)
    w.add_vocab_size(g.vocab)
    if g.mtp:
        w.add_uint32(f"{ARCH}.nextn_predict_layers", 1)


def _vocabulary(w: gguf.GGUFWriter, size: int) -> None:
    """A byte-level BPE of this size: the 256 bytes, pairs of them with their merges, four specials at the end."""
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
    tokens = _byte_letters()
    pairs = [(a, b) for a in tokens for b in tokens][: size - len(specials) - len(tokens)]
    tokens += [a + b for a, b in pairs]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list([*tokens, *specials])
    w.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(specials))
    w.add_token_merges([f"{a} {b}" for a, b in pairs])
    w.add_bos_token_id(len(tokens))
    w.add_eos_token_id(len(tokens) + 2)
    w.add_pad_token_id(len(tokens) + 3)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)


def _byte_letters() -> list[str]:
    """The letters of byte-level BPE in GPT-2's order: printable bytes as themselves, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = 256 - len(printable)
    return [chr(code) for code in [*printable, *range(256, 256 + others)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="q8_0", choices=TYPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--mtp", action="store_true", help="with a draft head")
    args = parser.parse_args()
    start, g = time.perf_counter(), Geometry(layers=args.layers, mtp=args.mtp)
    write(args.out, g, args.type)
    print(
        f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s, "
        f"{moved(g, args.type) / 1e6:.0f} MB of weights a decoded token"
    )


if __name__ == "__main__":
    main()
