"""Reads the spec of a model that drafts for another one, and checks that it can. Torch-free.

Drafts are token ids, so both models have to mean the same by each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from services.errors import CheckpointError, ConfigError
from services.model.configfile import CONFIG
from services.model.header import DOWNLOAD_AGAIN
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec

TOKENIZER = "tokenizer.json"
_ANOTHER = 'Set "model" of --speculative-config to a model with the same tokens, or use {"method": "ngram"}.'


def draft_spec(folder: Path, served: ModelSpec, served_folder: Path) -> ModelSpec:
    """Return the spec of the model in ``folder``, which drafts for that in ``served_folder``. Reads no weights.

    Raises:
        ConfigError: there is no model, or one with other tokens, or whose layers cannot draft.
        CheckpointError, UnsupportedModel: it is damaged or not supported.
    """
    if not (folder / CONFIG).is_file():
        lacks = f"has no {CONFIG}" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f'The draft model {folder}, which "model" of --speculative-config names, {lacks}.',
            hint="Give the folder of a checkpoint, with its config.json and *.safetensors files.",
        )
    spec = load_spec(folder, drafts=True)
    if spec.vocab_size != served.vocab_size:
        raise ConfigError(
            f"The draft model {folder} has {spec.vocab_size:,} tokens, and the served model has "
            f"{served.vocab_size:,}: a draft would mean another token.",
            hint=_ANOTHER,
        )
    if spec.recurrent_layers:
        raise ConfigError(
            f'The draft model {folder} ("{spec.family}") has {len(spec.recurrent_layers)} recurrent layers, whose '
            "state cannot go back behind a draft that is rejected.",
            hint='Set "model" of --speculative-config to a model of another family, or use {"method": "ngram"}.',
        )
    _check_tokenizers(folder, served_folder)
    return spec


def check_context(spec: ModelSpec, folder: Path, max_model_len: int) -> None:
    """Raise ConfigError where the draft model in ``folder`` cannot read sequences of ``max_model_len``."""
    if spec.max_position < max_model_len:
        raise ConfigError(
            f"The draft model {folder} has a context of {spec.max_position:,} tokens, and sequences of up to "
            f"{max_model_len:,} are served.",
            hint=f"Give --max-model-len {spec.max_position}, or a draft model with a longer context.",
        )


def _check_tokenizers(folder: Path, served_folder: Path) -> None:
    """Compare what each id means. A draft model without a tokenizer has that of its target, as it says of itself."""
    if not (folder / TOKENIZER).is_file() or not (served_folder / TOKENIZER).is_file():
        return
    ours, theirs = _tokens(served_folder / TOKENIZER), _tokens(folder / TOKENIZER)
    if ours == theirs:
        return
    first = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    raise ConfigError(
        f"The draft model {folder} has another tokenizer: token {first} is {_shown(theirs.get(first))} there and "
        f"{_shown(ours.get(first))} in the served model.",
        hint=_ANOTHER,
    )


def _shown(token: str | None) -> str:
    return "none" if token is None else f"{token!r:.80}"


def _tokens(file: Path) -> Mapping[int, str]:
    """Return what each token id means. Raises CheckpointError."""
    try:
        content = json.loads(file.read_bytes())
        vocab = content["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else ((word, at) for at, (word, _) in enumerate(vocab))
        added = {int(one["id"]): str(one["content"]) for one in content.get("added_tokens") or ()}
        return {int(token): str(word) for word, token in pairs} | added
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a tokenizer: {error!r:.200}.", hint=DOWNLOAD_AGAIN) from error
