"""Reads ``quantization_config`` of a checkpoint's config.json. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable

from services.errors import CheckpointError, UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.quantised import awq, compressed, fp8, gptq, mxfp4
from services.model.quantised.patterns import Budget
from services.model.quantised.quantisation import Match, Quantisation, compiled

KEY = "quantization_config"
_PLAIN_BITS = 16
"""AutoRound lists layers that it left with so many bits, or more."""
METHODS = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "mxfp4")


def read_quantisation(config: ConfigFile, *, experts: int) -> Quantisation | None:
    """Return how the checkpoint is quantised; None if it is not.

    Args:
        experts: how many a layer has.

    Raises:
        CheckpointError: a setting has no meaning.
        UnsupportedModel: the method, or something that it does, is not supported.
    """
    if config.values.get(KEY) is None:
        return None
    own = config.section(KEY)
    readers: dict[str, Callable[[], Quantisation]] = {
        "auto-round": lambda: _auto_round(own),
        "awq": lambda: awq.read(own),
        "compressed-tensors": lambda: compressed.read(own),
        "fp8": lambda: fp8.read(own),
        "gptq": lambda: gptq.read(own),
        "mxfp4": lambda: mxfp4.read(own, experts),
    }
    method = own.text("quant_method", default="none")
    if method not in readers:
        named = "without a quant_method" if method == "none" else f'of quant_method "{method}"'
        raise UnsupportedModel(
            f"{config.path}: quantized checkpoints {named} are not supported ({KEY}).",
            hint=f"Supported are {', '.join(METHODS)}, and the float32, bfloat16 or float16 version.",
        )
    found = readers[method]()
    _check_patterns(found, config)
    return found


def _auto_round(config: ConfigFile) -> Quantisation:
    """AutoRound writes the layouts of others, and says of whom."""
    packing = config.text("packing_format", default="auto_round:auto_gptq")
    kind = config.text("data_type", default="int")
    if not kind.startswith("int"):
        raise UnsupportedModel(f'{config.path}: AutoRound checkpoints of "data_type" "{kind}" are not supported.')
    extra = config.section("extra_config")
    bits = {name: extra.section(name).count("bits", default=config.count("bits")) for name in extra.values}
    left = [name for name, count in bits.items() if count >= _PLAIN_BITS]
    if "awq" in packing:
        if len(left) < len(bits):
            raise UnsupportedModel(f'{config.path}: AWQ with layers of other bits in "extra_config" is not supported.')
        return awq.read(
            ConfigFile(
                config.path,
                {**config.values, "modules_to_not_convert": [*config.strings("modules_to_not_convert"), *left]},
            )
        )
    dynamic = {
        f"{'-:' if name in left else ''}{_pattern(name)}": dict(extra.section(name).values)
        for name in sorted(bits, key=_is_pattern)
    }
    return gptq.read(ConfigFile(config.path, {**config.values, "dynamic": dynamic}))


def _pattern(name: str) -> str:
    """Return AutoRound's name of layers as a pattern: a layer's own name, or one."""
    return name if _is_pattern(name) else f"{re.escape(name)}$"


def _is_pattern(name: str) -> bool:
    return re.fullmatch(r"[\w.]+", name) is None


def _check_patterns(found: Quantisation, config: ConfigFile) -> None:
    budget = Budget()
    lists: list[tuple[Match, tuple[str, ...]]] = [("names", group.targets) for group in found.groups]
    for match, names in ((found.match, found.left), *lists):
        for name in names:
            try:
                if match == "parts" or name.startswith("re:"):
                    compiled(name, match, budget)
            except (re.error, RecursionError, OverflowError) as error:
                raise CheckpointError(
                    f'{config.path}: "{name[:80]}" in {KEY} is not a pattern: {error}.', hint="Correct the file."
                ) from error
