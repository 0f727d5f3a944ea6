"""Every flag about a model, its memory and its drafts: one list for the commands that answer (run, serve, chat).

Typer reads a command's flags from its signature. `model_flags` puts the list there in the place of the parameter
`flags`, and calls the command with what was given as that one mapping: field of Settings -> value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from coli.commands import _options, _speculation

_FLAGS: dict[str, Any] = {
    "model": _options.Model, "ctx": _options.Ctx, "cap": _options.Cap, "ram": _options.Ram,
    "threads": _options.Threads, "trunk": _options.Trunk, "experts": _options.Experts, "usage": _options.Usage,
    "warm_start": _options.WarmStart, "prefetch": _options.Prefetch, "direct": _options.Direct,
    "mirror": _options.Mirror, "page_cache": _options.PageCache, "mtp": _speculation.Mtp,
    "drafts": _speculation.Drafts, "mtp_pmin": _speculation.Pmin, "mtp_vocab": _speculation.MtpVocab,
    "mtp_vocab_ids": _speculation.MtpVocabIds, "mtp_wiring": _speculation.MtpWiring,
    "mtp_cap": _speculation.MtpCap, "vocab_usage": _speculation.VocabUsage, "usage_save": _speculation.UsageSave,
    "mtp_pstep": _speculation.Pstep, "lookup": _speculation.Lookup, "lookup_drafts": _speculation.LookupDrafts,
    "gate": _speculation.Gate,
}  # fmt: skip


def model_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with all of them in the place of its parameter `flags`; the mapping is for `_options.settings`."""
    own = inspect.signature(command, eval_str=True)

    @wraps(command)
    def call(**given: Any) -> Any:
        return command(flags={name: given.pop(name) for name in _FLAGS}, **given)

    parameters: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        if parameter.name == "flags":
            parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag)
                           for name, flag in _FLAGS.items()]  # fmt: skip
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
