"""The sidecar of a Qwen3.8 model, as coli/formats/sidecar.py lays it out: inside the model's folder, or as a folder of
its own that holds everything else too.

index.json is written last; a standalone folder's config.json comes behind it. Guarded by tests/convert/test_sidecar.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from coli.convert import quantise
from coli.convert.dense import file_name
from coli.convert.files import Job, Spec, header_bound
from coli.convert.plan import Plan, document, expert_blocks, folder_config, job, label, text_files
from coli.convert.report import Options
from coli.convert.source import Source
from coli.errors import UsageError
from coli.formats.sidecar import CODES, INDEX, STEP, VERSION, folder_name, format_name, record_bytes
from coli.models.layout import HEAD


def plan(source: Source, out: Path, options: Options) -> Plan:
    """`out` is the model's folder or its sidecar folder, or a place for a folder of its own. Raises UsageError."""
    if not options.group:
        raise UsageError("a sidecar has a scale for a group of inputs, never for a row", "--group-size 0",
                         "give 32, 64 or 128")  # fmt: skip
    home, folder = source.checkpoint.folder, folder_name(options.ebits, options.group)
    format, words = format_name(options.ebits, options.group), f"experts {options.words}"
    if not source.is_gguf and out.resolve() in (home.resolve(), home.resolve() / folder):
        jobs = _sidecar(source, options, "")
        return Plan(home / folder, format, f"sidecar, {words}", jobs, ((INDEX, _index(source, options)),))
    return Plan(out, f"{format}, standalone", f"model with a sidecar, {words}",
                (*_others(source), *_sidecar(source, options, f"{folder}/")),
                _finals(source, options, folder))  # fmt: skip


def _others(source: Source) -> tuple[Job, ...]:
    """Everything but the routed experts, in the dtypes the source has."""
    jobs = [job(source, "model-globals.safetensors", "the embedding and lm_head", [""], compact=False)]
    for layer in range(source.g.layers):
        prefix = f"layers.{layer}."
        jobs.append(job(source, f"model-{layer:05d}.safetensors", label(source, prefix), [prefix], compact=False))
    if source.has_head:
        jobs.append(job(source, "model-mtp.safetensors", label(source, HEAD), [HEAD], compact=False))
    return tuple(jobs)


def _sidecar(source: Source, options: Options, folder: str) -> tuple[Job, ...]:
    return tuple(_layer(source, options, folder, prefix) for prefix in source.prefixes)


def _layer(source: Source, options: Options, folder: str, prefix: str) -> Job:
    name = "layer-mtp" if prefix == HEAD else f"layer-{int(prefix.split('.')[1]):03d}"
    each = partial(_specs, source, options, prefix)
    specs = [spec for expert in range(source.g.experts) for spec in each(expert)]
    nbytes = sum(spec.nbytes for spec in specs) + header_bound(specs, STEP)
    words = f"experts of {label(source, prefix)}"
    return Job(f"{folder}{name}.safetensors", words, nbytes, source.expert_bytes(prefix),
               expert_blocks(source, options, prefix, each, quantise.planar), STEP)  # fmt: skip


def _specs(source: Source, options: Options, prefix: str, expert: int) -> tuple[Spec, ...]:
    hidden, inter = source.g.hidden, source.g.moe_inter
    codes, scales = [], []
    for part, n, k in (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)):
        name = file_name(f"{prefix}mlp.experts.{expert}.{part}_proj.weight")
        codes.append(Spec(name, "U8", (n, -(-k // 2))) if options.ebits == 4 else Spec(name, "I8", (n, k)))
        scales.append(Spec(f"{name}.qs", "F32", (n, quantise.groups(k, options.group))))
    return (*codes, *scales)


def _index(source: Source, options: Options) -> bytes:
    g, (bits, group) = source.g, (options.ebits, options.group)
    return document({
        "format": format_name(bits, group), "version": VERSION, "codes": CODES[bits], "scales": f"f32-per-{group}",
        "geometry": {"hidden": g.hidden, "moe_inter": g.moe_inter, "experts": g.experts, "layers": g.layers},
        "record_bytes": record_bytes(g.moe_inter, g.hidden, bits, group), "layers": g.layers, "complete": True,
    })  # fmt: skip


def _finals(source: Source, options: Options, folder: str) -> tuple[tuple[str, bytes], ...]:
    return (*text_files(source), (f"{folder}/{INDEX}", _index(source, options)),
            ("config.json", document(folder_config(source))))  # fmt: skip
