"""A checkpoint by its id: what is downloaded and in which order, what the cache gives, and what each refusal says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testkit.processes.hub import hub

from services.config import Settings
from services.errors import CheckpointError, ConfigError, UnsupportedModel
from services.model import hub as module
from services.model.hub import HubName, config_folder, hub_name, with_checkpoint

COMMIT = "0123456789" * 4
CONFIG = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
CONFIG |= {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
CONFIG |= {"max_position_embeddings": 32, "num_key_value_heads": 2, "torch_dtype": "float32", "rms_norm_eps": 1e-5}
WEIGHTS = "model.safetensors"
Use = Callable[[str], None]


def _files(**config: Any) -> dict[str, bytes]:
    return {
        "config.json": json.dumps(CONFIG | config).encode(),
        "tokenizer.json": b"{}",
        WEIGHTS: b"weights",
        "consolidated.safetensors": b"twice",
        "original/model.safetensors": b"thrice",
        "pytorch_model.bin": b"pickle",
        ".gitattributes": b"x",
    }


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes a URL the hub, with a cache of this test's own."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def use(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")

    return use


def _settings(name: str = "org/tiny", **values: Any) -> Settings:
    return Settings(model=Path(name), **values)


def _names(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_ids_are_told_from_folders() -> None:
    assert hub_name("Qwen/Qwen3-30B-A3B") == HubName("Qwen/Qwen3-30B-A3B")
    assert hub_name("hf://a/b@v1") == hub_name("hf:/a/b@v1") == HubName("a/b", "v1")
    for path in ("/a/b", "../b", "a", "a/b/c", "~/b", "a/b@", ""):
        assert hub_name(path) is None, path


def test_a_checkpoint_comes_into_the_cache_and_keeps_its_id_as_its_name(use: Use) -> None:
    with hub("org/tiny", COMMIT, _files()) as url:
        use(url)
        settings = with_checkpoint(_settings(revision="main"))
    folder = settings.model
    assert folder is not None
    assert folder.parts[-3:] == ("models--org--tiny", "snapshots", COMMIT)
    assert _names(folder) == ["config.json", WEIGHTS, "tokenizer.json"]
    assert (settings.model_name, settings.revision) == ("org/tiny", None)
    assert with_checkpoint(settings) == settings, "roles get the folder"


def test_a_plan_takes_the_configuration_alone(use: Use, tmp_path: Path) -> None:
    with hub("org/tiny", COMMIT, _files()) as url:
        use(url)
        folder = config_folder(_settings(revision="main"))
    assert folder is not None
    assert _names(folder) == ["config.json"]
    (tmp_path / "here").mkdir()
    assert config_folder(_settings("here")) == Path("here")
    with pytest.raises(ConfigError, match="--revision v1 needs a model of the hub"):
        config_folder(_settings("here", revision="v1"))


def test_what_is_in_the_cache_needs_no_hub(use: Use) -> None:
    with hub("org/tiny", COMMIT, _files()) as url:
        use(url)
        first = with_checkpoint(_settings(served_model_name="mine"))
    assert with_checkpoint(_settings()).model == first.model, "the hub is away"
    assert first.model_name == "mine"


def test_a_gateway_takes_no_weights_where_an_index_names_them(use: Use) -> None:
    index = {"model.safetensors.index.json": b"{}"}
    with hub("org/tiny", COMMIT, _files() | index) as url:
        use(url)
        folder = with_checkpoint(_settings(), weights=False).model
    assert folder is not None
    assert _names(folder) == ["config.json", "model.safetensors.index.json", "tokenizer.json"]


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"quantization_config": {"quant_method": "hqq"}}])
def test_a_model_that_is_not_supported_is_refused_before_its_weights_come(use: Use, config: dict[str, Any]) -> None:
    asked: list[str] = []
    with hub("org/tiny", COMMIT, _files(**config), asked) as url:
        use(url)
        with pytest.raises(UnsupportedModel):
            with_checkpoint(_settings())
    assert any(path.endswith("config.json") for path in asked)
    assert not any(path.endswith(WEIGHTS) for path in asked)


def test_a_model_without_safetensors_is_refused(use: Use) -> None:
    files = {name: content for name, content in _files().items() if not name.endswith(".safetensors")}
    with hub("org/tiny", COMMIT, files) as url:
        use(url)
        with pytest.raises(CheckpointError, match=r"org/tiny has no \*.safetensors file, or it could not be"):
            with_checkpoint(_settings())


@pytest.mark.parametrize(
    ("name", "says", "token"),
    [
        ("org/gated-403", "accepted its terms. Accept them at http.*org/gated-403", True),
        ("org/private-401", "neither a folder org/private-401 here nor a model of that name", True),
        ("org/tiny@v-404", "org/tiny has no revision v-404", False),
        ("org/ill-500", "answered the request for org/ill-500 with status 500", False),
    ],
)
def test_each_refusal_says_what_to_do(use: Use, name: str, says: str, token: bool) -> None:
    with hub("org/tiny", COMMIT, _files()) as url:
        use(url)
        with pytest.raises(CheckpointError, match=says) as refused:
            with_checkpoint(_settings(name))
    assert ("HF_TOKEN" in str(refused.value)) is token
    assert "\n" not in str(refused.value)


def test_a_hub_that_cannot_be_reached_is_not_a_matter_of_tokens(use: Use) -> None:
    use("http://hub.invalid")
    with pytest.raises(CheckpointError, match=r"http://hub.invalid cannot be reached .*Check the network") as refused:
        with_checkpoint(_settings())
    assert "HF_TOKEN" not in str(refused.value)


def test_a_cache_that_stays_offline_says_so(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    use("http://hub.invalid")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        with_checkpoint(_settings())


def test_a_folder_of_that_name_wins(use: Use, tmp_path: Path) -> None:
    use("http://hub.invalid")
    (tmp_path / "org/tiny").mkdir(parents=True)
    assert with_checkpoint(_settings()) == _settings()
    with pytest.raises(ConfigError, match="--revision v1 needs a model of the hub"):
        with_checkpoint(_settings(revision="v1"))
    with pytest.raises(ConfigError, match="both name a revision"):
        with_checkpoint(_settings("org/other@v1", revision="v2"))


def test_a_download_is_logged_where_there_is_no_terminal(
    use: Use, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_NOTE_EVERY_S", 0.001)
    caplog.set_level("INFO")
    with hub("org/tiny", COMMIT, _files()) as url:
        use(url)
        with_checkpoint(_settings())
    assert "downloading org/tiny: 0.0 GB so far" in caplog.text
    assert f"using org/tiny from {Path.cwd()}" in caplog.text
