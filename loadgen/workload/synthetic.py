"""Workloads that are drawn: single prompts, conversations, and agents that call tools."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from loadgen.schedule.traces import BLOCK_TOKENS, Recorded
from loadgen.workload.conversation import Conversation, Turn
from loadgen.workload.words import Lengths, Prompts


def _rng(seed: int, *what: object) -> random.Random:
    return random.Random(" ".join(map(str, (seed, *what))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Singles:
    """Prompts and answers of uniform lengths, no two prompts alike. With 8 to 128 and 1 to 128 tokens this is
    ExpertFlow's (thesis, 6.2.3.1)."""

    kind: ClassVar[str] = "lengths"
    prompts: Prompts
    prompt_tokens: Lengths
    output_tokens: Lengths
    seed: int
    name: str | None = None

    @property
    def text(self) -> str:
        return f"prompts of {self.prompt_tokens} tokens, answers of {self.output_tokens}"

    def conversation(self, number: int) -> Conversation:
        rng = _rng(self.seed, "single", number)
        content = self.prompts.make(rng, self.prompt_tokens.draw(rng))
        return Conversation(turns=(Turn(content=content, output_tokens=self.output_tokens.draw(rng), name=self.name),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Conversations, each after one of ``prefixes`` system prompts, whose part of a prefix cache they share."""

    kind: ClassVar[str] = "chat"
    prompts: Prompts
    prefixes: int
    system_tokens: int
    turns: Lengths
    prompt_tokens: Lengths
    output_tokens: Lengths
    think_s: float
    seed: int

    @property
    def text(self) -> str:
        before = f"{self.prefixes} system prompts of {self.system_tokens} tokens"
        each = f"{self.prompt_tokens} tokens each, answers of {self.output_tokens}"
        return f"chats of {self.turns} turns after one of {before}; {each}; {self.think_s:g} s to think on average"

    def conversation(self, number: int) -> Conversation:
        rng = _rng(self.seed, "chat", number)
        prefix = rng.randrange(self.prefixes)
        system = self.prompts.words(_rng(self.seed, "system", prefix), self.system_tokens)
        turns = tuple(self._turn(rng, turn) for turn in range(1, self.turns.draw(rng) + 1))
        return Conversation(system=system, turns=turns)

    def _turn(self, rng: random.Random, turn: int) -> Turn:
        content = self.prompts.words(rng, self.prompt_tokens.draw(rng))
        think = rng.expovariate(1 / self.think_s) if self.think_s and turn > 1 else 0.0
        return Turn(content=content, output_tokens=self.output_tokens.draw(rng), think_s=think, name=f"turn {turn}")


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = (
    _tool("search_files", "Find files whose text has a word.", word="What to look for."),
    _tool("read_file", "Return a file's text.", path="Which file."),
    _tool("run_tests", "Run the tests and return what failed.", folder="Whose tests."),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agents:
    """Tasks of several steps: after each answer comes a tool's result, long and at once, and the prompt grows. With
    ``tools`` bodies have them; without, results are text that a user sends."""

    kind: ClassVar[str] = "agents"
    prompts: Prompts
    steps: Lengths
    result_tokens: Lengths
    output_tokens: Lengths
    tools: bool
    seed: int

    @property
    def text(self) -> str:
        how = "with tools" if self.tools else "as text"
        lengths = f"results of {self.result_tokens} tokens, answers of {self.output_tokens}"
        return f"agents of {self.steps} steps {how}, {lengths}"

    def conversation(self, number: int) -> Conversation:
        rng = _rng(self.seed, "agent", number)
        system = "You repair a program. Say which tool to use next, and why. Tools: " + json.dumps(TOOLS)
        turns = [Turn(content=self.prompts.words(rng, 32), output_tokens=self.output_tokens.draw(rng), name="task")]
        for _ in range(self.steps.draw(rng) - 1):
            tool = rng.choice(TOOLS)["function"]["name"]
            content = self.prompts.words(rng, self.result_tokens.draw(rng))
            output = self.output_tokens.draw(rng)
            turns.append(Turn(content=content, output_tokens=output, result_of=tool, name="step"))
        return Conversation(system=system, turns=tuple(turns), tools=TOOLS if self.tools else ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Prompts of a trace's lengths. Blocks of one name are equal in all prompts."""

    kind: ClassVar[str] = "trace"
    prompts: Prompts
    requests: Sequence[Recorded]
    seed: int

    @property
    def text(self) -> str:
        return f"lengths of a trace of {len(self.requests)} requests"

    def conversation(self, number: int) -> Conversation:
        what = self.requests[number]
        turn = Turn(content=self._content(what, number), output_tokens=what.output_tokens, name=what.topic)
        return Conversation(turns=(turn,))

    def _content(self, what: Recorded, number: int) -> str | list[int]:
        ids: list[int] = []
        words: list[str] = []
        names: Sequence[object] = what.blocks or tuple(
            f"{number}/{block}" for block in range(-(-what.prompt_tokens // BLOCK_TOKENS))
        )
        for name in names:
            rng = _rng(self.seed, "block", name)
            tokens = min(BLOCK_TOKENS, what.prompt_tokens - max(len(ids), len(words)))
            if self.prompts.ids:
                ids += self.prompts.token_ids(rng, tokens)
            else:
                words += self.prompts.words(rng, tokens).split()
        return ids if self.prompts.ids else " ".join(words)
