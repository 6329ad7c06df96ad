"""`expertmesh demo`: serves the pocket model, asks it for a completion, and keeps serving."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx

from services.config import Layered, Settings
from services.errors import ExpertMeshError, PortInUse
from services.supervisor import check_port, serve

POCKET_MODEL = Path(__file__).parents[2] / "examples/pocket-moe/model"
"""Trained on real text. It comes with the repository and with a wheel."""
POCKET_NAME = "pocket-moe"
RANDOM_MODEL = Path(".cache/demo-model")
_POCKET_PROMPT = "define: violinist\n"
_PROMPT = "A lighthouse is"
_MAX_TOKENS = 60


def run_demo(layered: Layered) -> int:
    """Serves until Ctrl-C. Returns the exit code."""
    settings = layered.settings
    changes: dict[str, object] = {}
    if settings.model is None:
        changes["model"] = model = _demo_model()
        if model == POCKET_MODEL and settings.served_model_name is None:
            changes["served_model_name"] = POCKET_NAME
    if layered.origin("port") == "default":
        changes["port"] = _port(settings)
    if layered.origin("log_level") == "default":
        changes["log_level"] = "warning"  # the streamed text has the terminal to itself
    effective = settings.model_copy(update=changes)

    async def show(url: str, key: str | None) -> None:
        await _stream_completion(url, key, effective.model_name, prompt_for(effective.model))

    return serve(effective, on_ready=show)


def _demo_model() -> Path:
    """Returns the pocket model or, where it is missing, one with random weights, made once."""
    if (POCKET_MODEL / "config.json").exists():
        return POCKET_MODEL
    if not (RANDOM_MODEL / "config.json").exists():
        from services.demo.checkpoint import make_demo_model

        print(f"making a model with random weights in {RANDOM_MODEL} ...", flush=True)
        make_demo_model(RANDOM_MODEL)
    return RANDOM_MODEL


def prompt_for(model: Path | None) -> str:
    """Returns a prompt that the pocket model was trained for, or one that any model can continue."""
    return _POCKET_PROMPT if model == POCKET_MODEL else _PROMPT


def _port(settings: Settings) -> int:
    """Returns the default port, or a free one where that is taken."""
    try:
        return check_port(settings.host, settings.port)
    except PortInUse:
        return check_port(settings.host, 0)


async def _stream_completion(url: str, key: str | None, model: str, prompt: str) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0, "stream": True}
    headers = {"Authorization": f"Bearer {key or os.environ.get('OPENAI_API_KEY', 'none')}"}
    print(f"\n{prompt}", end="", flush=True)
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=None, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith(("data: {", "{")):
                print(_text(json.loads(line.removeprefix("data: "))), end="", flush=True)
    print(f"\n\n{invitation(url, model, prompt, needs_key=key is not None)}", flush=True)


def _text(answer: dict[str, Any]) -> str:
    if "error" in answer:
        raise ExpertMeshError(f"The demo got no completion: {answer['error']['message']}")
    return str(answer["choices"][0]["text"])


def invitation(url: str, model: str, prompt: str, *, needs_key: bool = False) -> str:
    """Returns the text that says how to go on by hand."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": True})
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return (
        f"Try it yourself:\n\n  curl -N {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'\n\n"
        f"API at {url}/docs, metrics at {url}/metrics. Ctrl-C stops the server."
    )
