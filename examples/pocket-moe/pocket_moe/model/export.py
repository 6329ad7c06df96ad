"""Our parameters and the hub's layout, there and back: a folder that transformers, vLLM and the server load.

Legend: D hidden size, E experts, F width of an expert.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pocket_moe.config import PocketConfig
from pocket_moe.corpus.shards import tokenizer_sha256
from pocket_moe.errors import PocketError
from pocket_moe.model.model import Options, PocketMoe

WEIGHTS: Final = "model.safetensors"
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
EXPORT_AGAIN: Final = "Export it again: python examples/pocket-moe/train.py --run NAME --export-only"
REMAKE_TOKENIZER: Final = "Make the tokenizer again: python examples/pocket-moe/data.py"
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save(
    model: PocketMoe, tokenizer_dir: Path, out: Path, dtype: str = "bfloat16", *, with_tokenizer: bool = True
) -> None:
    """Write the folder, all or nothing: an old ``out`` is replaced once the new one is complete. A speculator goes
    without a tokenizer of its own: it is loaded beside its target, whose tokens it speaks.

    Raises:
        PocketError: the tokenizer is missing, or knows more tokens than the model.
    """
    if dtype not in DTYPES:
        raise PocketError(f'The dtype "{dtype}" cannot be exported.', hint=f"Choose one of {', '.join(DTYPES)}.")
    _check_tokenizer(tokenizer_dir, model.config)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        part.chmod(0o755)
        _write(model, part, dtype)
        if with_tokenizer:
            _copy_tokenizer(tokenizer_dir, part)
        replace_folder(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    options: Options | None = None,
) -> PocketMoe:
    """The model in ``folder``, in evaluation mode.

    Raises:
        PocketError: a file is missing or damaged, or a tensor does not fit the configuration.
    """
    config = read_config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise PocketError(f"The model in {folder} cannot be read: {error}", hint=EXPORT_AGAIN) from error
    model = PocketMoe(config, options=options)
    try:
        model.load_state_dict(from_hub(config, tensors))
    except (KeyError, RuntimeError) as error:
        raise PocketError(f"The weights in {folder} do not fit its config.json: {error}", hint=EXPORT_AGAIN) from error
    return model.to(device=device, dtype=dtype).eval()


def read_config(folder: Path) -> PocketConfig:
    """Of the model in ``folder``.

    Raises:
        PocketError: ``config.json`` is missing or damaged.
    """
    try:
        return PocketConfig.from_json(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise PocketError(f"The model in {folder} cannot be read: {error}", hint=EXPORT_AGAIN) from error


def require_tokenizer(folder: Path, sha256: str) -> None:
    """That ``folder/tokenizer.json`` is the file that weights were trained with: others of its size mean other words.

    Raises:
        PocketError: it is another one, or missing.
    """
    try:
        found = tokenizer_sha256(folder / "tokenizer.json")
    except (OSError, ValueError) as error:
        raise PocketError(f"The tokenizer in {folder} cannot be read: {error}", hint=REMAKE_TOKENIZER) from error
    if found != sha256:
        raise PocketError(
            f"The tokenizer in {folder} is another one than the weights were trained with: "
            f"its sha256 is {found[:12]}..., not {sha256[:12]}...",
            hint="Put the tokenizer of the training back, or train anew on shards made with this one.",
        )


def to_hub(config: PocketConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters under transformers' names."""
    tensors: dict[str, Tensor] = {}
    for name, hub_names in _names(config):
        value = state[name]
        parts = (
            [matrix for expert in value for matrix in _split(config, name, expert)]
            if value.dim() == 3
            else _split(config, name, value)
        )
        tensors |= {hub: part.contiguous() for hub, part in zip(hub_names, parts, strict=True)}
    return tensors


def from_hub(config: PocketConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of :func:`to_hub`.

    Raises:
        KeyError: a tensor is missing.
    """
    state: dict[str, Tensor] = {}
    for name, hub_names in _names(config):
        parts = [tensors[hub] for hub in hub_names]
        if ".experts." in name:
            each = len(parts) // config.num_experts
            state[name] = torch.stack([torch.cat(parts[i : i + each]) for i in range(0, len(parts), each)])
        else:
            state[name] = torch.cat(parts)
    return state


def replace_folder(new: Path, out: Path) -> None:
    """``new`` takes ``out``'s place. An ``out`` that was there is gone only once the new one is in place."""
    old = out.with_name(f".{out.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _split(config: PocketConfig, name: str, value: Tensor) -> list[Tensor]:
    if name.endswith("attention.qkv"):
        queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        return [value[:queries], value[queries:-keys], value[-keys:]]
    return list(value.chunk(2)) if name.endswith("w_in") else [value]


def _names(config: PocketConfig) -> Iterator[tuple[str, list[str]]]:
    """Each parameter of ours with the tensors on disk that it is made of, in order."""
    yield "embedding", ["model.embed_tokens.weight"]
    yield "norm", ["model.norm.weight"]
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield f"{ours}.attention_norm", [f"{theirs}.input_layernorm.weight"]
        yield f"{ours}.mlp_norm", [f"{theirs}.post_attention_layernorm.weight"]
        yield f"{ours}.attention.qkv", [f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"]
        yield f"{ours}.attention.out", [f"{theirs}.self_attn.o_proj.weight"]
        if config.qk_norm:
            for part in "qk":
                yield f"{ours}.attention.{part}_norm", [f"{theirs}.self_attn.{part}_norm.weight"]
        if not config.sparse:
            yield f"{ours}.mlp.w_in", [f"{theirs}.mlp.{part}_proj.weight" for part in ("gate", "up")]
            yield f"{ours}.mlp.w_out", [f"{theirs}.mlp.down_proj.weight"]
            continue
        experts = [f"{theirs}.mlp.experts.{expert}" for expert in range(config.num_experts)]
        yield f"{ours}.mlp.router", [f"{theirs}.mlp.gate.weight"]
        inner = [f"{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up")]
        yield f"{ours}.mlp.experts.w_in", inner
        yield f"{ours}.mlp.experts.w_out", [f"{expert}.down_proj.weight" for expert in experts]


def _write(model: PocketMoe, out: Path, dtype: str) -> None:
    config = model.config
    state = {name: value.detach().to("cpu", DTYPES[dtype]) for name, value in model.state_dict().items()}
    save_file(to_hub(config, state), out / WEIGHTS, metadata={"format": "pt"})
    (out / WEIGHTS).chmod(0o644)  # safetensors keeps what it writes from other users
    generation = {"do_sample": False, "eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    _write_json(out / "config.json", config.to_json(dtype))
    _write_json(out / "generation_config.json", generation)


def _copy_tokenizer(tokenizer_dir: Path, out: Path) -> None:
    for name in TOKENIZER_FILES:
        if name == "tokenizer.json":  # less than half as large without the spaces
            compact = json.dumps(
                json.loads((tokenizer_dir / name).read_bytes()), ensure_ascii=False, separators=(",", ":")
            )
            (out / name).write_text(compact, encoding="utf-8")
        elif (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, out / name)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _check_tokenizer(folder: Path, config: PocketConfig) -> None:
    try:
        vocabulary = json.loads((folder / "tokenizer.json").read_text())
        added = [token["id"] for token in vocabulary.get("added_tokens", [])]
        largest = max([*vocabulary["model"]["vocab"].values(), *added], default=-1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PocketError(f"The tokenizer in {folder} cannot be read: {error}", hint=REMAKE_TOKENIZER) from error
    if largest >= config.vocab_size:
        raise PocketError(
            f"The tokenizer in {folder} has ids up to {largest}; the model knows {config.vocab_size} tokens.",
            hint=REMAKE_TOKENIZER,
        )
