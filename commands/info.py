"""`coli info`: what a checkpoint is, from its headers alone (a 185 GB model answers in about a second)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from coli.commands import _options

_USES = {"dense": "dense", "experts": "experts", "table": "n-gram table", "mtp": "draft head", "ignored": "vision"}
_SIZES = (*_USES, "expert_record")


def info(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A checkpoint folder, a .gguf file or a Hugging Face id.")
    ] = None,
    json: _options.Json = False,
) -> None:
    """Describe a model: geometry, format, types, quantisation, sizes, draft head. No weights are read."""
    from coli.commands._output import Output
    from coli.models.find import find

    settings, warnings = _options.settings(model=model)
    out = Output(color=not settings.no_color)
    out.lines(warnings)
    if settings.model is None:
        out.note(_options.NO_MODEL)
    facts = describe(find(settings.model))
    if json:
        out.document(facts)
    else:
        out.text("\n".join(_lines(facts)))


def describe(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint as plain JSON values. Raises ModelError for one that would not load."""
    from coli.formats.checkpoint import Checkpoint
    from coli.models.describe import describe as describe_checkpoint
    from coli.models.families import identify

    with Checkpoint.open(path) as checkpoint:
        family, geometry = identify(checkpoint)
        found = describe_checkpoint(checkpoint, geometry, family.name)
        return {
            "path": str(path),
            "engine": found.engine,
            "model_type": found.model_type,
            "architecture": found.architecture,
            "format": found.format,
            "quantisation": found.quantisation,
            "mtp_head": found.head is not None,
            "head": found.head,
            "geometry": {name: _plain(value) for name, value in asdict(geometry).items()},
            "formats": {dtype: {"tensors": number, "bytes": nbytes} for dtype, (number, nbytes) in found.types.items()},
            "sizes": {name: getattr(found, name) for name in _SIZES},
            "total_bytes": found.nbytes,
        }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _lines(facts: dict[str, Any]) -> list[str]:
    from coli.report import size

    g, sizes = facts["geometry"], facts["sizes"]
    parts = [f"{label} {size(sizes[key])}" for key, label in _USES.items() if sizes[key]]
    streams = f" x {g['streams']} residual streams" if "streams" in g else ""
    indexer = f"; indexer budget {g['index_budget']:,} tokens" if "index_budget" in g else ""
    rows = {
        "model": facts["path"],
        "engine": ", ".join(filter(None, (f"{facts['engine']} ({facts['model_type']})", facts["architecture"]))),
        "layers": _layers(g),
        "width": f"hidden {g['hidden']}{streams}, vocabulary {g['vocab']:,}",
        "attention": f"{g['heads']} heads on {g['kv_heads']} of {g['head_dim']}{indexer}",
        "experts": _experts(g, sizes["expert_record"]),
        "n-grams": f"on layers {', '.join(map(str, g['ple_layers']))}" if g.get("ple_layers") else "",
        "context": f"up to {g['max_context']:,} positions",
        "format": facts["format"],
        "quantised": facts["quantisation"],
        "types": _types(facts["formats"]),
        "size": f"{size(facts['total_bytes'])}: {', '.join(parts)}",
        "draft head": f"yes: {facts['head']}" if facts["mtp_head"] else "no",
    }
    return [f"{name:<12}{value}" for name, value in rows.items() if value]


def _layers(g: dict[str, Any]) -> str:
    kinds = g["layer_types"]
    names = {name: kinds.count(name) for name in dict.fromkeys(kinds)}
    layers = ", ".join(f"{number} {'DeltaNet' if name == 'gdn' else name}" for name, number in names.items())
    return f"{g['layers']}: {layers}"


def _experts(g: dict[str, Any], record: int) -> str:
    from coli.report import count, size

    mlps = g.get("mlp_types", [])
    routed = f"{g['experts']} a layer, {g['top_k']} used a token, inner width {g['moe_inter']}"
    parts = [routed if g["experts"] else "none", f"one is {size(record)}" if record else ""]
    if "dense" in mlps:
        parts.append(f"a dense MLP of inner width {g['dense_inter']} in {count(mlps.count('dense'), 'layer')}")
    return "; ".join(filter(None, parts))


def _types(formats: dict[str, Any]) -> str:
    from coli.report import count, size

    largest = sorted(formats.items(), key=lambda item: -item[1]["bytes"])
    return ", ".join(f"{dtype} {size(row['bytes'])} in {count(row['tensors'], 'tensor')}" for dtype, row in largest)
