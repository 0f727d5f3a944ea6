"""POST /v1/completions over a socket, by the openai client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion

from tests.server.asking import TOKENIZER

GREEDY: dict[str, Any] = {"model": "nano", "prompt": "Once upon a time", "temperature": 0.0, "max_tokens": 16}


def ask(client: OpenAI, **fields: Any) -> Completion:
    return client.completions.create(**{**GREEDY, **fields})


def whole(answer: Completion) -> dict[str, Any]:
    choice, usage = answer.choices[0], answer.usage
    assert usage is not None
    return {
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "logprobs": choice.logprobs.model_dump() if choice.logprobs else None,
        "usage": (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
    }


def joined(client: OpenAI, **fields: Any) -> dict[str, Any]:
    asked = {**GREEDY, "stream_options": {"include_usage": True}, **fields}
    chunks = list(client.completions.create(**asked, stream=True))
    choices, usage = [chunk.choices[0] for chunk in chunks if chunk.choices], chunks[-1].usage
    assert usage is not None and not chunks[-1].choices and all(chunk.usage is None for chunk in chunks[:-1])
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1) and not choices[-1].text
    parts = [choice.logprobs.model_dump() for choice in choices if choice.logprobs]
    logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]} if parts else None
    return {
        "text": "".join(choice.text for choice in choices),
        "finish_reason": choices[-1].finish_reason,
        "logprobs": logprobs,
        "usage": (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
    }


@pytest.mark.parametrize("asked", [
    {}, {"echo": True}, {"logprobs": 0}, {"logprobs": 5}, {"stop": [" was", "zz"], "logprobs": 2}, {"max_tokens": 1},
    {"temperature": 1.2, "seed": 11, "logprobs": 3, "max_tokens": 60}, {"prompt": "caf\u00e9 \U0001f98a", "echo": True},
])  # fmt: skip
def test_the_joined_stream_is_the_document(openai_client: OpenAI, asked: dict[str, Any]) -> None:
    assert joined(openai_client, **asked) == whole(ask(openai_client, **asked))


def test_a_prompt_in_every_form_is_the_same_prompt(openai_client: OpenAI) -> None:
    ids = TOKENIZER.encode(GREEDY["prompt"])
    texts = [whole(ask(openai_client, prompt=prompt)) for prompt in (GREEDY["prompt"], [GREEDY["prompt"]], ids, [ids])]
    assert texts == [texts[0]] * 4 and texts[0]["usage"] == (len(ids), 16, len(ids) + 16)
    echoed = ask(openai_client, prompt=ids, echo=True).choices[0].text
    assert echoed == GREEDY["prompt"] + texts[0]["text"]


def test_logprobs_have_the_legacy_shape(openai_client: OpenAI) -> None:
    choice = ask(openai_client, logprobs=3, temperature=1.5, seed=2, max_tokens=40).choices[0]
    logprobs = choice.logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 40
    assert "".join(logprobs.tokens) == choice.text
    for token, logprob, top, offset in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs,
                                           logprobs.text_offset, strict=True):  # fmt: skip
        assert choice.text[offset:].startswith(token)
        assert top[token] == logprob and len(top) in (3, 4)
    assert any(len(top) == 4 for top in logprobs.top_logprobs)  # a sampled token besides the likeliest


def test_tokens_of_a_split_character_are_told_apart(openai_client: OpenAI) -> None:
    """nano writes a fox of four tokens when every one of them is favoured in turn."""
    ids = TOKENIZER.encode("\U0001f98a")
    assert len(ids) > 1
    text = ask(openai_client, logit_bias={str(ids[0]): 100}, max_tokens=2, logprobs=0).choices[0]
    assert text.logprobs and text.logprobs.tokens and text.logprobs.text_offset
    spelled = "".join(f"\\x{byte:02x}" for byte in TOKENIZER.token_bytes(ids[0]))
    assert text.logprobs.tokens == [spelled, spelled] and text.text == "\ufffd\ufffd"


def test_reasoning_tags_are_text_here(openai_client: OpenAI) -> None:
    prompt = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    assert ask(openai_client, prompt=prompt, max_tokens=3).choices[0].text.startswith("<think>")


def test_refusals_are_openais_errors(openai_client: OpenAI) -> None:
    for fields, param in (({"best_of": 2}, "best_of"), ({"suffix": "."}, "suffix"), ({"prompt": ["a", "b"]}, "prompt"),
                          ({"prompt": ""}, "prompt"), ({"prompt": [9999]}, "prompt"),
                          ({"echo": True, "logprobs": 1}, "logprobs")):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            ask(openai_client, **fields)
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError) as long:
        ask(openai_client, prompt=[5] * 2048)
    assert long.value.code == "context_length_exceeded"
    assert ask(openai_client, prompt=[5] * 2047).usage.completion_tokens == 1  # type: ignore[union-attr]
