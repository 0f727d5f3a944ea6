"""What POST /v1/messages and /v1/messages/count_tokens accept, and how Anthropic's messages become the template's.

Idea: a block is one model with a `type`, so a wrong field is named by its path. A request becomes what ask.prepare_chat
takes: messages in the template's form, tools in OpenAI's form (the form templates are written for).
  system       one message in front; a system message at the head of `messages` joins it
  turns        neighbours of one role are one turn, as Anthropic's servers read them
  tool_result  messages of role "tool", in their order; the text beside them is a user's message. Templates know no
               `is_error`, so the model reads it: "Error: " stands before what the tool said
  thinking     an assistant message's `reasoning_content`; where it was left out (`display: "omitted"`) it is read back
               from the block's signature, where we put it
What clients know and this server does not do is in `_REFUSED` and refused by name; `cache_control` asks for what prefix
reuse does anyway. Guarded by tests/server/test_anthropic.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from coli.server.carried import unseal
from coli.server.errors import MOST_ITEMS, ApiError, Only, bounded, unsupported, without
from coli.server.openai_schema import Drafts

_NEEDS_TEXT = "send text"
_REFUSED: Only = {
    "container": ((), "there is no code execution here"),
    "mcp_servers": ((), "connect to the server yourself and send its tools"),
    "compaction": ((), "send the messages you want to be read"),
    "thread": ((), "no conversation is kept here"),
    "fallbacks": ((), "one model is served"),
    "fallback_credit_token": ((), "one model is served"),
    "diagnostics": ((), "the usage says what was cached"),
    "inference_geo": ((), "the model runs on this machine"),
    "billing_policy": ((), "nothing is billed"),
    "user_profile_id": ((), "no profiles are kept here"),
    "workspace_id": ((), "there are no workspaces here"),
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CacheControl(_Model):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Text(_Model):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], bounded(1024)] | None = None  # of an answer that is sent back


class Thinking(_Model):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUse(_Model):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class Unreadable(BaseModel):
    """A block that Anthropic's servers take and we do not."""

    model_config = ConfigDict(extra="allow")
    type: Literal[
        "image", "document", "search_result", "redacted_thinking", "server_tool_use", "web_search_tool_result",
        "web_fetch_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result", "tool_search_tool_result", "tool_reference", "browser_state",
        "container_upload", "mcp_tool_use", "mcp_tool_result", "compaction",
    ]  # fmt: skip


def _as_blocks(content: Any) -> Any:
    """A text is short for one block of it."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Short = BeforeValidator(_as_blocks)
ResultBlock = Annotated[Text | Unreadable, Field(discriminator="type")]


class ToolResult(_Model):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[ResultBlock], bounded(4096), Short] = []
    is_error: bool = False
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = Annotated[Text | Thinking | ToolUse | ToolResult | Unreadable, Field(discriminator="type")]


class Message(_Model):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], bounded(4096), Short] = Field(min_length=1)


class Tool(_Model):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[^<>\s]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], bounded(16)] | None = None


class FreeChoice(_Model):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(_Model):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


ToolChoice = Annotated[FreeChoice | NamedChoice, Field(discriminator="type")]


class ThinkingConfig(_Model):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(_Model):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Model):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ClearThinking(_Model):
    """The one edit that asks for what a template can do: leave all thinking in."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(_Model):
    edits: Annotated[list[ClearThinking], bounded(16)] = []


class Metadata(_Model):
    user_id: str | None = None


class CountRequest(_Model):
    """The part of a request that its prompt is made of."""

    model: str
    messages: Annotated[list[Message], bounded(MOST_ITEMS)] = Field(min_length=1)
    system: Annotated[list[Text], bounded(4096), Short] | None = None
    tools: Annotated[list[Tool], bounded(1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], bounded(64)] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)  # ours, as are the two below
    speculative: Drafts | None = None
    pin: bool | None = None


def accepted(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` without what asks for nothing. Raises ApiError 400 for a field that means something to Anthropic and
    cannot be done here."""
    for number, tool in enumerate(tools if isinstance(tools := content.get("tools"), list) else []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            why = f"{kind!r} runs on Anthropic's servers or was trained into their models"
            raise unsupported(f"tools[{number}].type", why, "send tools of your own, with an input_schema")
    return without(content, _REFUSED)


# ---- to the template's form ------------------------------------------------------------------------------------------


def chat_messages(request: CountRequest) -> list[dict[str, Any]]:
    """The messages in the template's form. Raises ApiError 400 for blocks that do not belong where they are."""
    system = [_joined(request.system)] if request.system else []
    numbered = list(enumerate(request.messages))
    while numbered and numbered[0][1].role == "system":
        number, message = numbered.pop(0)
        system.append(_joined(_texts(_blocks(number, message))))
    converted: list[dict[str, Any]] = [{"role": "system", "content": "\n".join(system)}] if system else []
    names: dict[str, str] = {}  # of the tools used so far, by the id of the use
    for role, turn in groupby(numbered, key=lambda one: one[1].role):
        blocks = [block for number, message in turn for block in _blocks(number, message)]
        if role == "assistant":
            converted.append(_assistant(blocks, names))
        elif role == "user":
            converted += _user(blocks, names)
        else:
            where = blocks[0][0].partition(".")[0] + ".role"
            what = f"invalid '{where}': system messages stand first or not at all"
            raise ApiError(400, what, param=where, code="invalid_value")
    return converted


Placed = tuple[str, Any]  # where a block stands in the request, and the block


def _blocks(number: int, message: Message) -> list[Placed]:
    return [(f"messages[{number}].content[{place}]", block) for place, block in enumerate(message.content)]


def _assistant(blocks: Iterable[Placed], names: dict[str, str]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for where, block in blocks:
        match block:
            case Text():
                texts.append(block.text)
            case Thinking():
                thoughts.append(block.thinking or unseal(block.signature) or "")
            case ToolUse():
                names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(where, block, "an assistant's message")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: Iterable[Placed], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """A message for every run of texts, one of role "tool" for every result."""
    messages: list[dict[str, Any]] = []
    for result, run in groupby(blocks, key=lambda one: isinstance(one[1], ToolResult)):
        if not result:
            messages.append({"role": "user", "content": _joined(_texts(run))})
            continue
        for where, block in run:
            if block.tool_use_id not in names:
                what = f"invalid '{where}': no tool_use before it has the id '{block.tool_use_id}'"
                raise ApiError(400, what, param=where, code="invalid_value")
            said = _joined(_texts(_placed(where, block)))
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": names[block.tool_use_id],
                             "content": _as_error(said) if block.is_error else said})  # fmt: skip
    return messages


def _as_error(said: str) -> str:
    return f"Error: {said}" if said else "Error"


def _placed(where: str, result: ToolResult) -> list[Placed]:
    return [(f"{where}.content[{place}]", block) for place, block in enumerate(result.content)]


def _texts(blocks: Iterable[Placed]) -> list[Text]:
    found = []
    for where, block in blocks:
        if not isinstance(block, Text):
            raise _misplaced(where, block, "this message")
        found.append(block)
    return found


def _joined(texts: Iterable[Text]) -> str:
    return "\n".join(text.text for text in texts)


def _misplaced(where: str, block: Any, place: str) -> ApiError:
    if isinstance(block, Unreadable):
        return unsupported(where, f"'{block.type}' blocks cannot be read", _NEEDS_TEXT)
    what = f"invalid '{where}': a '{block.type}' block has no place in {place}"
    return ApiError(400, what, param=where, code="invalid_value")


def function_tools(tools: Iterable[Tool] | None) -> list[dict[str, Any]]:
    """The tools in OpenAI's form, which templates are written for."""
    return [{"type": "function", "function": {
        "name": tool.name, "description": tool.description or "", "parameters": tool.input_schema,
        **({} if tool.strict is None else {"strict": tool.strict}),
    }} for tool in tools or ()]  # fmt: skip
