"""Patterns of config.json: they match what the library's matcher would, and no pattern takes long."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.models.quantised_checkpoints import configure, quantise
from testkit.models.quantisers import FORMATS
from testkit.models.tiny_models import QWEN3, save_model

from services.errors import CheckpointError
from services.model.load_spec import load_spec
from services.model.quantised import patterns
from services.model.quantised.patterns import Budget, Pattern, PatternCostly
from services.model.tensor_entries import tensor_entries

PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.experts.3.up_proj", "mlp.experts.12.down_proj")
NAMES = [f"model.layers.{layer}.{part}" for layer in (0, 12) for part in PARTS]
NAMES += ["lm_head", "model.embed_tokens", "", "model"]
WRITTEN = [
    r".*mlp\.gate$", r".*self_attn.*", r".*\.experts\.\d+\..*", r"model\.layers\.(0|1|2)\..*(q|k|v)_proj.*",
    r"(\w+\.)+experts", r"^(?!.*experts).*", r".*(?<=mlp\.)gate", r"(?P<of>a|m|o)*del", r"(?:\w*\.)*\d{2}\..*",
    r"[^.]+\.[]a-z]+\.\d?.*\bmlp", r".*l{1,2}.*a{0}y.*?e.*", r"(?:model\.layers\.){1}.*[0-9]{1,2}.*\.*", r"x{|.*}",
    r"(?:.*mlp\.gate|lm_head)(?:(?<=\.)|(?=\.|$))", r"\w+.\w+.\d+.(?:mlp|self_attn){1,2}.*\Z", "",
]  # fmt: skip
HOSTILE = [
    r"(a+)+$", r"(.*)*x$", r"(.|.)*y$", r"((.*)*)*z$", r"(((((.+)+)+)+)+)+x$", ".*" * 30 + "!", "(.?)" * 30 + "x$",
    r"(x+x+)+y", r"(\w|\w\w|\.)+!", r"^(([a-z])+.)+[A-Z]([a-z])+$", r"(?=(.+)+x$)",
]  # fmt: skip


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0:
        return draw(st.sampled_from(["a", "b", "ab", ".", "[ab]", "[^a]", r"\w", r"\.", r"\b", "^", "$", "a*", "b+"]))
    inner = expressions(depth - 1)
    kind = draw(st.sampled_from(["both", "either", "times", "few", "ahead", "not"]))
    one = draw(inner)
    if kind == "both":
        return one + draw(inner)
    if kind == "either":
        return f"({one}|{draw(inner)})"
    if kind in ("ahead", "not"):
        return f"(?{'=' if kind == 'ahead' else '!'}{one}){draw(inner)}"
    times = draw(st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{,2}"]))
    return f"(?:{one}){times}{'?' if kind == 'few' else ''}"


@pytest.mark.parametrize("few", [0, 4096], ids=["by itself", "by the library where that is quick"])
@pytest.mark.parametrize("pattern", WRITTEN)
def test_patterns_as_tools_write_them(pattern: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_FEW_WAYS", few)
    found = Pattern(pattern, Budget())
    assert [found.matches(name) for name in NAMES] == [re.match(pattern, name) is not None for name in NAMES]


@given(expressions(), st.text("ab.", max_size=6))
def test_any_pattern_matches_what_the_library_matches(pattern: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patterns, "_FEW_WAYS", 0)
        assert Pattern(pattern, Budget()).matches(text) == (re.match(pattern, text) is not None)


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_hostile_pattern_looks_at_few_places(pattern: str) -> None:
    budget = Budget(600_000)
    found = Pattern(pattern, budget)
    assert not any(map(found.matches, NAMES))


@pytest.mark.parametrize("pattern", [r"(.)\1", r"(?i)LM_HEAD", r"(?<=(a|b)c)d", r"(?>.*)x", r"a++b", r"\x41", "("])
def test_a_pattern_whose_ways_cannot_be_bounded(pattern: str) -> None:
    with pytest.raises(re.error):
        Pattern(pattern, Budget())


def test_a_budget_is_all_patterns_of_a_list_together() -> None:
    budget = Budget(90)
    found = [Pattern(".*" * number + "!", budget) for number in (4, 4, 4)]
    assert not any(pattern.matches("mlp.gate") for pattern in found[:2])
    with pytest.raises(PatternCostly):
        found[2].matches("mlp.gate")


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """The message with which a checkpoint is refused whose config.json has a list or targets of its own."""
    save_model(tmp_path / "plain", QWEN3 | {"moe_intermediate_size": 32})
    folder = quantise(tmp_path / "plain", tmp_path, FORMATS["ct-int4-group"]).folder

    def message(ignore: list[str], targets: tuple[str, ...] = ("Linear",)) -> str:
        config = dict(FORMATS["ct-int4-group"].config)
        group = config["config_groups"]["group_0"] | {"targets": list(targets)}
        configure(folder, config | {"ignore": ignore, "config_groups": {"group_0": group}})
        with pytest.raises(CheckpointError) as error:
            tensor_entries(folder, load_spec(folder))
        assert str(folder) in str(error.value)
        return str(error.value)

    return message


def test_a_list_with_a_hostile_pattern(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'leaves "re:(a+)+$" unquantised' in refused(["re:(a+)+$"])
    monkeypatch.setattr(patterns, "_STEPS", 2_000)
    costly = "re:" + "(.?)" * 100 + "!"
    assert "the patterns in quantization_config take too long" in refused([costly, "lm_head"])
    assert "the patterns in quantization_config take too long" in refused(["lm_head"], (costly,))


def test_a_pattern_with_what_is_not_read(refused: Callable[..., str]) -> None:
    message = refused([r"re:(?i)lm_head"])
    assert r'"re:(?i)lm_head" in quantization_config is not a pattern: (?i) is not read' in message
