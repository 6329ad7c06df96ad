"""Bodies of requests: a conversation's turn, after the answers to the turns before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.client import Endpoint, StreamResult
from loadgen.workload.conversation import Conversation

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bodies:
    """``common``: what every body has, such as ``temperature``."""

    endpoint: Endpoint
    model: str
    common: Mapping[str, Any] = field(default_factory=dict)

    def body(self, conversation: Conversation, turn: int, answers: Sequence[StreamResult]) -> dict[str, Any]:
        """Returns the body of ``turn``, before which ``answers`` came."""
        body = {"model": self.model, **self.common}
        if (tokens := conversation.turns[turn].output_tokens) is not None:
            body["max_tokens"] = tokens
        if conversation.tenant is not None and conversation.tenant.priority is not None:
            body["priority"] = conversation.tenant.priority
        if self.endpoint == "chat":
            body["messages"] = messages(conversation, turn, answers)
            if conversation.tools:
                body["tools"] = list(conversation.tools)
            return body
        content = conversation.turns[turn].content
        alone = not (answers or conversation.system or conversation.history)
        body["prompt"] = content if alone else transcript(messages(conversation, turn, answers))
        return body


def messages(conversation: Conversation, turn: int, answers: Sequence[StreamResult]) -> list[Message]:
    """Returns the messages up to ``turn``."""
    found: list[Message] = list(conversation.history)
    if conversation.system is not None:
        found.insert(0, {"role": "system", "content": conversation.system})
    calls: list[Message] = []
    for number, asked in enumerate(conversation.turns[: turn + 1]):
        assert isinstance(asked.content, str), "token ids are whole prompts of completions"
        if asked.result_of is not None and calls:
            found += ({"role": "tool", "tool_call_id": call["id"], "content": asked.content} for call in calls)
        else:
            before = f"Result of {asked.result_of}: " if asked.result_of else ""
            found.append({"role": "user", "content": before + asked.content})
        if number < turn:
            calls = tool_calls(answers[number].tool_calls)
            said: Message = {"role": "assistant", "content": answers[number].text}
            found.append(said | ({"tool_calls": calls} if calls else {}))
    return found


def tool_calls(pieces: Sequence[Any]) -> list[Message]:
    """Returns the calls of an answer, whose arguments may have come in pieces."""
    calls: dict[int, Message] = {}
    for number, piece in enumerate(pieces):
        function = piece.get("function") or {}
        call = calls.setdefault(
            piece.get("index", number), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
    return list(calls.values())


def transcript(found: Sequence[Message]) -> str:
    """Returns messages as one text, for servers and models without chat."""
    return "\n".join([*(f"{message['role']}: {message['content']}" for message in found), "assistant:"])
