"""Finds the tensors of a checkpoint's folder, by the headers of its files, and checks them against the spec.

In: the folder and the spec. Out: each tensor's file, place, type and shape. No tensor is read, so that a damaged or
foreign checkpoint is refused at once, by processes without torch, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from services.errors import CheckpointError, UnsupportedModel
from services.model.entry_names import text_entries
from services.model.header import DOWNLOAD_AGAIN, FLOATS, TensorEntry, read_header
from services.model.load_spec import INDEX, read_index, unreadable
from services.model.names import LM_HEAD, Shape, dense_shapes, expert_shapes, is_harmless
from services.model.sources import Source, find_sources, unread
from services.model.spec import ModelSpec
from services.model.together import find_together

_SINGLE = "model.safetensors"


def tensor_entries(model_dir: Path, spec: ModelSpec) -> tuple[dict[str, TensorEntry], dict[str, Source]]:
    """Return the tensors in ``model_dir`` by name, and of which of them each weight is made that is stored quantised.

    Raises:
        CheckpointError: files or tensors are missing, damaged, of the wrong shape, or do not belong to the model.
        UnsupportedModel: weights of a type other than floating point in a checkpoint that is not quantised.
    """
    try:
        entries = text_entries(_read_entries(model_dir), spec)
    except OSError as error:
        raise unreadable(model_dir, error) from error
    sources = find_sources(entries, model_dir, spec)
    sources |= find_together(entries, model_dir, spec, sources)
    _check(entries, sources, model_dir, spec)
    return entries, sources


def _check(entries: Mapping[str, TensorEntry], sources: Mapping[str, Source], model_dir: Path, spec: ModelSpec) -> None:
    """Check all tensors but those of ``sources``, which are checked, and refuse those for which there is no place."""
    every_shape = dense_shapes(spec) | expert_shapes(spec)
    expected = {name: shape for name, shape in every_shape.items() if name not in sources}
    known = {stored.name for source in sources.values() for stored in source.parts.values()} | unread(entries, sources)
    if missing := [name for name in expected if name not in entries]:
        raise CheckpointError(
            f"{model_dir} lacks {_listed(missing, 'tensor')} that config.json calls for.",
            hint=_missing_hint(missing),
        )
    places = expected.keys() | known
    if unexpected := [name for name in entries if name not in places and not is_harmless(name, spec)]:
        raise CheckpointError(
            f'{entries[unexpected[0]].file}: the architecture "{spec.family}" as config.json describes it '
            f"has no place for {_listed(unexpected, 'tensor')}.",
            hint="config.json and weights must come from the same checkpoint: download both again.",
        )
    _check_layers_behind(entries, model_dir, spec)
    for name, shape in expected.items():
        _check_tensor(name, entries[name], shape)


def _check_layers_behind(entries: Mapping[str, TensorEntry], model_dir: Path, spec: ModelSpec) -> None:
    """Refuse a layer behind the last one that has the same tensors: it predicts nothing further ahead."""
    last, behind = (
        {name.removeprefix(start) for name in entries if name.startswith(start)}
        for start in (f"model.layers.{spec.num_layers - 1}.", f"model.layers.{spec.num_layers}.")
    )
    if last == behind:
        raise CheckpointError(
            f'{model_dir}: "num_hidden_layers" of config.json is {spec.num_layers}, but the files hold another such '
            f"layer, model.layers.{spec.num_layers}.",
            hint="config.json and weights must come from the same checkpoint: download both again.",
        )


def _check_tensor(name: str, entry: TensorEntry, shape: Shape) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f'{entry.file}: tensor "{name}" has shape {list(entry.shape)}, config.json calls for {list(shape)}.',
            hint="config.json and weights must come from the same checkpoint: download both again.",
        )
    if entry.dtype not in FLOATS:
        raise UnsupportedModel(
            f'{entry.file}: tensor "{name}" is of type {entry.dtype}, which is not supported.',
            hint="Use the checkpoint's float32, bfloat16 or float16 version.",
        )


def _read_entries(model_dir: Path) -> dict[str, TensorEntry]:
    """Return every tensor of the folder's weight files, or, if there is an index, every tensor in it."""
    index = model_dir / INDEX
    if not index.is_file():
        return _merge_headers(_weight_files(model_dir))
    file_of = _read_index(index)
    files = sorted({model_dir / file for file in file_of.values()})
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{model_dir} lacks {_listed(absent, 'file')} that {index.name} names.", hint="Download the missing files."
        )
    headers = {file.name: read_header(file) for file in files}
    if lost := [name for name, file in file_of.items() if name not in headers[file]]:
        raise CheckpointError(
            f'{model_dir / file_of[lost[0]]} has no tensor "{lost[0]}" that {index.name} places there.',
            hint="Download the file and the index again.",
        )
    return {name: headers[file][name] for name, file in file_of.items()}


def _weight_files(model_dir: Path) -> list[Path]:
    if (model_dir / _SINGLE).is_file():
        return [model_dir / _SINGLE]
    files = sorted(model_dir.glob("*.safetensors"))
    if files:
        return files
    if pickled := sorted(model_dir.glob("*.bin")) + sorted(model_dir.glob("*.pt")) + sorted(model_dir.glob("*.pth")):
        raise CheckpointError(
            f"{model_dir} has its weights only in {_listed([file.name for file in pickled], 'file')} of PyTorch's "
            "pickle format, which can run code when it is read.",
            hint="Download the safetensors version, or convert it: load it with transformers and save_pretrained() it.",
        )
    raise CheckpointError(f"{model_dir} has no *.safetensors file.", hint="Download the checkpoint's weights.")


def _merge_headers(files: list[Path]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(
                    f'Both {entries[name].file} and {file} have a tensor "{name}", and there is no {INDEX}.',
                    hint="Keep the files of one checkpoint in the folder, and its index if it has several files.",
                )
            entries[name] = entry
    return entries


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name."""
    try:
        weight_map = json.loads(read_index(path))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not an index of safetensors files: {error!r}.", hint=DOWNLOAD_AGAIN
        ) from error
    # A path in the index must not lead out of the folder.
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise CheckpointError(f'{path}: "weight_map" must map tensor names to file names.', hint=DOWNLOAD_AGAIN)
    return weight_map


def _missing_hint(missing: list[str]) -> str:
    if missing == [LM_HEAD]:
        return 'If the model shares its embedding with the output, set "tie_word_embeddings": true in config.json.'
    return "Download the missing files, or the config.json that belongs to these weights."


def _listed(names: list[str], noun: str) -> str:
    """Return ``3 tensors ("a", "b", "c")``; names beyond the fifth are counted."""
    shown = ", ".join(f'"{name}"' for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''} ({shown}{more})"
