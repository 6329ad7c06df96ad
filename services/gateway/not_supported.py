"""What OpenAI's API and its relatives have and this server lacks. ``docs/api.md`` lists the same, and a test compares.

Refusals name what a client asked for, not only the field in which it did.
"""

from __future__ import annotations

from services.errors import NotFound, UnsupportedParameter

_SEE = "see docs/api.md#not-supported"
_TOOLS, _STRUCTURE, _BEAMS = "Tool calling", "Structured output", "Beam search"
_REASONING, _DETOKENIZING, _RESTRICTING = "Reasoning control", "Choosing how tokens become text", "Restricting tokens"

PARAMETERS = {
    "allowed_token_ids": _RESTRICTING,
    "audio": "Audio",
    "bad_words": _RESTRICTING,
    "best_of": "Choosing the best of several completions",
    "chat_template": "A chat template of the request's own",
    "continue_final_message": "Continuing the last message",
    "documents": "Passing documents to the chat template",
    "ebnf": _STRUCTURE,
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "guided_choice": _STRUCTURE,
    "guided_decoding_backend": _STRUCTURE,
    "guided_grammar": _STRUCTURE,
    "guided_json": _STRUCTURE,
    "guided_regex": _STRUCTURE,
    "include_obfuscation": "Obfuscation of streams",
    "include_stop_str_in_output": _DETOKENIZING,
    "json_schema": _STRUCTURE,
    "length_penalty": _BEAMS,
    "logits_processors": _RESTRICTING,
    "modalities": "Audio",
    "parallel_tool_calls": _TOOLS,
    "prediction": "Predicted output",
    "prompt_logprobs": "Returning log-probabilities of the prompt alone",
    "reasoning": _REASONING,
    "regex": _STRUCTURE,
    "response_format": _STRUCTURE,
    "skip_special_tokens": _DETOKENIZING,
    "spaces_between_special_tokens": _DETOKENIZING,
    "structured_outputs": _STRUCTURE,
    "suffix": "Inserting before a suffix",
    "thinking": _REASONING,
    "tool_choice": _TOOLS,
    "tools": _TOOLS,
    "truncate_prompt_tokens": "Truncating the prompt",
    "use_beam_search": _BEAMS,
    "verbosity": "Verbosity control",
    "web_search_options": "Web search",
}
"""What a client asks for with a field, by the field's name."""

PARTS = {
    "file": "Files",
    "image_url": "Images",
    "input_audio": "Audio recordings",
    "input_image": "Images",
    "refusal": "Refusals",
    "video_url": "Videos",
}
"""Parts of a message's content, by their type."""

PATHS = (
    "assistants",
    "audio",
    "batches",
    "containers",
    "conversations",
    "embeddings",
    "evals",
    "files",
    "fine_tuning",
    "images",
    "moderations",
    "organization",
    "realtime",
    "rerank",
    "responses",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
)
"""Paths below ``/v1``, by their first name."""


def unsupported(field: str, name: str) -> UnsupportedParameter | None:
    """Returns the refusal of ``field``, a path in the body that ends in ``name``; None where the name is not known."""
    what = PARAMETERS.get(name)
    if what is None:
        return None
    return UnsupportedParameter(f"{what} ({field!r}) is not supported yet; {_SEE}.", param=field)


def unsupported_part(field: str, kind: str) -> UnsupportedParameter | None:
    """Returns the refusal of a part whose type, at ``field``, is ``kind``; None where the type is not known."""
    what = PARTS.get(kind)
    return None if what is None else UnsupportedParameter(f"{what} ({kind!r}) are not supported; {_SEE}.", param=field)


def not_offered(path: str) -> NotFound | None:
    """Returns the refusal of ``path`` where OpenAI's API has it; else None."""
    root, version, name, *_ = [*path.split("/", 3), "", ""]
    if root or version != "v1" or name not in PATHS:
        return None
    return NotFound(f"/v1/{name} is not offered by this server; {_SEE}.")
