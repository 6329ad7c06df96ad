"""Finds where each weight of a quantised checkpoint lies, and checks that files and ``quantization_config`` agree.

In: the tensors that the files' headers list, and the spec. Out: for each weight that is stored quantised its format and
tensors. Torch-free; no tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.errors import CheckpointError
from services.model.configfile import CONFIG
from services.model.entry_names import OTHER_PARTS, TEXT_PARTS
from services.model.expert_format import Kind
from services.model.header import FLOATS, TensorEntry
from services.model.names import LM_HEAD, TensorNames, dense_shapes, expert_shapes, is_mtp, linear_shapes
from services.model.quantised.config import KEY
from services.model.quantised.kinds import stored_kind
from services.model.quantised.patterns import Budget, PatternCostly
from services.model.quantised.quantisation import Choice, Match, Names, Quantisation, prefixes
from services.model.quantised.stored import Layout, LinearFormat, Shape
from services.model.spec import ModelSpec

_HINT = "config.json and weights must come from the same checkpoint: download both again."
_WEIGHT = ".weight"
EXPERTS = ".experts."
"""Between the names of a layer and of one of its experts."""
_MIXTRAL = re.compile(r"(\.experts\.\d+\.)(w[123])$")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_HOMES = ((".block_sparse_moe.", ".block_sparse_moe."), (".block_sparse_moe.", ".mlp."))
_SIGNS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks")
"""Ends of names that only quantised checkpoints have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A weight of ``shape`` that is stored quantised, as layer ``module``: what each tensor is for -> the tensor."""

    module: str
    format: LinearFormat
    shape: Shape
    parts: Layout


def find_sources(entries: Mapping[str, TensorEntry], folder: Path, spec: ModelSpec) -> dict[str, Source]:
    """Return the weights that are stored quantised, by name.

    Raises:
        CheckpointError: a layer's tensors are not those of its format, or the config says one thing and files another.
    """
    quantisation = spec.quantisation
    if quantisation is None:
        _refuse_unnamed(entries, folder)
        return {}
    try:
        _check_names(quantisation, folder, spec)
        finder = _Finder(entries, folder, spec, quantisation)
        shapes = linear_shapes(spec)
        return {weight: source for weight, shape in shapes.items() if (source := finder.find(weight, shape))}
    except PatternCostly as error:
        raise CheckpointError(
            f"{folder / CONFIG}: the patterns in {KEY} take too long to match names of layers.",
            hint="Write them with fewer repetitions in each other, or name the layers.",
        ) from error


def kind_of(name: str, entries: Mapping[str, TensorEntry], sources: Mapping[str, Source]) -> Kind | None:
    """Return the form in which the weight called ``name`` can be held as it is stored, if there is one; of experts in
    the order of columns that config.json says."""
    if name not in sources:
        return None
    source = sources[name]
    types = {part: entries[stored.name].dtype for part, stored in source.parts.items()}
    return stored_kind(source.format, source.shape, source.parts, types)


def _holdable(name: str, kind: Kind | None) -> Kind | None:
    """Products of experts alone take columns in an order of their own."""
    return None if kind is not None and kind.ordered and EXPERTS not in name else kind


def promised_kinds(spec: ModelSpec) -> Callable[[str], Kind | None]:
    """Return :func:`kind_of` for names alone, as config.json says that weights are stored, and with scales of 16 bits.
    No file is looked at; an output head of which config.json says nothing else is taken to be left as it is."""
    quantisation = spec.quantisation
    if quantisation is None:
        return lambda _: None
    choice, shapes = Choice(quantisation), linear_shapes(spec)

    def promised(name: str) -> Kind | None:
        module, shape = name.removesuffix(_WEIGHT), shapes[name]
        said, scheme = choice.of(aliases(module, spec.family), free=name == LM_HEAD and not quantisation.heads)
        if said != "quantised" or scheme.problem(shape):
            return None
        layout = scheme.layouts(module, shape)[0].items()
        parts = {part: stored for part, stored in layout if stored.promised or not stored.optional}
        return _holdable(name, stored_kind(scheme, shape, parts, {"scales": "BF16"}))

    return promised


def unread(entries: Mapping[str, TensorEntry], sources: Mapping[str, Source]) -> set[str]:
    """Return the names of tensors that lie beside quantised weights and change none of them."""
    beside = {f"{source.module}{end}" for source in sources.values() for end in source.format.unread}
    caches = {name for name in entries if name.endswith((".k_scale", ".v_scale", ".kv_scale", ".q_scale"))}
    return beside.intersection(entries) | caches


class _Finder:
    def __init__(
        self, entries: Mapping[str, TensorEntry], folder: Path, spec: ModelSpec, quantisation: Quantisation
    ) -> None:
        self._entries, self._folder, self._spec = entries, folder, spec
        self._choice = Choice(quantisation)
        self._plain = {name for name, shape in dense_shapes(spec).items() if len(shape) == 1}
        names = TensorNames(spec.family)
        routers = {name for layer in spec.moe_layers for name in (names.router(layer), names.shared_gate(layer))}
        self._free = routers if quantisation.heads else routers | {LM_HEAD}
        self._by_module: dict[str, list[str]] = {}
        for name in entries:
            self._by_module.setdefault(name.rpartition(".")[0], []).append(name)

    def find(self, weight: str, shape: Shape) -> Source | None:
        """Return None where the weight is stored as it is, or not at all."""
        names = aliases(weight.removesuffix(_WEIGHT), self._spec.family)
        module = next((name for name in names if self._found(name)), names[0])
        fused = [whole for name in names for whole in fused_names(name)]
        said, scheme = self._choice.of(names, free=weight in self._free, fused=fused)
        plain, found = self._entries.get(weight), self._found(module)
        if plain is not None and plain.dtype in FLOATS:
            if said == "quantised" and not scheme.stays(shape):
                raise self._differs(module, scheme, shape)
            return None
        if not found:
            return None  # what is missing is said of all tensors together
        if said in ("left", "outside"):
            raise self._left_but_quantised(module)
        if problem := scheme.problem(shape):
            raise CheckpointError(
                f'{self._folder}: "{module}" of shape {list(shape)} cannot be {scheme.label}: {problem}.', hint=_HINT
            )
        return Source(module=module, format=scheme, shape=shape, parts=self._checked(module, scheme, shape))

    def _checked(self, module: str, scheme: LinearFormat, shape: Shape) -> Layout:
        layout = self._layout(module, scheme, shape)
        there = {
            part: stored
            for part, stored in layout.items()
            if stored.name in self._entries and stored.name not in self._plain  # a bias that the architecture has
        }
        if any(part not in there and not stored.optional for part, stored in layout.items()):
            raise self._differs(module, scheme, shape)
        for stored in there.values():
            entry = self._entries[stored.name]
            if entry.dtype not in stored.types or entry.shape not in stored.shapes:
                raise CheckpointError(
                    f"{entry.file}: {scheme.label} calls for {stored}, found {_shown(entry)}.", hint=_HINT
                )
        return there

    def _layout(self, module: str, scheme: LinearFormat, shape: Shape) -> Layout:
        """Return the layout of which most tensors are there, the usual one where several have as many."""

        def there(layout: Layout) -> int:
            return sum(stored.name in self._entries for stored in layout.values() if not stored.optional)

        return max(scheme.layouts(module, shape), key=there)

    def _differs(self, module: str, scheme: LinearFormat, shape: Shape) -> CheckpointError:
        layout = self._layout(module, scheme, shape)
        wanted = [stored for stored in layout.values() if not stored.optional]
        found = ", ".join(f'"{name}" ({_shown(self._entries[name])})' for name in self._found(module))
        missing = [stored.name for stored in wanted if stored.name not in self._entries]
        lacks = f' and lacks "{missing[0]}"' if missing else ""
        return CheckpointError(
            f'{self._folder}: "{module}" is {scheme.label} by {KEY} of {CONFIG}{lacks}: expected '
            f"{', '.join(map(str, wanted))}, found {found}.",
            hint=_HINT,
        )

    def _left_but_quantised(self, module: str) -> CheckpointError:
        found = ", ".join(f'"{name}" ({_shown(self._entries[name])})' for name in self._found(module))
        return CheckpointError(
            f'{self._folder}: {KEY} of {CONFIG} leaves "{module}" unquantised: expected "{module}{_WEIGHT}" '
            f"({' or '.join(sorted(FLOATS))}), found {found}.",
            hint=_HINT,
        )

    def _found(self, module: str) -> list[str]:
        """Return the tensors that are there for ``module``, less its bias."""
        own = [name for name in self._by_module.get(module, ()) if not name.endswith(".bias")]
        parent, _, part = module.rpartition(".")
        fused = f"{parent.rpartition('.')[0]}.{'down_proj' if part in ('down_proj', 'w2') else 'gate_up_proj'}"
        blocks = [f"{name}{end}" for name in (module, fused) for end in ("_blocks", "_scales")]
        return sorted({*own, *(name for name in blocks if name in self._entries)})


def aliases(module: str, family: str) -> list[str]:
    """Return the names that tools have for ``module``: those of transformers' own modules may differ (Mixtral), and
    files of multimodal families name the text part."""
    if family in TEXT_PARTS:
        begin, instead = TEXT_PARTS[family]
        return [module, *([begin + module.removeprefix(instead)] if module.startswith(instead) else ())]
    if not TensorNames(family).like_mixtral:
        return [module]
    own = _MIXTRAL.sub(lambda found: found[1] + _PARTS[found[2]], module)
    return list(dict.fromkeys(name.replace(of, to) for of, to in _HOMES for name in (module, own)))


def fused_names(module: str) -> list[str]:
    """Return the names of layers in which vLLM, or transformers for all experts of a layer, computes ``module``."""
    parent, _, part = module.rpartition(".")
    whole = _FUSED.get(part)
    found = [f"{parent}.{whole}"] if whole else []
    experts, dot, _ = parent.rpartition(".")
    if dot and experts.endswith(".experts"):
        found.append(f"{experts}.{whole or part}")
    return found


def _check_names(quantisation: Quantisation, folder: Path, spec: ModelSpec) -> None:
    """Raise CheckpointError where the list of layers that stay as they are names none, or a layer that is not there.

    A short name or a pattern that names none is harmless as long as another does: lists are shared between models. An
    empty one is never.
    """
    modules = {name.rpartition(".")[0] for name in (*dense_shapes(spec), *expert_shapes(spec), LM_HEAD)}
    names = {name for module in modules for name in aliases(module, spec.family)}
    known = {part for name in names for part in prefixes(name)}
    known.update(whole for name in names for whole in fused_names(name))
    budget = Budget()
    others = OTHER_PARTS.get(spec.family)
    named = (name for name in quantisation.left if others is None or not f"{name}.".startswith(others))
    left = [name for name in named if not is_mtp(name, spec)]
    missing = [name for name in left if not _names_any(name, quantisation.match, known, budget)]
    wrong = [name for name in missing if _is_path(name) or _is_empty(name)]
    if not missing or (len(missing) < len(left) and not wrong):
        return
    shown = [*wrong, *missing][0]
    raise CheckpointError(
        f'{folder / CONFIG}: {KEY} leaves "{shown}" unquantised, expected the name of a layer, found none of that name '
        f"in the architecture.",
        hint="config.json must come from the same checkpoint as the weights: correct its list, or download it again.",
    )


def _names_any(name: str, match: Match, known: set[str], budget: Budget) -> bool:
    if _is_empty(name):  # as an end or a pattern it would fit all
        return False
    if name in known or name.removesuffix(_WEIGHT) in known:
        return True
    if name.startswith("model.") and _is_path(name):
        return False
    names = Names((name,), match, budget)
    return any(module in names for module in known)


def _is_empty(name: str) -> bool:
    return not name.removeprefix("re:").strip(".")


def _is_path(name: str) -> bool:
    return re.fullmatch(r"\w+(\.\w+)+", name) is not None


def _refuse_unnamed(entries: Mapping[str, TensorEntry], folder: Path) -> None:
    """Raise CheckpointError where files are quantised and config.json does not say so."""
    if name := next((name for name in entries if name.endswith(_SIGNS)), None):
        raise CheckpointError(
            f'{folder}: "{name}" ({_shown(entries[name])}) is of a quantised checkpoint, expected a {KEY} in {CONFIG} '
            "that says how, found none.",
            hint=_HINT,
        )


def _shown(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"
