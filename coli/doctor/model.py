"""What is asked of a model, and of the settings it would run with.

The questions are the engine's own (`Family.check`, `survey`, `make_plan`, `Tokenizer.open`, ...), so that what passes
here opens. Guarded by tests/cli/test_doctor.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coli.chat import ChatTemplate, stop_ids
from coli.doctor.finding import Finding, Patient, error, ok, warn
from coli.errors import ColiError, ModelError
from coli.experts import usage
from coli.experts.reader import ExpertReader
from coli.formats import sidecar
from coli.formats.checkpoint import CONVERSION, Checkpoint
from coli.formats.strict import counted, listing, read_object
from coli.models.families import family_of
from coli.models.find import find
from coli.planning.plan import make_plan
from coli.planning.survey import survey
from coli.report import size
from coli.settings import VARIABLES, no_effect
from coli.speculation import counts, vocabulary
from coli.tokenizer import Tokenizer

_SAMPLE = "def f(x):\n    return x + 1  # naïve 漢字 🐦\n"


def settings(patient: Patient) -> Iterator[Finding]:
    for refusal in patient.refused:
        yield error(f"{refusal.where}: {refusal.what}", refusal.hint)
    for text in patient.warnings:
        yield warn(text, "`coli env` lists every variable")
    given = patient.settings.given
    shown = {row.name: row.kind.show(given[row.name]) for row in VARIABLES if given.get(row.name) is not None}
    words = " ".join(f"{name}={value}" for name, value in shown.items())
    yield ok(words or "every variable at its default", given=shown)


def path(patient: Patient) -> Iterator[Finding]:
    reference = patient.settings.model
    try:
        found = find(reference)
    except ModelError as fault:
        yield error(f"no model: {fault.where}: {fault.what}", fault.hint)
        return
    patient.path = found
    kind = "folder" if found.is_dir() else "file"
    if not os.access(found, os.R_OK | (os.X_OK if found.is_dir() else 0)):
        yield error(f"{found}: this user may not read the {kind}", "change its permissions")
        return
    words = " (the shipped model)" if reference is None else ""
    yield ok(f"{found}{words}", path=str(found), kind=kind)


def config(patient: Patient) -> Iterator[Finding]:
    """Sets engine and geometry; those of a folder come from its config.json alone."""
    checkpoint = patient.checkpoint
    if checkpoint is None:
        assert patient.path is not None
        if not patient.path.is_dir():
            return  # a GGUF file's config is in the header that did not open
        checkpoint = Checkpoint(patient.path)
        checkpoint.read_config()
    family = family_of(checkpoint)
    g = family.geometry(checkpoint.config, checkpoint.config_path)
    patient.family, patient.geometry = family, g
    patient.settings = patient.settings.resolve(family.name)
    for text in no_effect(patient.settings, family.name):
        yield warn(text, "leave it out for this model")
    kind = checkpoint.config.get("model_type")
    experts = f"{g.experts} experts, {g.top_k} a token" if g.experts else "no experts"
    yield ok(f"engine {family.name} ({kind}): {counted(g.layers, 'layer')}, hidden {g.hidden}, {experts}, "
             f"context up to {g.max_context:,}", engine=family.name, model_type=kind, layers=g.layers,
             hidden=g.hidden, experts=g.experts, max_context=g.max_context)  # fmt: skip


def tensors(patient: Patient) -> Iterator[Finding]:
    assert patient.checkpoint is not None and patient.family is not None
    patient.family.check(patient.checkpoint, patient.geometry)
    patient.sound = True
    ignored = len(patient.checkpoint.ignored)
    vision = f"; {counted(ignored, 'tensor')} of the vision tower left alone" if ignored else ""
    yield ok(f"all that the engine needs, in the shapes of the config{vision}",
             tensors=len(patient.checkpoint.tensors), ignored=ignored)  # fmt: skip


# ---- text ------------------------------------------------------------------------------------------------------------


def tokenizer(patient: Patient) -> Iterator[Finding]:
    """Opens it, and sends a text there and back."""
    assert patient.path is not None
    if patient.checkpoint is not None:
        opened = Tokenizer.open(patient.checkpoint)
    elif patient.path.is_dir():
        opened = Tokenizer.load(patient.path)
    else:
        return  # it is in the header that did not open
    patient.tokenizer = opened
    back = opened.decode(opened.encode(_SAMPLE))
    facts = {"tokens": opened.vocab_size, "special": len(opened.special_ids)}
    rows = getattr(patient.geometry, "vocab", None)
    if back != _SAMPLE:
        yield error(f"a text does not come back as it went in: {_SAMPLE!r} became {back!r}",
                    "the tokenizer is damaged or of another kind: download it again", **facts)  # fmt: skip
    elif rows is not None and opened.vocab_size > rows:
        yield error(f"{opened.vocab_size:,} tokens, the model has rows for {rows:,}",
                    "tokenizer and weights are of different models: download both again", **facts)  # fmt: skip
    else:
        yield ok(f"{opened.vocab_size:,} tokens, {len(opened.special_ids)} of them control", **facts)


def template(patient: Patient) -> Iterator[Finding]:
    """Renders a short chat."""
    assert patient.path is not None and patient.tokenizer is not None
    opened = (ChatTemplate.open(patient.checkpoint, patient.tokenizer) if patient.checkpoint is not None
              else ChatTemplate.load(patient.path, patient.tokenizer))  # fmt: skip
    if opened is None:
        yield warn("no chat template: a prompt goes in as it is",
                   "download the model's chat_template.jinja or tokenizer_config.json")  # fmt: skip
        return
    prompt = opened.prompt_ids([{"role": "user", "content": "Hello"}])
    thinks = ", can think" if "enable_thinking" in opened.reads else ""
    yield ok(f"{opened.file.name} makes {counted(len(prompt), 'token')} of \"Hello\"{thinks}", file=str(opened.file),
             reads=sorted(opened.reads))  # fmt: skip


def stops(patient: Patient) -> Iterator[Finding]:
    assert patient.checkpoint is not None and patient.tokenizer is not None
    ids = sorted(stop_ids(patient.checkpoint, patient.tokenizer))
    rows = getattr(patient.geometry, "vocab", None)
    beyond = [i for i in ids if rows is not None and i >= rows]
    if not ids:
        yield warn("the model names none: answers end at their limit only", "download its generation_config.json",
                   ids=ids)  # fmt: skip
    elif beyond:
        yield warn(f"{listing(map(str, beyond))} beyond the vocabulary of {rows:,}",
                   "config and weights are of different models: download both again", ids=ids)  # fmt: skip
    else:
        yield ok(", ".join(patient.tokenizer.decode([i]) or str(i) for i in ids), ids=ids)


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(patient: Patient) -> Iterator[Finding]:
    """Sets the survey."""
    assert patient.checkpoint is not None and patient.family is not None
    found = survey(patient.checkpoint, patient.family, patient.geometry, patient.settings)
    patient.survey = found
    for note in found.notes:
        yield warn(note, "`coli convert` makes experts of another format")
    if found.has_head and found.head is None:
        yield warn(f"the draft head cannot be used: {found.no_head[0]}", found.no_head[1])
    record, layers = max(found.slots, default=0), counted(len(found.slots), "layer")
    words = f"{found.format}, {layers} of {patient.geometry.experts}, one is {size(record)}"
    yield ok(words if found.slots else "the model has none", layers=len(found.slots),
             format=found.format, record_bytes=record, head=found.head is not None)  # fmt: skip


def sidecars(patient: Patient) -> Iterator[Finding]:
    """Folders of quantised experts beside the model, and conversions that stopped half way."""
    assert patient.checkpoint is not None and patient.path is not None
    folders = sidecar.folders(patient.path)
    for place in (patient.path, *folders):
        if (place / CONVERSION).exists() and read_object(place / CONVERSION, CONVERSION).get("complete") is not True:
            yield warn(f"the conversion in {place.name} has not come to its end",
                       "give the same `coli convert` again: it goes on where it stopped")  # fmt: skip
    for folder in folders:
        yield _sidecar(patient, folder)
    if not folders:
        container = patient.checkpoint.meta and patient.survey
        yield ok("a container: its experts and qwen36_meta.json agree" if container else "none")


def _sidecar(patient: Patient, folder: Path) -> Finding:
    """A fault is a warning where the model runs without this sidecar."""
    assert patient.checkpoint is not None and patient.family is not None
    fault = warn if patient.survey is not None else error
    try:
        found = sidecar.open_sidecar(patient.checkpoint, folder, patient.geometry)
    except ModelError as refusal:
        return fault(f"{folder.name}: {refusal.what}", refusal.hint, folder=str(folder))
    prefixes = patient.family.expert_layers(patient.geometry)
    lacking = [prefix.rstrip(".") for prefix in prefixes if not _holds(found, prefix, patient.geometry.experts)]
    if lacking:
        return fault(f"{folder.name}: experts are missing in {listing(lacking)}",
                     "download its missing files, or convert again", folder=str(folder))  # fmt: skip
    return ok(f"{folder.name}: complete", folder=str(folder))


def _holds(found: sidecar.Sidecar, prefix: str, experts: int) -> bool:
    """Whether every expert of a layer is there, codes and scales."""
    return all(f"{prefix}mlp.experts.{expert}.{part}_proj.{end}" in found.tensors for expert in range(experts)
               for part in ("gate", "up", "down") for end in ("weight", "weight.qs"))  # fmt: skip


def mirror(patient: Patient) -> Iterator[Finding]:
    assert patient.checkpoint is not None
    folder = patient.settings.mirror
    if folder is None:
        yield ok("none asked for")
        return
    reader = ExpertReader(patient.checkpoint, mirror=folder)
    notes = list(reader.notes)
    reader.close()
    for note in notes:
        yield warn(note, "copy the model's files there again", folder=str(folder))
    if not notes:
        yield ok(f"{folder} has the same files", folder=str(folder))


# ---- what was learned, and what memory there is ----------------------------------------------------------------------


def histories(patient: Patient) -> Iterator[Finding]:
    """Reads the files that later runs learn from. One that is none is left as it is, here and by a run."""
    g, family, model = patient.geometry, patient.family, patient.path
    assert family is not None and model is not None
    rows = tuple(int(prefix.split(".")[1]) for prefix in family.expert_layers(g))
    if rows:
        shape = usage.Shape(family.name, g.layers, g.experts, rows)
        yield _history("experts used", usage.usage_file(model, patient.settings), lambda file: usage.load(file, shape))
    file, off = vocabulary.vocab_file(model, patient.settings)
    if file is None:
        yield warn(off, "give each history a file of its own")
    else:
        yield _history("tokens used", file, lambda file: counts.load(file, g.vocab))


def _history(what: str, file: Path, load: Callable[[Path], Any]) -> Finding:
    try:
        load(file)
    except ColiError as fault:
        return warn(f"{what}: {fault.where} {fault.what}: neither used nor changed", fault.hint, file=str(file))
    there, place = file.exists(), next(folder for folder in file.absolute().parents if folder.exists())
    facts = {"file": str(file), "bytes": file.stat().st_size if there else 0}
    if not os.access(place, os.W_OK):
        return warn(f"{what}: {file} cannot be written",
                    "COLI_USAGE and COLI_VOCAB_USAGE name other files, USAGE_SAVE=0 keeps none", **facts)  # fmt: skip
    return ok(f"{what}: {file}" if there else f"{what}: no file yet", **facts)


def plan(patient: Patient) -> Iterator[Finding]:
    """Sets the plan."""
    assert patient.survey is not None
    found = patient.plan = make_plan(patient.survey, patient.settings)
    for note in found.notes:
        yield warn(note, "`coli plan` shows what fits")
    if found.no_head and patient.survey.head is not None and patient.settings.mtp is not False:
        yield warn(found.no_head, "give more memory (--ram) or a shorter context (--ctx)")
    kept = f", {found.cap} of {patient.geometry.experts} experts a layer in memory" if found.cap else ""
    yield ok(f"takes {size(found.total)} of a budget of {size(found.budget)} at a context of {found.ctx:,}{kept}",
             total=found.total, budget=found.budget, cap=found.cap, context=found.ctx, terms=asdict(found.terms),
             experts=found.experts, head_experts=found.head_experts)  # fmt: skip
