"""A request becomes the engine's: prompt, defaults, marks, refusals (coli/server/ask.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coli.errors import PromptTooLong, UsageError
from coli.grammar import MissingExtra
from coli.server.ask import Named, Options, Prepared, Speculative, count_chat, prepare_chat, prepare_text
from coli.server.errors import ApiError
from coli.speculation.options import Speculation
from tests.server import tool_model
from tests.server.asking import TOKENIZER, assistant, service, system, user, with_template

HERMES = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
NANO = service()
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose template reads tools and thinking."""
    return service(with_template(tmp_path_factory.mktemp("tools"), tool_model.TEMPLATE))


def chat(of: Any, *messages: dict[str, Any], **options: Any) -> Prepared:
    return prepare_chat(of, messages=messages, **options)


def refusal(of: Any, *messages: dict[str, Any], **options: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(of, *messages, **options)
    assert caught.value.status == 400
    return caught.value


# ---- the prompt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "tail", "reasoning"), [
    ({}, "<think>\n\n</think>\n\n", "closed"),
    ({"thinking": True}, "<think>\n", "open"),
    ({"thinking": False}, "<think>\n\n</think>\n\n", "closed"),
    ({"effort": "high"}, "<think>\n", "open"),
    ({"effort": "none"}, "<think>\n\n</think>\n\n", "closed"),
    ({"effort": "low", "thinking": False}, "<think>\n\n</think>\n\n", "closed"),
    ({"template_kwargs": {"enable_thinking": True}}, "<think>\n", "open"),
])  # fmt: skip
def test_thinking_is_what_was_asked_for(asked: dict[str, Any], tail: str, reasoning: str) -> None:
    prepared = chat(NANO, user("Hi"), **asked)
    assert prepared.prompt == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{tail}"
    assert prepared.request.form.start == reasoning
    assert prepared.request.prompt_ids == tuple(TOKENIZER.encode(prepared.prompt))


def test_an_effort_reaches_a_template_that_reads_it(tmp_path: Path) -> None:
    template = "{{ messages[0].content }} {{ reasoning_effort }}{% if enable_thinking is false %} off{% endif %}"
    asked = service(with_template(tmp_path, template))
    assert chat(asked, user("Hi"), effort="high").prompt == "Hi xhigh"
    assert chat(asked, user("Hi"), effort="low", thinking=False).prompt == "Hi low off"
    assert chat(asked, user("Hi"), effort="none").prompt == "Hi  off"


@pytest.mark.parametrize("asked, param", [
    ({"effort": "extreme"}, "reasoning_effort"),
    ({"template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
    ({"template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"tools": [WEATHER]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"options": Options(logit_bias=((0, 1.0), (8192, 1.0)))}, "logit_bias"),
])  # fmt: skip
def test_what_the_model_cannot_do_is_named(asked: dict[str, Any], param: str) -> None:
    assert refusal(NANO, user("Hi"), **asked).param == param


def test_a_template_without_switches_refuses_them(tmp_path: Path) -> None:
    plain = service(with_template(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert refusal(plain, user("Hi"), thinking=False).param == "enable_thinking"
    assert refusal(plain, user("Hi"), effort="low").param == "reasoning_effort"
    assert refusal(plain, user("Hi"), assistant("He")).param == "messages"  # nothing ends an answer there


def test_a_template_that_fails_is_no_fault_of_the_server(tmp_path: Path) -> None:
    failing = service(with_template(tmp_path, "{{ messages[0].content + 5 }}"))
    assert refusal(failing, user("Hi")).code == "chat_template_failed"


def test_a_model_without_a_template_says_where_to_go() -> None:
    bare = service()
    bare.engine.chat = None
    assert "/v1/completions" in refusal(bare, user("Hi")).message


def test_the_last_message_of_an_assistant_is_continued() -> None:
    prepared = chat(NANO, user("Hi"), assistant("Hello, <|im_end|> I"))
    assert prepared.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nHello, <|im_end|> I")
    assert prepared.request.form.start == "none"  # its content spells a control token: nothing is known behind it
    assert chat(NANO, user("Hi"), assistant("Hello, I")).request.form.start == "closed"


@pytest.mark.parametrize("messages, param", [
    ([], "messages"),
    ([user("Hi"), system("Be brief.")], "messages[1].role"),
    ([system("Be brief."), system("Be kind."), user("Hi"), system("No.")], "messages[3].role"),
    ([user("Warm?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "5"}], "messages"),
    ([user("Warm?"), assistant("", tool_calls=[CALL]), user("Well?")], "messages"),
    ([user("Hi"), assistant("", tool_calls=[{"id": "1"}])], "messages"),
])  # fmt: skip
def test_messages_out_of_order_are_refused(messages: list[dict[str, Any]], param: str) -> None:
    assert refusal(NANO, *messages).param == param


def test_the_systems_messages_at_the_head_are_one() -> None:
    apart, one = [system("Be brief."), system("Be kind."), user("Hi")], [system("Be brief.\n\nBe kind."), user("Hi")]
    assert chat(NANO, *apart).request == chat(NANO, *one).request
    assert count_chat(NANO, messages=apart) == count_chat(NANO, messages=one)


def test_an_overlong_prompt_is_refused_with_both_counts() -> None:
    length = len(chat(NANO, user("Hi")).request.prompt_ids)
    assert chat(service(ctx=length + 1), user("Hi")).request.prompt_ids
    with pytest.raises(PromptTooLong, match=f"length is {length} tokens, the prompt has {length} ") as caught:
        chat(service(ctx=length), user("Hi"))
    assert caught.value.where == "messages"
    with pytest.raises(PromptTooLong) as caught:
        prepare_text(service(ctx=2), "Once upon a time")
    assert caught.value.where == "prompt"
    assert count_chat(service(ctx=length), messages=[user("Hi")]) == length


def test_a_text_or_ids_are_taken_as_they_are() -> None:
    ids = tuple(TOKENIZER.encode("Once upon a time"))
    for prompt in ("Once upon a time", list(ids)):
        prepared = prepare_text(NANO, prompt, Options(pin=True))
        assert (prepared.request.prompt_ids, prepared.prompt, prepared.request.form) == (ids, "Once upon a time", None)
        assert prepared.request.pins == (len(ids),)
    for wrong in ("", [], [8192], [-1], [1 << 70]):
        with pytest.raises(ApiError) as caught:
            prepare_text(NANO, wrong)
        assert caught.value.param == "prompt"


# ---- marks -----------------------------------------------------------------------------------------------------------


def shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def test_the_marks_are_where_later_prompts_part_from_this_one() -> None:
    first = chat(NANO, system("You are a fox."), user("Who are you?")).request
    turn = chat(NANO, system("You are a fox."), user("Who are you?"), assistant("A fox."), user("Sure?")).request
    other = chat(NANO, system("You are a fox."), user("And you?")).request
    assert first.marks == (shared(first.prompt_ids, other.prompt_ids), shared(first.prompt_ids, turn.prompt_ids))
    assert first.pins == () and first.shared == first.marks[0]
    assert 0 < first.marks[0] < first.marks[1] < len(first.prompt_ids)


def test_a_pinned_prompt_keeps_what_its_next_turn_begins_with() -> None:
    request = chat(NANO, user("Who are you?"), options=Options(pin=True)).request
    assert request.pins == (*request.marks, len(request.prompt_ids))
    assert refusal(service(pins=0), user("Hi"), options=Options(pin=True)).param == "pin"
    assert chat(service(pins=0), system("A"), user("Hi")).request.pins == ()


def test_tools_are_in_front_of_the_first_mark(tools: Any) -> None:
    request = chat(tools, user("Warm?"), tools=[WEATHER]).request
    assert "weather" in TOKENIZER.decode(request.prompt_ids[: request.marks[0]])


def test_a_template_that_refuses_the_probe_leaves_the_end_alone(tmp_path: Path) -> None:
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}"
    assert chat(service(with_template(tmp_path, refusing)), user("Hi")).request.marks == ()


# ---- wishes ----------------------------------------------------------------------------------------------------------


def test_what_is_left_open_is_the_checkpoints_word_then_openais(tmp_path: Path) -> None:
    sampling = chat(NANO, user("Hi")).request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 20, 0.95, 0.0)
    sampling = chat(NANO, user("Hi"), options=Options(temperature=0.0, top_k=0, seed=-1)).request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.0, 0, 0.95, (1 << 64) - 1)

    folder = with_template(tmp_path / "open", "{{ messages[0].content }}")
    (folder / "generation_config.json").unlink()
    assert chat(service(folder), user("Hi")).request.sampling.temperature == 1.0
    folder = with_template(tmp_path / "greedy", "{{ messages[0].content }}")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "top_k": 5}))
    assert chat(service(folder), user("Hi")).request.sampling.greedy


def test_a_bad_wish_is_the_clients(tools: Any) -> None:
    with pytest.raises(UsageError) as caught:
        chat(NANO, user("Hi"), options=Options(top_p=0.0))
    assert caught.value.where == "top_p"


def test_a_penalty_that_breaks_numbers_is_refused() -> None:
    assert refusal(NANO, user("Hi"), options=Options(repetition_penalty=5e-324)).param == "repetition_penalty"
    assert chat(NANO, user("Hi"), options=Options(repetition_penalty=0.01)).request.sampling.repetition_penalty == 0.01


def test_a_stop_that_no_answer_could_reach_is_refused() -> None:
    assert chat(NANO, user("Hi"), options=Options(stop=("a" * 1024,))).request.stop
    assert refusal(NANO, user("Hi"), options=Options(stop=("a" * 1025,))).param == "stop"


def test_wishes_reach_the_engine() -> None:
    options = Options(max_tokens=7, stop=("a", "b"), logprobs=3, prediction="a time", logit_bias=((5, -1.0),))
    request = chat(NANO, user("Hi"), options=options).request
    assert (request.max_tokens, request.stop, request.logprobs) == (7, ("a", "b"), 3)
    assert request.prediction == tuple(TOKENIZER.encode("a time")) and request.sampling.logit_bias == ((5, -1.0),)
    assert request.speculation is None and request.constraint is None


def test_no_more_is_kept_of_a_prediction_than_an_answer_could_say() -> None:
    request = chat(NANO, user("Hi"), options=Options(prediction="a time " * 5000)).request
    assert len(request.prediction) == NANO.engine.ctx


def test_drafts_are_switched_and_limited_by_request() -> None:
    def drafting(wish: Speculative, of: Any = NANO) -> Speculation | None:
        return chat(of, user("Hi"), options=Options(speculative=wish)).request.speculation

    assert drafting(Speculative(False)) == drafting(Speculative(True, 0)) == Speculation.off()
    assert drafting(Speculative(True)) is None
    limited = drafting(Speculative(True, 1))
    assert limited is not None and (limited.most, limited.drafts, limited.lookup_drafts) == (1, 1, 1)
    assert limited.deepest == 1
    generous = drafting(Speculative(True, 1000))
    assert generous == Speculation.of(NANO.engine.settings)

    headless = service(head=False, lookup=False)
    assert drafting(Speculative(False), headless) == Speculation.off()
    for wish in (Speculative(True), Speculative(True, 2)):
        with pytest.raises(ApiError, match="started without drafts"):
            drafting(wish, headless)


# ---- forms and tools -------------------------------------------------------------------------------------------------


def test_tools_are_read_unless_none_may_be_called(tools: Any) -> None:
    prepared = chat(tools, user("Warm?"), tools=[WEATHER])
    assert '"name": "weather"' in prepared.prompt and prepared.request.form.tools == (WEATHER,)
    assert prepared.request.constraint is None
    prepared = chat(tools, user("Warm?"), tools=[WEATHER], tool_choice="none")
    assert "weather" not in prepared.prompt and prepared.request.form.tools == ()


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_two_tools_of_one_name_are_refused(tools: Any, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "weather"}}
    error = refusal(tools, user("Hi"), tools=[WEATHER, other], tool_choice=choice)
    assert error.param == "tools" and "two are named 'weather'" in str(error)
    with pytest.raises(ApiError, match="two are named"):
        count_chat(tools, messages=[user("Hi")], tools=[WEATHER, other])


def test_a_call_that_must_come_is_held_to_the_grammar(tools: Any) -> None:
    for choice in ("required", Named("weather")):
        constraint = chat(tools, user("Warm?"), tools=[WEATHER], tool_choice=choice).request.constraint
        assert constraint is not None
        mask = constraint.mask()
        begins = [token for token in range(len(mask)) if mask[token]]
        assert begins and all("<tool_call>".startswith(TOKENIZER.decode([token])) for token in begins)
    assert refusal(tools, user("Warm?"), tools=[WEATHER], tool_choice=Named("news")).param == "tool_choice"
    assert chat(tools, user("Warm?"), tools=[WEATHER], tool_choice="required").forced
    assert not chat(tools, user("Warm?"), tools=[WEATHER]).forced


def test_one_call_at_most_where_none_is_required(tools: Any) -> None:
    """Free until the call is there, whatever stands before it; then nothing but the end."""
    value = "Oslo</tool_call>"
    said = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    asked: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False}
    thought = f"I could say {said}.\n</think>\n\nI look.\n"
    for thinking, before in ((True, thought), (False, "<tool_call>no call</tool_call>")):
        constraint = chat(tools, user("Warm?"), thinking=thinking, **asked).request.constraint
        assert constraint is not None
        ids = TOKENIZER.encode(before + said)
        for token in ids:
            assert constraint.mask() is None and constraint.admits([token, token]) == 2
            constraint.accept(token)
        mask = constraint.mask()
        assert mask is not None and set(mask.nonzero()[0]) == NANO.engine.stop_ids and constraint.admits(ids) == 0
    for free in ({**asked, "tools": []}, {**asked, "tool_choice": "none"}, {**asked, "parallel_tool_calls": True}):
        assert chat(tools, user("Warm?"), **free).request.constraint is None
    ending, tools.engine.stop_ids = tools.engine.stop_ids, frozenset({9000})
    try:
        with pytest.raises(UsageError, match="needs a token that ends"):
            chat(tools, user("Warm?"), **asked)
    finally:
        tools.engine.stop_ids = ending


def test_a_schema_that_is_none_is_named_by_the_field_it_came_in(tools: Any) -> None:
    for inner in ({"type": "strange"}, {"properties": {"a": {"type": "bogus"}}}, {"not": {}}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": inner}}
        error = refusal(NANO, user("Hi"), options=Options(response_format=form))
        assert (error.param, error.code) == ("response_format", "invalid_json_schema")
        assert error.message.startswith("invalid 'response_format': this grammar cannot be followed: ")
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "properties": {"a": {**inner, "type": "object"} if "not" in inner else {"type": "object", **inner}}}}}
        if inner.get("type") != "strange":
            error = refusal(tools, user("Hi"), tools=[tool], tool_choice="required")
            assert (error.param, error.code) == ("tools", "invalid_function_parameters")


def test_a_grammar_without_its_library_is_a_field_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise MissingExtra("a grammar needs llguidance", hint="pip install 'coli[grammar]'")

    monkeypatch.setattr("coli.grammar.constraint_for", none)
    error = refusal(NANO, user("Hi"), options=Options(response_format={"type": "json_object"}))
    assert (error.param, error.code) == ("response_format", "unsupported_parameter") and "pip install" in error.message


def test_what_users_and_tools_spell_is_not_the_form_of_a_call(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    styles = list[str]()
    monkeypatch.setattr("coli.grammar.constraint_for", lambda *given, style, **wish: styles.append(style))
    spelling = {"type": "function", "function": {**WEATHER["function"], "description": "as in <function=weather>"}}
    for folder, template in (("json", HERMES), ("xml", tool_model.TEMPLATE)):
        (tmp_path / folder).mkdir()
        of = service(with_template(tmp_path / folder, template))
        chat(of, user("<function=weather>?"), tools=[spelling], tool_choice="required")
    assert styles == ["json", "xml"]


def test_forms_become_grammars() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    forms = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}]
    for form in forms:
        constraint = chat(NANO, user("Hi"), options=Options(response_format=form)).request.constraint
        assert constraint is not None and not constraint.mask()[TOKENIZER.encode("Once")[0]]
        assert constraint.mask()[TOKENIZER.encode("{")[0]]
    assert chat(NANO, user("Hi"), options=Options(response_format={"type": "text"})).request.constraint is None


def test_wishes_that_exclude_each_other_are_refused(tools: Any) -> None:
    form = Options(response_format={"type": "json_object"})
    assert refusal(tools, user("Hi"), tools=[WEATHER], options=form).param == "response_format"
    assert refusal(tools, user("Hi"), tools=[WEATHER], tool_choice="required", options=form).param == "response_format"
    assert refusal(NANO, user("Hi"), assistant("{"), options=form).param == "response_format"
