"""`coli info`: what a checkpoint is, from its headers alone (a 185 GB model answers in about a second)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from coli.commands import _options

_USES = {"dense": "dense", "experts": "experts", "table": "n-gram table", "mtp": "draft head", "ignored": "vision"}


def info(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A checkpoint folder or a Hugging Face id.")
    ] = None,
    json: _options.Json = False,
) -> None:
    """Describe a model: geometry, formats, sizes, draft head. No weights are read."""
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


def describe(folder: Path) -> dict[str, Any]:
    """The facts of a checkpoint as plain JSON values. Raises ModelError for one that would not load."""
    from coli.formats.checkpoint import Checkpoint
    from coli.models import qwen38_layout as layout

    with Checkpoint.open(folder) as checkpoint:
        geometry = layout.geometry(checkpoint.config, folder / "config.json")
        layout.check(checkpoint, geometry)
        sizes = asdict(layout.sizes(checkpoint, geometry))
        types = sizes.pop("types")
        return {
            "path": str(folder),
            "engine": "qwen38",
            "model_type": checkpoint.config.get("model_type"),
            "mtp_head": layout.has_mtp(checkpoint),
            "geometry": {name: _plain(value) for name, value in asdict(geometry).items()},
            "formats": {dtype: {"tensors": count, "bytes": nbytes} for dtype, (count, nbytes) in types.items()},
            "sizes": sizes,
            "total_bytes": checkpoint.nbytes,
        }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _lines(facts: dict[str, Any]) -> list[str]:
    from coli.report import count, size

    g, sizes = facts["geometry"], facts["sizes"]
    kinds = g["layer_types"]
    names = {name: kinds.count(name) for name in dict.fromkeys(kinds)}
    layers = ", ".join(f"{number} {'DeltaNet' if name == 'gdn' else name}" for name, number in names.items())
    formats = ", ".join(
        f"{dtype} {size(row['bytes'])} in {count(row['tensors'], 'tensor')}"
        for dtype, row in sorted(facts["formats"].items(), key=lambda item: -item[1]["bytes"])
    )
    parts = [f"{label} {size(sizes[key])}" for key, label in _USES.items() if sizes[key]]
    rows = {
        "model": facts["path"],
        "engine": f"{facts['engine']} ({facts['model_type']})",
        "layers": f"{g['layers']}: {layers}",
        "width": f"hidden {g['hidden']} x {g['streams']} residual streams, vocabulary {g['vocab']:,}",
        "attention": f"{g['heads']} heads on {g['kv_heads']} of {g['head_dim']}; "
                     f"indexer budget {g['index_budget']:,} tokens",
        "experts": f"{g['experts']} a layer, {g['top_k']} used a token, inner width {g['moe_inter']}; "
                   f"one is {size(sizes['expert_record'])}",
        "n-grams": f"on layers {', '.join(map(str, g['ple_layers']))}" if g["ple_layers"] else "none",
        "context": f"up to {g['max_context']:,} positions",
        "formats": formats,
        "size": f"{size(facts['total_bytes'])}: {', '.join(parts)}",
        "draft head": "yes, left unread in this version" if facts["mtp_head"] else "no",
    }  # fmt: skip
    return [f"{name:<12}{value}" for name, value in rows.items()]
