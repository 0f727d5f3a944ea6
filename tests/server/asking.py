"""What the functions of coli/server/ask.py need of a server, without a model: nano's tokenizer and a chat template."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coli.chat import ChatTemplate
from coli.models.find import NANO
from coli.server.options import ServeOptions
from coli.settings import load
from coli.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(NANO)
VOCAB = 8192
STOPS = frozenset({8187, 8189})


def with_template(folder: Path, source: str) -> Path:
    """nano in `folder` with another template; its weights are not copied."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in NANO.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        elif file.is_file():
            shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return folder


def service(folder: Path = NANO, *, ctx: int = 2048, head: bool = True, pins: int = 4, **settings: Any) -> Any:
    """A service as far as a prompt goes."""
    engine = SimpleNamespace(
        tokenizer=TOKENIZER, chat=ChatTemplate.load(folder, TOKENIZER), stop_ids=STOPS, ctx=ctx, model_path=folder,
        geometry=SimpleNamespace(vocab=VOCAB), head=object() if head else None,
        settings=load(settings, {})[0].resolve("qwen38"),
    )  # fmt: skip
    return SimpleNamespace(engine=engine, options=ServeOptions(pins=pins))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}
