"""Where a value comes from, which source wins, and what a mistake in each source says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.config import (
    RENAMED,
    ROLES,
    TOPICS,
    OptionParser,
    Role,
    Settings,
    colocated,
    concerned,
    is_hidden,
    load_layered,
    load_settings,
    mask_url,
    option,
    parse_options,
    require,
    roles_of,
)
from services.config.settings import is_common
from services.config.vllm import ALIASES, POINTERS, SHORT
from services.errors import ConfigError


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mesh.yaml"
    path.write_text(text)
    return str(path)


def _refusal(*argv: str, role: object = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(argv, role=role)  # type: ignore[arg-type]
    return caught.value.message


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _file(tmp_path, "port: 1\nlease: 1\nmax-num-seqs: 1\n")
    monkeypatch.setenv("EXPERTMESH_PORT", "2")
    monkeypatch.setenv("EXPERTMESH_LEASE", "2")
    layered = load_layered(["--config", file, "--port", "3"])
    assert (layered.settings.port, layered.settings.lease, layered.settings.max_num_seqs) == (3, 2.0, 1)
    assert layered.settings.block_size == Settings().block_size
    assert [layered.origin(name) for name in ("port", "lease", "max_num_seqs", "block_size")] == [
        "--port",
        "EXPERTMESH_LEASE",
        file,
        "default",
    ]


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTMESH_CONFIG", _file(tmp_path, "port: 7"))
    assert load_settings([]).port == 7


def test_overrides_beat_everything() -> None:
    assert load_settings(["--port", "1"], overrides={"port": 2}).port == 2


def test_constructed_settings_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTMESH_PORT", "1")
    assert Settings().port == 8000


@pytest.mark.parametrize(
    ("variable", "argv", "name", "value"),
    [
        ("", ["--prefix-cache"], "prefix_cache", True),
        ("", ["--no-prefix-cache"], "prefix_cache", False),
        ("EXPERTMESH_PORT=", [], "port", 8000),
        (
            "EXPERTMESH_METRICS_UPSTREAMS=a=http://x:1/m, b=http://y:2/m",
            [],
            "metrics_upstreams",
            ["a=http://x:1/m", "b=http://y:2/m"],
        ),
    ],
    ids=["true", "false", "an empty variable is not set", "a list is comma-separated"],
)
def test_values_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, variable: str, argv: list[str], name: str, value: object
) -> None:
    if variable:
        monkeypatch.setenv(*variable.split("=", 1))
    assert getattr(load_settings(argv), name) == value


def test_how_tokens_are_drafted_is_json_or_a_mapping_of_the_file(tmp_path: Path) -> None:
    said = load_settings(["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 1}']).speculation
    assert said is not None
    assert (said.num_speculative_tokens, said.shortest, said.longest) == (4, 1, 1)
    file = _file(tmp_path, "speculative_config: {method: ngram, num_speculative_tokens: 7, prompt_lookup_min: 9}")
    written = load_settings(["--config", file]).speculation
    assert written is not None
    assert (written.num_speculative_tokens, written.shortest, written.longest) == (7, 9, 9)
    assert load_settings([]).speculation is None
    model = load_settings(["--speculative-config", '{"method": "draft_model", "model": "a/b"}']).speculation
    assert model is not None
    assert (model.method, model.model, model.num_speculative_tokens) == ("draft_model", "a/b", 4)
    words = '{"method": "draft_model", "model": "a/b", "num_branches": 2, "prompt_lookup_min": 3}'
    merged = load_settings(["--speculative-config", words]).speculation
    assert merged is not None
    assert (merged.num_branches, merged.shortest) == (2, 3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ngram",
        "{}",
        "[]",
        '{"method": "eagle"}',
        '{"method": "ngram", "model": "x"}',
        '{"method": "draft_model"}',
        '{"method": "draft_model", "model": ""}',
        '{"method": "draft_model", "model": "x", "prompt_lookup_min": 2}',
        '{"method": "ngram", "num_speculative_tokens": 0}',
        '{"method": "ngram", "num_speculative_tokens": 17}',
        '{"method": "ngram", "num_branches": 0}',
        '{"method": "ngram", "num_branches": 9}',
        '{"method": "ngram", "num_speculative_tokens": true}',
        '{"method": "ngram", "num_speculative_tokens": "4"}',
        '{"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}',
    ],
)
def test_what_cannot_be_drafted_by_says_what_can(text: str) -> None:
    refusal = _refusal("--speculative-config", text)
    assert refusal.startswith(f"command line: --speculative-config is {text!r}; expected JSON with "), refusal


def test_an_unknown_option_names_the_nearest() -> None:
    assert _refusal("--max-num-seq", "4") == "Unknown option --max-num-seq. Did you mean --max-num-seqs?"
    assert "--por" in _refusal("--por", "1"), "abbreviations are not options"
    assert _refusal("sevre", role="scheduler") == "Unexpected argument 'sevre'. See `expertmesh scheduler --help`."


def test_the_model_may_be_given_without_an_option() -> None:
    for argv in (["m", "--port", "1"], ["--port", "1", "m"], ["--prefix-cache", "m", "--port", "1"]):
        settings = load_settings(argv)
        assert (settings.model, settings.port) == (Path("m"), 1)
    assert load_layered(["m"]).origin("model") == "--model"
    assert load_settings(["m", "--redis-url", "redis://h"], role="gateway").model == Path("m")
    assert _refusal("a", "b") == "Unexpected argument 'b'. See `expertmesh serve --help`."
    assert "model" not in parse_options(OptionParser("queue", "x"), [], ["model"])
    with pytest.raises(ConfigError, match="Unexpected argument 'm'"):
        parse_options(OptionParser("queue", "x"), ["m"], ["model"])
    assert _refusal("a", "--model", "b") == "The model is given twice: 'a' and --model b. Leave one of them out."


def test_a_path_that_can_only_be_a_folder_is_never_an_id_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load_settings(["org/name"]).model == Path("org/name")
    for text in ("./org/name", "org/name/"):
        assert load_settings([text]).model == Path.cwd() / "org/name"
    assert load_settings(["~/name"]).model == Path("/home/me/name")


@pytest.mark.parametrize(
    ("folder", "name"),
    [("m", "m"), ("models--Qwen--Qwen3-30B-A3B/snapshots/0123", "Qwen/Qwen3-30B-A3B"), ("snapshots/0123", "0123")],
)
def test_a_model_is_named_after_its_folder_or_its_place_on_the_hub(tmp_path: Path, folder: str, name: str) -> None:
    assert Settings(model=tmp_path / folder).model_name == name


def test_names_of_vllm_are_taken_where_they_mean_the_same() -> None:
    assert load_settings(["--no-enable-prefix-caching"]).prefix_cache is False
    assert load_settings(["--enable-prefix-caching"]).prefix_cache is True
    assert load_settings(["--num-gpu-blocks-override", "7"]).kv_blocks == 7
    assert load_settings(["--gpu_memory_utilization", "0.5"]).gpu_memory_utilization == 0.5
    assert set(ALIASES.values()) <= set(Settings.model_fields)


def test_underscores_of_an_option_are_dashes() -> None:
    settings = load_settings(["--max_model_len", "7", "--served_model_name=a_b", "--no-prefix_cache"])
    assert (settings.max_model_len, settings.served_model_name, settings.prefix_cache) == (7, "a_b", False)
    assert parse_options(OptionParser("x", "y"), ["--", "--a_b"], [], positional=True)["model"] == "--a_b"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tensor-parallel-size", "2", "m"], "--tensor-parallel-size is not an option here: layers and tensors"),
        (["-tp", "2"], "-tp is not an option here: layers and tensors"),
        (["--kv_cache_memory_bytes=9"], "--kv-memory-gib X."),
        (["--enable-lora"], "LoRA adapters are not supported."),
        (["--no-enable-chunked-prefill"], "leave it out."),
        (["-O3"], "--enforce-eager switches them off."),
    ],
)
def test_other_names_of_vllm_say_what_to_use_here(argv: list[str], says: str) -> None:
    assert says in _refusal(*argv)


def test_what_is_said_of_vllms_names_is_true_of_the_settings() -> None:
    for name, text in POINTERS.items():
        assert name not in Settings.model_fields, f"{option(name)} is one of ours"
        assert text.endswith((".", ").")), text
        for used in re.findall(r"--([a-z-]+)", text):
            assert used.replace("-", "_") in Settings.model_fields, f"{name}: {text}"
        for page in re.findall(r"docs/\S+\.md", text):
            assert (Path(__file__).parents[3] / page).exists(), f"{name}: {text}"
    assert set(SHORT.values()) <= set(POINTERS)


def test_an_api_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTMESH_API_KEY", "sk-hidden-from-you")
    settings = load_settings([])
    assert settings.api_key == "sk-hidden-from-you"
    assert settings.shown()["api_key"] == "***"
    assert "hidden-from" not in repr(settings)
    for key in ("short", "sk-with a space", "sk-größe-12"):
        assert key not in _refusal("--api-key", key)
        assert _refusal("--api-key", key).endswith("expected 8 or more printable ASCII characters without spaces.")
    monkeypatch.setenv("EXPERTMESH_API_KEY", "sk-from-a-file\n")
    assert load_settings([]).api_key == "sk-from-a-file"
    with pytest.raises(ConfigError, match="--api-key has no effect with --auth off"):
        require(load_settings(["--auth", "off", "--workers", "1"]), None)


@pytest.mark.parametrize("text", ["https://a.example,http://b:3000", '["https://a.example", "http://b:3000"]'])
def test_origins_are_a_list_with_commas_or_vllms_json(text: str) -> None:
    assert load_settings(["--allowed-origins", text]).allowed_origins == ["https://a.example", "http://b:3000"]
    assert load_settings(["--allowed-origins", "*"]).allowed_origins == ["*"]
    assert "expected origins such as" in _refusal("--allowed-origins", "https://a.example/path")


def test_an_unknown_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTMESH_MAX_QUEUED_REQUEST", "1")
    assert "Did you mean EXPERTMESH_MAX_QUEUED_REQUESTS?" in _refusal()


def test_an_unknown_key_of_the_file_names_the_nearest(tmp_path: Path) -> None:
    message = _refusal("--config", _file(tmp_path, "blok_size: 16"))
    assert "'blok_size'" in message
    assert "Did you mean block_size?" in message


def test_service_links_of_kubernetes_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"PORT": "tcp://10.0.0.1:80", "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "80"}
    links |= {"PORT_80_TCP": "tcp://10.0.0.1:80", "PORT_80_TCP_ADDR": "10.0.0.1", "PORT_80_TCP_PROTO": "tcp"}
    for name, value in (links | {"SERVICE_PORT_HTTP": "80"}).items():
        monkeypatch.setenv(f"EXPERTMESH_GATEWAY_{name}", value)
    for name in ("PORT", "SERVICE_HOST", "SERVICE_PORT"):
        monkeypatch.setenv(f"EXPERTMESH_{name}", links[name])
    assert load_settings([]) == Settings()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--port", "http"], "command line: --port is 'http'; expected a whole number at least 0 and at most 65535."),
        (["--port", "70000"], "at most 65535"),
        (["--lease", "nan"], "expected a number"),
        (["--request-timeout", "inf"], "expected a number"),
        (["--dtype", "int3"], "expected one of auto, float32, bfloat16, float16"),
        (["--namespace", "{x}"], "expected text matching"),
        (["--redis-url", "http://h"], "expected redis://, rediss://, redis+sentinel:// or unix://"),
        (["--redis-url", "redis://h:port"], "expected redis://"),
        (["--redis-url", "unix://"], "expected redis://"),
        (["--port"], "argument --port: expected one argument"),
        (["--metrics-upstreams", "http://x"], "metrics-upstreams"),
        (["--config", "/none.yaml"], "No such file"),
    ],
)
def test_a_wrong_value_says_where_and_what_instead(argv: list[str], expected: str) -> None:
    assert expected in _refusal(*argv)


def test_a_wrong_value_in_the_environment_is_named_even_if_it_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTMESH_PORT", "x")
    assert _refusal("--port", "1").startswith("environment: EXPERTMESH_PORT is 'x'; expected a whole number")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: yes", "port is True; expected a whole number"),
        ("prefix_cache: 3", "expected true or false"),
        ("served_model_name: 3", "expected text"),
        ("- port", "must be a mapping"),
        ("port: [", "is not YAML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in _refusal("--config", _file(tmp_path, text))


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_settings(["--config", _file(tmp_path, "# nothing\n")]) == Settings()


def test_a_role_takes_the_options_that_concern_it() -> None:
    settings = load_settings(["--model", "m", "--redis-url", "redis://h", "--max-num-seqs", "2"], role="attention")
    assert settings.max_num_seqs == 2
    message = _refusal("--redis-url", "redis://h", "--max-num-seqs", "2", role="scheduler")
    assert message == "--max-num-seqs does not apply to `expertmesh scheduler`. See `expertmesh scheduler --help`."


def test_a_role_reads_past_what_concerns_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTMESH_MAX_NUM_SEQS", "2")
    file = _file(tmp_path, "port: 1\nredis_url: redis://h")
    assert load_settings(["--config", file], role="scheduler").max_num_seqs == 2


def test_a_role_on_its_own_needs_redis_and_perhaps_a_model() -> None:
    assert "--redis-url" in _refusal(role="scheduler")
    assert "--redis-url" in _refusal("--model", "m", role="gateway")
    assert "--model DIR" in _refusal("--redis-url", "redis://h", role="attention")
    assert load_settings(["--redis-url", "redis://h"], role="scheduler").model is None


def test_every_knob_has_help_and_concerns_a_role_or_serve() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert roles_of(name) or "`serve`" in field.description, name
    assert set(concerned(None)) == {name for role in ROLES for name in concerned(role)}
    assert "overlap" in concerned("workers"), "attention and experts may be in separate processes"


def test_there_are_no_more_settings_than_a_reader_can_take_in() -> None:
    """The 81st is how tokens are drafted: users know the option from vLLM."""
    seen = [name for name in Settings.model_fields if not is_hidden(name)]
    assert len(seen) <= 81, "a setting that nobody needs is a constant where it is used"


def test_every_setting_is_under_one_topic() -> None:
    assert [name for names in TOPICS.values() for name in names] == list(Settings.model_fields)


@pytest.fixture
def options_in(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[set[str], list[str]]]:
    """Settings that a help text has options for, and its headings of topics."""

    def read(*argv: str, role: Role | None = None) -> tuple[set[str], list[str]]:
        with pytest.raises(SystemExit):
            load_settings(argv, role=role)
        lines = capsys.readouterr().out.splitlines()
        named = {
            name for name in Settings.model_fields for line in lines if re.match(rf"  {option(name)}( |,|$)", line)
        }
        headings = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z].*[^.]:", line)]
        return named, headings

    return read


def test_help_is_short_and_all_of_it_leaves_out_what_processes_hand_over(
    options_in: Callable[..., tuple[set[str], list[str]]],
) -> None:
    seen = {name for name in Settings.model_fields if not is_hidden(name)}
    assert options_in("--help=all") == (seen, list(TOPICS))
    common = {name for name in Settings.model_fields if is_common(name)}
    assert options_in("--help") == options_in("-h") == (common, list(TOPICS))
    assert 15 <= len(common) <= 25, "as many as a screen or two have room for"
    assert not any(map(is_hidden, common))


@pytest.mark.parametrize("role", [*ROLES, "colocated", "workers"])
def test_the_short_help_of_a_role_has_its_own_options(
    role: Role, options_in: Callable[..., tuple[set[str], list[str]]]
) -> None:
    mine = set(concerned(role))
    assert options_in("--help", role=role)[0] == {name for name in mine if is_common(name)}
    assert options_in("--help=all", role=role)[0] == {name for name in mine if not is_hidden(name)}


@pytest.mark.parametrize("word", ["autoscaling", "Autoscaling", "AUTO"])
def test_help_about_a_topic(word: str, options_in: Callable[..., tuple[set[str], list[str]]]) -> None:
    assert options_in(f"--help={word}") == (
        set(TOPICS["Autoscaling"]) - {"pod", "kubernetes_selector"},
        ["Autoscaling"],
    )


@pytest.mark.parametrize("word", ["--max-num-seqs", "max_num_seqs", "num-seqs"])
def test_help_about_an_option(word: str, options_in: Callable[..., tuple[set[str], list[str]]]) -> None:
    assert options_in(f"--help={word}") == ({"max_num_seqs"}, ["Memory and batching"])


def test_help_about_nothing_that_there_is() -> None:
    assert _refusal("--help=modle") == "No option of `expertmesh serve` has 'modle' in its name. See --help=all."
    assert "'supervisor' in its name" in _refusal("--help=supervisor"), "it is not shown anywhere else, either"


@pytest.mark.parametrize("name", RENAMED)
def test_a_name_of_an_earlier_release_says_what_to_write_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert name not in Settings.model_fields
    wanted = f"is no longer a setting. {RENAMED[name]}"
    assert _refusal(option(name), "1") == f"{option(name)} {wanted}"
    assert _refusal("--config", _file(tmp_path, f"{name}: 1")).endswith(wanted)
    monkeypatch.setenv(f"EXPERTMESH_{name.upper()}", "1")
    assert _refusal() == f"EXPERTMESH_{name.upper()} {wanted}"


def test_what_is_said_instead_is_an_option_that_there_is() -> None:
    for sentence in RENAMED.values():
        for said in re.findall(r"--[a-z-]+", sentence):
            assert said.removeprefix("--").replace("-", "_") in Settings.model_fields, sentence


def test_what_is_derived_follows_what_it_is_derived_from() -> None:
    usual, short = Settings(), Settings(lease=1.0, experts_timeout=0.0)
    assert (usual.gateway_lease, usual.step_timeout, usual.lockstep_timeout) == (30.0, 300.0, 30.0)
    assert (short.gateway_lease, short.step_timeout, short.lockstep_timeout) == (5.0, 60.0, 1.0)
    counts = [Settings(layout="disaggregated", expert_workers=count).disaggregated_experts for count in (None, 0, 3)]
    assert counts == [1, 0, 3]
    assert usual.disaggregated_experts == 0


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:secret@h:1", "redis://:***@h:1"),
        ("rediss://user:sec:ret@h", "rediss://user:***@h"),
        ("redis://:se@cret@h", "redis://:***@h"),
        ("unix:///tmp/s?db=0&password=secret", "unix:///tmp/s?db=0&password=***"),
        (
            "redis+sentinel://u:secret@a:1,b:2/m?sentinel_password=s",
            "redis+sentinel://u:***@a:1,b:2/m?sentinel_password=***",
        ),
    ],
)
def test_passwords_are_masked(url: str, masked: str) -> None:
    assert mask_url(url) == masked
    assert repr(masked) in repr(Settings(redis_url=url))


def test_a_refused_url_does_not_show_its_password() -> None:
    assert "hunter2" not in _refusal("--redis-url", "http://u:hunter2@h")
    with pytest.raises(ValidationError) as caught:
        Settings(redis_url="http://u:hunter2@h")
    assert "hunter2" not in str(caught.value)


def test_the_url_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "url"
    file.write_text("redis://u:hunter2@h:1/0\n")
    layered = load_layered(["--redis-url-file", str(file)])
    assert layered.settings.redis_url == "redis://u:hunter2@h:1/0"
    assert layered.origin("redis_url") == str(file)
    assert "hunter2" not in repr(layered.settings)
    assert load_settings(["--redis-url-file", str(file)], role="scheduler").redis_url_file == file
    monkeypatch.setenv("EXPERTMESH_REDIS_URL", "redis://elsewhere")
    assert load_settings(["--redis-url-file", str(file)]).redis_url == "redis://u:hunter2@h:1/0"
    monkeypatch.setenv("EXPERTMESH_REDIS_URL_FILE", str(file))
    with pytest.raises(ConfigError, match="EXPERTMESH_REDIS_URL and EXPERTMESH_REDIS_URL_FILE both give the address"):
        load_settings([])
    monkeypatch.delenv("EXPERTMESH_REDIS_URL")
    settings = load_settings(["--redis-url", "redis://mine"])
    assert (settings.redis_url, settings.redis_url_file) == ("redis://mine", None)


@pytest.mark.parametrize("text", [None, "", "hunter2", "http://u:hunter2@h", "redis+sentinel://u:hunter2@h:x/m"])
def test_a_file_without_a_url_is_refused_and_not_shown(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "url"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=str(file)) as caught:
        load_settings(["--redis-url-file", str(file)])
    assert "hunter2" not in str(caught.value) + caught.value.message


def test_the_model_is_named_after_its_folder(tmp_path: Path) -> None:
    assert Settings(model=tmp_path / "qwen").model_name == "qwen"
    assert Settings(model=tmp_path / "a" / ".." / "qwen").model_name == "qwen"
    assert Settings(model=tmp_path, served_model_name="x").model_name == "x"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "port": st.integers(0, 65535),
            "lease": st.floats(0.1, 3600),
            "served_model_name": st.text(min_size=1).filter(lambda text: text.isprintable()),
            "prefix_cache": st.booleans(),
            "kv_blocks": st.none() | st.integers(1, 1 << 40),
            "metrics_upstreams": st.lists(st.from_regex(r"\A[a-z]+=http://[a-z]+\Z"), max_size=3),
        },
    )
)
def test_settings_survive_the_file_they_are_handed_over_in(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    written = Settings(**values)  # type: ignore[arg-type]
    file = tmp_path_factory.mktemp("handover") / "x.yaml"
    file.write_text(yaml.safe_dump(written.model_dump(mode="json"), allow_unicode=True), encoding="utf-8")
    assert load_settings(["--config", str(file)]) == written


def test_settings_that_follow_from_the_role_are_fixed() -> None:
    both = colocated(Settings(layout="lockstep", fabric_shared="host"))
    assert (both.layout, both.overlap, both.fabric_lane, both.fabric_shared) == ("colocated", "off", "tcp", "host")
    for asked in ({"overlap": "on"}, {"fabric_lane": "nccl"}, {"expert_slots": 4}):
        with pytest.raises(ConfigError, match="cannot be combined with --layout colocated"):
            colocated(Settings(**asked))  # type: ignore[arg-type]


_SECRET = "--fabric-secret-file f"
_RANKS = f"{_SECRET} --layout lockstep"
_MET = f"{_RANKS} --lockstep-address host:1"
_REMOTE = f"{_SECRET} --layout disaggregated"
_TLS = f"{_SECRET} --fabric-tls-cert c --fabric-tls-key k"
_SEATS = f"{_SECRET} --layout colocated --workers 2"
_SEPARATE = f"{_REMOTE} --expert-workers"


def _load(role: Any, argv: str) -> Settings:
    """Of a role that has a Redis, and a model where it needs one."""
    model = [] if role == "scheduler" else ["--model", "m"]
    return load_settings(["--redis-url", "redis://h", *model, *argv.split()], role=role)


@pytest.mark.parametrize(
    ("role", "argv", "problem"),
    [
        ("attention", _RANKS, "--lockstep-address HOST:PORT"),
        ("attention", f"{_RANKS} --lockstep-address host", "--lockstep-address HOST:PORT"),
        ("attention", f"{_MET} --workers 2 --rank 2", "--rank 2 is out of range for --workers 2"),
        ("attention", f"{_MET} --workers 4 --expert-slices 3", "--expert-slices 3"),
        ("attention", f"{_MET} --overlap on", "has no effect with --layout lockstep"),
        ("attention", "--layout lockstep --lockstep-address host:1", "the secret that all ranks share"),
        ("attention", f"{_MET} --batch-invariant", "--batch-invariant cannot be combined with --layout lockstep"),
        ("attention", "--overlap on", "has no effect with --layout local"),
        ("attention", f"{_REMOTE} --fabric-tls-ca ca --fabric-lane nccl", "--fabric-lane nccl cannot be encrypted"),
        ("experts", f"{_TLS} --fabric-lane nccl", "--fabric-lane nccl cannot be encrypted"),
        ("attention", f"{_REMOTE} --fabric-tls-name a.svc", "--fabric-tls-name .* not encrypted"),
        ("scheduler", "--min-replicas 3 --max-replicas 2", "--min-replicas 3 is more than --max-replicas 2"),
        ("scheduler", "--min-attention 3 --max-attention 2", "--min-attention 3 is more than --max-attention 2"),
        ("scheduler", "--min-gateways 3 --max-gateways 2", "--min-gateways 3 is more than --max-gateways 2"),
        ("colocated", "", "needs the secret that attention and expert workers share"),
        *(
            ("colocated", f"{_SECRET} {name} 1", f"{name} does not apply to `expertmesh colocated`")
            for name in ("--layout", "--workers", "--rank", "--overlap", "--fabric-lane")
        ),
        ("workers", "--workers 0", "There is no worker to start"),
        ("workers", f"{_SEPARATE} 0 --workers 0", "There is no worker to start"),
        ("workers", f"{_SEATS} --expert-workers 1", "does not apply to --layout colocated, which has none"),
        ("workers", "--expert-workers 1", "Add --layout disaggregated"),
        ("workers", "--expert-groups 1", "does not apply to --layout local, which has no shard groups"),
        ("workers", f"{_SEATS} --device cuda:1", "--device cuda:1 would put all workers on one device"),
        ("workers", f"{_SEATS} --fabric-lane nccl", "--fabric-lane nccl cannot be combined with --layout colocated"),
        ("workers", f"{_SEATS} --overlap on", "--overlap on cannot be combined with --layout colocated"),
        ("workers", f"{_SEATS} --metrics-port 65534", "--metrics-port 65534 leaves no room"),
        ("workers", f"{_SEPARATE} 3 --fabric-port 65534", "--fabric-port 65534 leaves no room"),
        ("workers", f"{_SEPARATE} 1 --metrics-port 71 --fabric-port 73", "71 to 73 and seat ports 73 to"),
        ("workers", "--layout lockstep", "have to be started one by one"),
        ("workers", "--rank 1", "--rank does not apply to"),
        ("workers", "--layout disaggregated", "--fabric-secret-file"),
        ("workers", "--layout colocated", "--fabric-secret-file"),
    ],
)
def test_what_does_not_fit_together_is_refused(role: str, argv: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _load(role, argv)


@pytest.mark.parametrize(
    ("role", "argv"),
    [
        ("attention", f"{_REMOTE} --overlap on"),
        ("attention", f"{_REMOTE} --fabric-lane auto --fabric-tls-ca ca --fabric-tls-name a.svc"),
        ("experts", f"{_TLS} --fabric-lane auto"),
        ("scheduler", "--min-replicas 2 --max-replicas 2 --min-attention 2 --max-attention 2"),
        ("scheduler", "--min-gateways 2 --max-gateways 2"),
        ("colocated", f"{_SECRET} --max-num-seqs 7 --expert-group 2"),
        ("workers", f"{_SEATS} --fabric-port 7100"),
        ("workers", "--workers 2 --layout local"),
    ],
)
def test_what_fits_together_is_taken(role: str, argv: str) -> None:
    found, words = _load(role, argv), argv.split()
    taken = {word: str(getattr(found, word[2:].replace("-", "_"))) for word in words[::2]}
    assert taken == dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("role", ["attention", "experts"])
def test_batch_invariant_products_are_of_dense_experts(role: str) -> None:
    words = f"{_REMOTE if role == 'attention' else _SECRET} --batch-invariant"
    assert _load(role, words).held_experts == "dense"
    assert _load(role, f"{words} --expert-format dense").held_experts == "dense"
    with pytest.raises(ConfigError, match="--batch-invariant cannot be combined with --expert-format int4"):
        _load(role, f"{words} --expert-format int4")
    assert _load(role, words.removesuffix(" --batch-invariant") + " --dense-format stored").dense_format == "stored"
    with pytest.raises(ConfigError, match="--batch-invariant cannot be combined with --dense-format stored"):
        _load(role, f"{words} --dense-format stored")


def test_batch_invariant_drafts_do_not_branch() -> None:
    """Keys of a branch lie in other places than those of a decode."""
    words = f"{_REMOTE} --batch-invariant --speculative-config"
    assert _load("attention", f'{words} {{"method":"ngram"}}').speculation is not None
    with pytest.raises(ConfigError, match="--batch-invariant cannot be combined with num_branches"):
        _load("attention", f'{words} {{"method":"ngram","num_branches":2}}')


@pytest.mark.parametrize(("role", "argv"), [("attention", _REMOTE), ("experts", _SECRET), ("colocated", _SECRET)])
def test_where_experts_have_seats_answers_may_be_batch_invariant(role: str, argv: str) -> None:
    assert _load(role, f"{argv} --batch-invariant").batch_invariant
