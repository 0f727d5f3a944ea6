"""What a conversion will write: jobs for the weights, then small files, the one that makes it a model last.

Guarded by tests/convert/test_resume.py (order) and tests/convert/test_container.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coli.chat import stop_ids
from coli.convert import dense, quantise
from coli.convert.files import Block, Job, Spec, header_bound
from coli.convert.report import Options, Tally
from coli.convert.restore import Output, outputs
from coli.convert.source import Source
from coli.formats import gguf_text
from coli.formats.checkpoint import read_error
from coli.models.layout import HEAD
from coli.tokenizer import Tokenizer

_TEXT = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "LICENSE",
    "NOTICE",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """`format` names the result for the state, `words` for people. `finals`: (name, bytes) of the small files, in the
    order they are written; the source's text is read before the work, so that what is wrong with it is said then."""

    root: Path
    format: str
    words: str
    jobs: tuple[Job, ...]
    finals: tuple[tuple[str, bytes], ...]


def label(source: Source, prefix: str) -> str:
    """"layer 3 of 48", as people count."""
    return "the draft head" if prefix == HEAD else f"layer {int(prefix.split('.')[1]) + 1} of {source.g.layers}"


def job(
    source: Source, name: str, words: str, groups: Sequence[str], *, compact: bool,
    experts: Callable[[], Sequence[Block]] | None = None, specs: Sequence[Spec] = (), expert_bytes: int = 0,
) -> Job:  # fmt: skip
    """One file of the dense tensors of some groups of the source, then expert blocks that will have these `specs`."""
    found: list[Output] = [output for group in groups for output in outputs(source, group)]

    def blocks() -> list[Block]:
        made = [block for output in found for block in dense.blocks(source, output, compact=compact)]
        return made + list(experts() if experts is not None else ())

    names = [Spec(output.name, "F32", output.shape) for output in found]
    nbytes = sum(dense.bound(source, output) for output in found) + sum(spec.nbytes for spec in specs)
    return Job(name, words, nbytes + header_bound([*names, *specs]),
               dense.source_bytes(source, found) + expert_bytes, blocks)  # fmt: skip


def expert_blocks(source: Source, options: Options, prefix: str, specs: Callable[[int], tuple[Spec, ...]],
                  pack: Callable[[np.ndarray], np.ndarray]) -> Callable[[], Sequence[Block]]:  # fmt: skip
    """A layer's experts, a block each: codes of gate, up and down (int4 ones as `pack` lays them out), their scales."""

    def record(expert: int, tally: Tally) -> list[np.ndarray]:
        codes, scales = quantise.expert(source.expert(prefix, expert), options, tally)
        return [pack(c) if options.ebits == 4 else c for c in codes] + scales

    return lambda: [Block(specs(expert), partial(record, expert), True) for expert in range(source.g.experts)]


def text_files(source: Source) -> list[tuple[str, bytes]]:
    """Tokenizer, template and stop ids as a folder has them. Raises ReadError."""
    if source.is_gguf:
        return _text_of_gguf(source)
    folder = source.checkpoint.folder
    return [(name, _read(folder / name)) for name in _TEXT if (folder / name).is_file()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise read_error(error, "the file", path) from error


def _text_of_gguf(source: Source) -> list[tuple[str, bytes]]:
    """The same, made from the metadata; none for a file without a tokenizer."""
    metadata, where = source.checkpoint.metadata, source.checkpoint.folder
    if gguf_text.TOKENS not in metadata:
        return []
    library = gguf_text.library_of(metadata, where)
    stops = {"eos_token_id": sorted(stop_ids(source.checkpoint, Tokenizer(library, where)))}
    files = [("tokenizer.json", library.to_str().encode()),
             ("tokenizer_config.json", document(gguf_text.token_strings(metadata, where))),
             ("generation_config.json", document(stops))]  # fmt: skip
    template = gguf_text.template_of(metadata, where)
    return files if template is None else [*files, ("chat_template.jinja", template.encode())]


def document(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def folder_config(source: Source) -> dict[str, Any]:
    """The text config, flattened, with what FP8 tensors need to be read."""
    config = dict(source.checkpoint.config)
    if source.checkpoint.quantization:
        config["quantization_config"] = source.checkpoint.quantization
    return config
