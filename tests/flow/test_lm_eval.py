"""lm-eval's ``local-completions`` over REST equals its own ``hf`` backend on a small loglikelihood task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit.processes.servers import Server

pytestmark = pytest.mark.night

TOLERANCE = 1e-4
QUESTIONS = [
    ("The sky is", [" blue", " a fish", " heavy"]),
    ("Two and two make", [" four", " five and a half", " green"]),
    ("Ein Leuchtturm weist", [" Schiffen den Weg", " nichts", " 世界"]),
    ("x", ["y", "zzzzzzzz", "?"]),
]


def write_task(folder: Path) -> None:
    """A multiple-choice task made on the spot, in lm-eval's YAML and JSON lines."""
    lines = [json.dumps({"q": q, "choices": choices, "gold": 0}) for q, choices in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    (folder / "pocket.yaml").write_text(
        "task: pocket\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'questions.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{q}}"\ndoc_to_target: "{{gold}}"\ndoc_to_choice: "{{choices}}"\ntarget_delimiter: ""\n'
        "metric_list: [{metric: acc}]\nmetadata: {version: 1}\n"
    )


def loglikelihoods(model: str, model_args: dict[str, Any], folder: Path) -> list[float]:
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
    result = lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=["pocket"],
        task_manager=tasks.TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        batch_size=1,
        device="cpu",
    )
    samples = sorted(result["samples"]["pocket"], key=lambda sample: sample["doc_id"])
    return [float(response[0][0]) for sample in samples for response in sample["resps"]]


def test_local_completions_equals_hf(
    server: Server, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    write_task(tmp_path)
    ours = loglikelihoods(
        "local-completions",
        {
            "model": "tiny",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(tiny),
            "tokenizer_backend": "huggingface",
            "max_length": 512,
            "num_concurrent": 4,
        },
        tmp_path,
    )
    theirs = loglikelihoods("hf", {"pretrained": str(tiny), "dtype": "float32"}, tmp_path)
    assert len(ours) == sum(len(choices) for _, choices in QUESTIONS)
    assert ours == pytest.approx(theirs, abs=TOLERANCE)
    assert len(set(ours)) == len(ours)
