"""Two clients on one server: whose turn it is, the table of both, and what is said where one of them cannot go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from testkit.answering import Asked, answering, reply

from loadgen import common_load
from loadgen.common_load import Figures, Load
from loadgen.served import Served
from perf.server import beside_vllm, trusted_client
from perf.server.trusted_client import Run, difference, main, table

VLLM = """
import json, sys
from pathlib import Path
words = dict(zip(sys.argv[1:], sys.argv[2:]))
result = {"completed": 30, "failed": 0, "request_throughput": 4.4, "output_throughput": 20.0}
result |= {f"p{p}_{name}_ms": 10.0 for p in (50, 99) for name in ("ttft", "tpot", "itl")}
Path(words["--result-dir"], words["--result-filename"]).write_text(json.dumps(result))
"""


def models(*names: str) -> Any:
    body = json.dumps({"data": [{"id": name} for name in names]}).encode()

    def answer(asked: Asked) -> None:
        reply(asked, 200 if asked.path == "/v1/models" else 404, "application/json", body)

    return answering(answer)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Load]:
    """What our client is asked to send; it sends nothing and has figures of its own."""
    found: list[Load] = []

    def send(load: Load, *_: object) -> Figures:
        found.append(load)
        return Figures(completed=load.requests, failed=0, requests_s=4.0, output_tokens_s=20.0, ttft_p50_ms=8.0)

    monkeypatch.setattr(common_load, "send", send)
    return found


def run(url: str, folder: Path, *more: str) -> int:
    (folder / "vllm.py").write_text(VLLM)
    words = ["--client", "vllm", "--tool", f"{sys.executable} {folder / 'vllm.py'}", "--tokenizer", "t"]
    return main([url, *words, "--rates", "2", "inf", "--rounds", "2", "--out", str(folder / "out"), *more])


def test_both_clients_send_each_load_and_stand_side_by_side(
    tmp_path: Path, loads: list[Load], capsys: pytest.CaptureFixture[str]
) -> None:
    with models("pocket") as url:
        assert run(url, tmp_path) == 0
    assert [(load.rate, load.model) for load in loads[1:]] == [(2.0, "pocket"), (None, "pocket")] * 2
    assert len({load.seed for load in loads}) == 5
    shown = capsys.readouterr().out
    assert "| 2/s | requests/s | 4 | 4.4 | +10.0 % * |" in shown
    assert "| all at once | TTFT p50, ms | 8 | 10 | +25.0 % * |" in shown
    assert "| all at once | ITL p99, ms | - | 10 | - |" in shown
    runs = json.loads((tmp_path / "out/trusted_client.json").read_text())["runs"]
    assert [run["client"] for run in runs] == ["loadgen", "vllm"] * 4


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (["pocket"], ["--tool", "/none"], "/none is not installed"),
        (["pocket"], ["--model", "other"], "serves pocket"),
        (["a", "b"], [], "serves a, b"),
        (["pocket"], ["--tool", f"{sys.executable} -c 'exit(4)'"], "vllm ended with 4"),
    ],
)
def test_it_says_why_it_cannot_go_on(
    tmp_path: Path, loads: list[Load], capsys: pytest.CaptureFixture[str], names: list[str], more: list[str], said: str
) -> None:
    with models(*names) as url:
        assert run(url, tmp_path, *more) == 2
    assert said in capsys.readouterr().err
    assert len(loads) <= 2


def test_a_server_that_refuses_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def send(_load: Load) -> Figures:
        return Figures(completed=0, failed=8, requests_s=0, output_tokens_s=0, error="429 full")

    monkeypatch.setattr(common_load, "send", send)
    assert run("http://127.0.0.1:1", tmp_path) == 2
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err
    with models("pocket") as url:
        assert run(url, tmp_path) == 2
    assert "refused 8 of 8 requests, the first with: 429 full" in capsys.readouterr().err


def test_differences_say_whether_rounds_overlap() -> None:
    assert difference([10.0, 11.0], [12.6, 12.6]) == "+20.0 % *"
    assert difference([10.0, 12.0], [11.0, 12.1]) == "+5.0 %"
    assert difference([10.0], [9.0]) == "-10.0 %"
    assert difference([1.0], []) == difference([0.0], [1.0]) == "-"


def test_the_table_has_medians() -> None:
    def of(value: float, turn: int) -> Run:
        figures = Figures(completed=1, failed=0, requests_s=value, output_tokens_s=1.0)
        return Run(server="s", client="c", rate=2.0, round=turn, figures=figures)

    shown = table({"a": [of(1.0, 1), of(9.0, 2), of(2.0, 3)], "b": [of(3.0, 1)]})
    assert shown.splitlines()[0] == "| arrivals | figure | a | b | difference |"
    assert "| 2/s | requests/s | 2 | 3 | +50.0 % |" in shown


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "fast"])
def test_a_rate_is_a_number_above_zero(rate: str) -> None:
    with pytest.raises(SystemExit):
        main(["u", "--tokenizer", "t", "--rates", rate])


def test_both_servers_get_their_options(tmp_path: Path) -> None:
    words = beside_vllm.vllm_command("env PYTHONPATH=/site vllm", tmp_path, 8401, "--max-num-seqs 512")
    assert words[:4] == ["env", "PYTHONPATH=/site", "vllm", "serve"]
    assert words[4:] == [
        *(str(tmp_path), "--served-model-name", "m", "--port", "8401"),
        *("--no-enable-prefix-caching", "--max-num-seqs", "512"),
    ]
    options = beside_vllm.our_options(tmp_path, "--max-num-seqs 448")
    assert "--no-prefix-cache" in options
    assert options[-2:] == ["--max-num-seqs", "448"]


def test_what_was_measured_before_a_server_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object, server: str) -> Iterator[Run]:
        figures = Figures(completed=1, failed=0, requests_s=2.0, output_tokens_s=1.0)
        yield Run(server=server, client="loadgen", rate=None, round=1, figures=figures)
        if server == "vllm":
            raise trusted_client.ServerRefused("no more")

    monkeypatch.setattr(beside_vllm, "server", lambda *_: nullcontext(Served(url="http://127.0.0.1:1", pid=1)))
    monkeypatch.setattr(beside_vllm, "find_server", lambda *_: None)
    monkeypatch.setattr(beside_vllm, "measure", measure)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).touch()
    assert beside_vllm.main([str(tmp_path), "--vllm", sys.executable, "--out", str(tmp_path / "out")]) == 2
    kept = json.loads((tmp_path / "out/beside_vllm.json").read_text())["runs"]
    assert [run["server"] for run in kept] == ["expertmesh", "vllm"]


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_nothing_starts_without_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lacking: str
) -> None:
    for name in {"config.json", "tokenizer.json", "tokenizer_config.json"} - {lacking}:
        (tmp_path / name).touch()
    assert beside_vllm.main([str(tmp_path)]) == 2
    assert f"has no {lacking}" in capsys.readouterr().err
