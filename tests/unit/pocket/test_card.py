"""The model card: the same records give the same bytes, and what it says is in the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit.pocket.card import DOMAINS, HEADER, TEXT
from testkit.pocket.evidence import script
from testkit.pocket.runs import make_work

from pocket_moe.card.collect import collect
from pocket_moe.card.facts import load_facts, training
from pocket_moe.card.markdown import markdown_table, one_line, prose, rounded_down, shortened
from pocket_moe.card.tables import notices
from pocket_moe.errors import PocketError
from pocket_moe.model.fingerprint import held
from pocket_moe.readers.sources import Source
from pocket_moe.records import load_csv, load_json, save_csv, save_json

TRIED = {"steps": 100, "decay": 0.5, "weight_decay": 0.1, "dictionary": 2, "dropout": 0.1, "heldout": 4.2}
"""The run that the records are of."""


def edit(root: Path, name: str, **values: Any) -> None:
    save_json(root / name, load_json(root / name) | values)


def page(root: Path, name: str = "MODEL_CARD.md") -> str:
    text: str = script("card").texts(load_facts(root))[name]
    return text


def words(root: Path, name: str = "MODEL_CARD.md") -> str:
    return " ".join(page(root, name).split())


def test_the_card_names_the_runs_that_the_recipe_was_chosen_from(root: Path) -> None:
    assert "lowest held-out loss" not in words(root)
    runs = [TRIED | {"steps": 2000, "dropout": share, "heldout": 3 + share} for share in (0.2, 0.1)]
    save_json(root / "tried.json", {"moe": runs})
    rows = "| moe | 2 | 2,000 | 0.5 | 0.1 | 0.1 | 3.100 |\n| moe | 2 | 2,000 | 0.5 | 0.2 | 0.1 | 3.200 |"
    assert rows in page(root)


def test_the_card_is_written_checked_and_found_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = script("card")
    assert card.main(["--root", str(root), "--check"]) == 1
    assert card.main(["--root", str(root)]) == 0
    assert card.main(["--root", str(root), "--check"]) == 0
    first = (root / "MODEL_CARD.md").read_text()
    assert card.main(["--root", str(root)]) == 0
    assert (root / "MODEL_CARD.md").read_text() == first
    save_json(root / "records/text.json", TEXT | {"documents": {"train": 7}})
    capsys.readouterr()
    assert card.main(["--root", str(root), "--check"]) == 1
    assert capsys.readouterr().err.startswith("MODEL_CARD.md is not")
    (root / "records/load.json").unlink()
    assert card.main(["--root", str(root)]) == 1
    assert "load.json cannot be read" in capsys.readouterr().err


def test_the_card_says_what_the_records_say(root: Path) -> None:
    text = page(root)
    assert text.startswith("---\nlicense: apache-2.0\n")
    for said in (
        "10.97 million",
        "20.09 | 22.20",
        "2.226 times",
        "0.612",
        "2.98 MB",
        "| dictionary | 1,000 | 20.09 | 44.70 |",
        "| all | 3,000 | 20.09 | 44.70 |",
        "| dictionary | dict-wn 1:3.0-37 (WordNet) | 12.35 |",
    ):
        assert said in text, said
    joined = words(root)
    for said in (
        "`lighthouse` always",
        "neighbours of a held-out section",
        "128 inputs",
        "/usr/share/common-licenses",
        "a choice among k tokens at each depth",
        "Tokens in a row of 4",
        "30 nodes for k = 2, 340 nodes for k = 4",
        'In float32 the answer is "A shed." It reads as a definition and is not the one in the text',
        'it was trained on: "A tower."',
        "never less than 0.00179 in logits",
        "never less than 1.06e-05 in probability",
        "at most 1.7e-05 from the oracle's, where logits reach 28 and a unit in the last place is 1.9e-06; 141 of 200",
        "is 0.20 nats below the held-out one",
    ):
        assert said in joined, said
    assert "| all | 1.610 | 1.972 |" in text, "of merged trees the one of a single branch is speculator 0 alone"
    assert "licences in full" not in joined
    assert "8-word" not in joined
    assert text.count("`define: w") == 20
    assert "1. One \\| two. / 2. Three ..." in text
    assert "vLLM" not in text
    agreed = {"version": "0.25.1", "tokens": 20000, "agree_fp32": 0.987, "agree_bf16": 0.99}
    save_json(root / "records/vllm.json", agreed | {"weights": held(root)})
    assert "98.70% of 20,000" in page(root)


def test_what_is_too_like_the_training_text_is_said_to_be_dropped(root: Path) -> None:
    edit(root, "manifest.json", heldout_dropped={"verse": 1200, "perl & co": 34}, heldout_most_shared=0.07)
    assert "more than 7 % of their 8-word runs with training text were dropped: 1,234." in words(root)


@pytest.mark.parametrize(
    ("record", "key", "command"),
    [
        ("perplexity.json", "weights", "evaluate.py"),
        ("acceptance.json", "weights", "speculate.py"),
        ("load.json", "weights", "trace.py --only experts"),
        ("vllm.json", "weights", "agree.py"),
        ("experts.npz", "experts.npz", "trace.py --only experts"),
        ("greedy.jsonl", "greedy.jsonl", "trace.py --only greedy"),
        ("samples.jsonl", "samples.jsonl", "trace.py --only samples"),
        ("demo.jsonl", "demo.jsonl", "trace.py --only demo"),
        ("logits.json", "weights", "trace.py --only logits"),
    ],
)
@pytest.mark.parametrize("said", [{"model": "0" * 64}, {}, None, "damaged"])
def test_a_record_of_other_weights_is_refused(root: Path, record: str, key: str, command: str, said: object) -> None:
    file = root / "records" / ("traced.json" if key == record else record)
    save_json(root / "records/vllm.json", {"weights": held(root)})
    load_facts(root)
    save_json(file, load_json(file) | {key: said})
    with pytest.raises(PocketError, match=rf"{record} was not measured on the model\b") as caught:
        load_facts(root)
    assert caught.value.hint == f"Measure again: python examples/pocket-moe/{command}"


def test_all_records_are_refused_for_another_model(root: Path) -> None:
    (root / "model/model.safetensors").write_text("trained again")
    with pytest.raises(PocketError, match="was not measured on the model"):
        load_facts(root)
    (root / "model/model.safetensors").unlink()
    with pytest.raises(PocketError, match=r"model in .* cannot be read"):
        load_facts(root)


def test_acceptance_is_of_the_speculators_that_are_there(root: Path) -> None:
    (root / "speculators/1").mkdir()
    (root / "speculators/1/model.safetensors").write_text("one more")
    with pytest.raises(PocketError, match=r"acceptance\.json was not measured on the speculators of"):
        load_facts(root)


def test_acceptance_is_shown_for_the_domains_where_the_first_speculator_is_worst_and_best(root: Path) -> None:
    record = load_json(root / "records/acceptance.json")
    for kind, shares in record["teacher_forcing"]["accepted"].items():
        shares |= {"verse": 0.2, "perl & co": 0.7} if kind == "alone/0" else {"verse": 0.9}
    edit(root, "records/acceptance.json", **record)
    assert "| verse | 0.200 | 0.900 |\n| perl & co | 0.700 | 0.612 |\n| all | 0.500 | 0.612 |\n" in page(root)


def test_the_best_floor_is_named_and_what_the_pool_adds(root: Path) -> None:
    file = "records/acceptance.json"
    record = load_json(root / file)
    floors = [{"speculator": 1, "floor": floor, "union_aside": share} for floor, share in ((0.0, 0.6), (0.25, 0.7))]
    for kind in ("teacher_forcing", "own_output"):
        record[kind]["accepted"]["first_alone/2"] = dict.fromkeys((*DOMAINS, "all"), 0.6)
    edit(root, file, **record | {"tried": record["tried"] + floors})
    said = words(root)
    assert "The best is shipped: the weight 0.25 for speculator 1." in said
    assert "two of the pool hardly more often than among two of speculator 0 alone: at 0.612 against 0.600" in said
    assert "kept aside" in said
    record["own_output"]["accepted"]["first_alone/2"]["all"] = 0.5
    edit(root, file, **record | {"tried": []})
    said = words(root)
    assert "two of the pool more often than among two of speculator 0 alone" in said
    assert "kept aside" not in said, "a training that nobody recorded is not mentioned"


@pytest.mark.parametrize(
    ("moe", "dense", "said", "shown"),
    [
        ([{}], [{}], "", ""),
        ([{"heldout": 4.1}], [{}], "lacks the moe", ""),
        ([{}], [], "lacks the dense", ""),
        ([{}, {"steps": 50, "heldout": 4.3}], [{}], "", "100 steps in place of 50 gained 0.100 nats"),
        ([{}, {"steps": 50, "heldout": 4.1}], [{}], "a better moe run, of 4.1000, than the shipped one of 4.2000", ""),
        ([{"steps": 99}], [{}], "lacks the moe run of 100 steps that ended at 4.2000", ""),
    ],
)
def test_a_shipped_run_has_to_be_the_best_of_those_tried(
    root: Path, moe: list[Any], dense: list[Any], said: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {kind: [TRIED | change for change in tried] for kind, tried in (("moe", moe), ("dense", dense)) if tried}
    save_json(root / "tried.json", runs)
    assert script("card").main(["--root", str(root)]) == 0
    assert shown in " ".join((root / "MODEL_CARD.md").read_text().split())
    capsys.readouterr()
    assert script("card").main(["--root", str(root), "--check"]) == (1 if said else 0)
    assert said in capsys.readouterr().err


def test_weights_carry_the_words_that_licences_want_on_all_copies(root: Path) -> None:
    (source,) = load_json(root / "manifest.json")["sources"]
    own = source | {"licence": "LicenseRef-X", "licence_text": "Keep this.\n\nAnd this."}
    free = source | {"licence": "LicenseRef-public-domain", "licence_text": "Free."}
    edit(root, "manifest.json", sources=[own, free, source | {"licence_text": "BSD."}])
    files = script("card").texts(load_facts(root))
    for folder in ("model", "speculators/0"):
        text = files[f"{folder}/README.md"]
        assert text.startswith("---\nlicense: apache-2.0\n---\n")
        assert "> Keep this.\n>\n> And this.\n" in text
        assert "Free." not in text
        assert "BSD." not in text
    assert "- dict-wn: Copyright Princeton University.\n" in files["model/README.md"]
    assert "](../../model/README.md) has the notices" in files["speculators/0/README.md"]


def test_a_speculator_says_how_good_it_is(root: Path) -> None:
    assert "token at 0.500 of positions of held-out text" in words(root, "speculators/0/README.md")


def test_a_notice_is_one_line_and_comes_once() -> None:
    """With a line break, a dash between years would become a list of its own."""
    long = "Copyright 2010\n- 2022 A.  " + "Changed. " * 90
    given = (("a", long), ("b", "B."), ("c", long), ("b", "B."))
    sources = [{"package": name, "notice": notice} for name, notice in given]
    first, second = notices(sources).splitlines()
    assert first == "- a, c: Copyright 2010 - 2022 A. " + "Changed. " * 89 + "Changed."
    assert second == "- b: B."


def test_a_run_is_read_from_its_curve(root: Path) -> None:
    run = training(load_csv(root / "records/loss-moe.csv"))
    assert (run.steps, run.tokens, run.peak_rate, run.last_rate) == (100, 6_553_600, 2e-3, 1e-4)
    assert run.minutes == pytest.approx(6_553_600 / 500_000 / 60)
    assert (run.loss, run.heldout, len(run.heldout_curve)) == (4.0, 4.2, 5)


def test_runs_that_went_on_from_one_another_are_joined(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work")
    for name, count in (("a", 900), ("b", 10)):
        lines = [(i, i * 256, 1e-3, 5, 1, 1, 9, 4 if i == 7 else "", "x") for i in range(1, count + 1)]
        save_csv(work / f"runs/{name}/loss.csv", (*HEADER, "other"), lines)
    with pytest.raises(PocketError, match=r"manifest\.json cannot be read"):
        collect(work, tmp_path / "records", {"moe": ["a", "b"]}, [])
    rows = [{"domain": domain, "package": "p", "licence": "old", "notice": "Old.", "bytes": 7} for domain in ("a", "b")]
    (work / "manifest.json").write_text(json.dumps({"sources": rows}))
    mended = Source(domain="b", package="p", licence="new", notice="New.", format="html", files=[])
    collect(work, tmp_path / "records", {"moe": ["a", "b"]}, [mended])
    curve_rows = load_csv(tmp_path / "records/loss-moe.csv")
    assert 300 < len(curve_rows) < 410
    assert (curve_rows[-1]["step"], curve_rows[-1]["tokens"]) == ("910", str(910 * 256))
    assert [row["step"] for row in curve_rows if row["heldout"]] == ["7", "907"]
    assert "other" not in curve_rows[0]
    text = json.loads((tmp_path / "records/text.json").read_text())
    assert text["documents"]["train"] == 300
    assert text["heldout_documents"].keys() == {"dictionary", "verse"}
    assert sum(text["heldout_documents"].values()) == text["documents"]["heldout"] == 30
    labels = [rows[0], rows[1] | {"licence": "new", "notice": "New."}]
    assert load_json(tmp_path / "manifest.json")["sources"] == labels, "by the list of packages as it is now"


def test_markdown() -> None:
    assert markdown_table([["a", "b"], ["x", "1,000"]]) == "| a | b |\n| --- | ---: |\n| x | 1,000 |\n"
    assert one_line(" a |  b\nc ") == "a \\| b / c"
    assert shortened("one two three", 9) == "one two ..."
    assert [rounded_down(0.00179, 2), rounded_down(1.068e-05), rounded_down(2.0)] == ["0.0017", "1.06e-05", "2"]
    assert max(map(len, prose(*["word"] * 90).splitlines())) <= 120


def test_the_shipped_card_is_what_the_shipped_records_say() -> None:
    assert script("card").main(["--check"]) == 0
