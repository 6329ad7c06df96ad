"""The model card: the same records give the same bytes, and what it says is in the records."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from testkit.pocket_evidence import ROOT, script
from testkit.pocket_runs import make_work

from pocket_moe.card_collect import collect
from pocket_moe.card_facts import load_facts, training
from pocket_moe.card_markdown import markdown_table, one_line, prose, rounded_down, shortened
from pocket_moe.card_tables import notices
from pocket_moe.config import POCKET
from pocket_moe.errors import PocketError
from pocket_moe.fingerprint import held, note
from pocket_moe.measure import VARIANTS, claims
from pocket_moe.plots import steps
from pocket_moe.plots_heat import domain_order, expert_order, heat_map, loads
from pocket_moe.plots_lines import loss_curves, peaks
from pocket_moe.records import ExpertTrace, Greedy, load_csv, load_json, save_csv, save_greedy, save_json
from pocket_moe.samples import Sample, save_samples
from pocket_moe.sources import Source
from pocket_moe.traffic import load_record

DOMAINS = ("dictionary", "verse", "perl & co")
TEXT = {
    "documents": {"train": 100, "heldout": 1234},
    "tokens": {"train": 10_000_000, "heldout": 3000},
    "heldout_documents": {"dictionary": 1200, "verse": 30, "perl & co": 4},
}
EXAMPLE = ROOT / "examples/pocket-moe"
HEADER = ("step", "tokens", "lr", "loss", "balance", "peak", "tokens_per_second", "heldout")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a record of every kind."""
    folder, records = tmp_path / "example", tmp_path / "example/records"
    save_json(folder / "model/config.json", POCKET.to_json("bfloat16"))
    for part in ("model", "speculators/0"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "model.safetensors").write_text(part)
    weights = held(folder)
    model = {"weights": {"model": weights["model"]}}
    source = {"package": "dict-wn", "version": "1:3.0-37", "domain": "dictionary", "licence": "WordNet"}
    source |= {
        "notice": "Copyright Princeton University.",
        "documents": 117000,
        "bytes": 12_345_678,
        "licence_text": "",
    }
    save_json(folder / "manifest.json", {"distribution": "Debian 12", "sources": [source]})
    nats = {v.name: dict.fromkeys((*DOMAINS, "all"), 3 + 0.1 * i) for i, v in enumerate(VARIANTS)}
    tokens = dict.fromkeys(DOMAINS, 1000) | {"all": 3000}
    names = {"order": [v.name for v in VARIANTS], "titles": {v.name: v.title for v in VARIANTS}}
    measured = {"length": 512, "tokens": tokens, "nats": nats, "claims": claims(nats)}
    save_json(records / "perplexity.json", measured | names | model)
    save_json(records / "load.json", load_record(skewed()) | model)
    for name in ("experts.npz", "greedy.jsonl", "samples.jsonl", "demo.jsonl"):
        note(records / name, model["weights"])
    accepted = {"alone/0": 0.5, "one_each/1": 0.5, "merged/1": 0.5, "merged/2": 0.61234, "first_alone/1": 0.5}
    shares = {name: dict.fromkeys((*DOMAINS, "all"), share) for name, share in accepted.items()}
    part = {"positions": tokens, "accepted": shares}
    runs = {name: dict.fromkeys((*DOMAINS, "all"), 3.21987 * share) for name, share in accepted.items()}
    own = part | {"runs": {"positions": tokens, "accepted": runs}}
    tried = [{"speculator": 0, "floor": 1.0, "union_aside": 0.5}]
    pool = {"branches": [1, 2, 4], "depth": 4, "bytes": [2_980_000], "weights": weights, "tried": tried}
    save_json(records / "acceptance.json", pool | {"teacher_forcing": part, "own_output": own})
    save_json(records / "text.json", TEXT)
    for name in ("moe", "dense"):
        save_csv(records / f"loss-{name}.csv", HEADER, curve())
    answer = Greedy(
        id="a",
        domain="verse",
        prompt="x",
        prompt_ids=(1,),
        output_ids=(2,),
        text="y",
        margin=0.001798,
        router_margin=1.068e-05,
    )
    save_greedy(records / "greedy.jsonl", [answer])
    written = {"written": "1. One | two.\n2. Three", "expected": "So."}
    prompts = [(kind, f"define: w{index}\n", index > 0) for kind in ("heldout", "known") for index in range(10)]
    samples = [Sample(kind=kind, prompt=prompt, ended=ended, **written) for kind, prompt, ended in prompts]
    save_samples(records / "samples.jsonl", samples)
    demo = Sample(kind="known", prompt="define: lighthouse\n", written="A shed.", expected="A tower.", ended=True)
    save_samples(records / "demo.jsonl", [demo])
    logits = {"answers": 200, "largest_difference": 1.717e-05, "largest_logit": 27.62, "within_1e-5": 141}
    save_json(records / "logits.json", logits | model)
    return folder


def curve() -> list[tuple[object, ...]]:
    steps = range(1, 101)
    rates, heldout = [2e-3 if step < 90 else 1e-4 for step in steps], [4.2 if step % 20 == 0 else "" for step in steps]
    return [
        (step, step * 65536, rate, 9 - 0.05 * step, 1.01, 1.5, 500_000, loss)
        for step, rate, loss in zip(steps, rates, heldout, strict=True)
    ]


def skewed() -> ExpertTrace:
    """Every domain mostly uses experts of its own."""
    rng = np.random.default_rng(0)
    domain = np.repeat(np.arange(3), 200)
    scores = rng.gumbel(size=(600, 2, 16)) + 2.0 * (np.arange(16) // 4 == domain[:, None, None])
    ids = np.sort(np.argsort(-scores, axis=2)[:, :, :4], axis=2).astype(np.uint8)
    return ExpertTrace(
        ids=ids,
        starts=np.arange(0, 601, 200),
        document_domain=np.arange(3, dtype=np.uint8),
        domains=DOMAINS,
        experts=16,
    )


def test_the_card_names_the_runs_that_the_recipe_was_chosen_from(root: Path) -> None:
    before = script("card").render(load_facts(root))["MODEL_CARD.md"]
    recipe = {"steps": 2000, "decay": 0.5, "weight_decay": 0.1, "dictionary": 2}
    runs = [recipe | {"dropout": share, "heldout": 3 + share} for share in (0.2, 0.1)]
    save_json(root / "tried.json", {"moe": runs})
    after = script("card").render(load_facts(root))["MODEL_CARD.md"]
    assert "lowest held-out loss" not in " ".join(before.split())
    assert "| moe | 2 | 2,000 | 0.5 | 0.1 | 0.1 | 3.100 |\n| moe | 2 | 2,000 | 0.5 | 0.2 | 0.1 | 3.200 |" in after


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
    assert script("card").main(["--root", str(root)]) == 0
    text = (root / "MODEL_CARD.md").read_text()
    assert text.startswith("---\nlicense: apache-2.0\n")
    for said in (
        "10.97 million",
        "20.09 | 22.20",
        "2.226 times",
        "0.612",
        "2.98 MB",
        "117,000",
        "12.35",
        "Princeton",
        "| 1,200 | 1,000 |",
        "| 1,234 | 3,000 |",
    ):
        assert said in text, said
    words = " ".join(text.split())
    for said in (
        "`lighthouse` always",
        "neighbours of a held-out section",
        "128 inputs",
        "/usr/share/common-licenses",
        "k tokens at one position: the first two tables are of depth one",
        "Tokens in a row of 4",
        "30 nodes for k = 2, 340 nodes for k = 4",
        'In float32 the answer is "A shed." It reads as a definition and is not the one in the text',
        'it was trained on: "A tower."',
        "never less than 0.00179 in logits",
        "never less than 1.06e-05 in probability",
        "at most 1.7e-05 from the oracle's, where logits reach 28 and a unit in the last place is 1.9e-06; 141 of 200",
        "is 0.20 nats below the held-out one",
    ):
        assert said in words, said
    assert "| all | 1.610 | 1.972 |" in text, "of merged trees the one of a single branch is speculator 0 alone"
    assert "licences in full" not in words
    assert "8-word" not in words
    assert text.count("`define: w") == 20
    assert "1. One \\| two. / 2. Three ..." in text
    assert "vLLM" not in text
    agreed = {"version": "0.25.1", "tokens": 20000, "agree_fp32": 0.987, "agree_bf16": 0.99}
    save_json(root / "records/vllm.json", agreed | {"weights": held(root)})
    assert script("card").main(["--root", str(root)]) == 0
    assert "98.70% of 20,000" in (root / "MODEL_CARD.md").read_text()


def test_what_is_too_like_the_training_text_is_said_to_be_dropped(root: Path) -> None:
    dropped = {"heldout_dropped": {"verse": 1200, "perl & co": 34}, "heldout_most_shared": 0.07}
    save_json(root / "manifest.json", load_json(root / "manifest.json") | dropped)
    assert script("card").main(["--root", str(root)]) == 0
    words = " ".join((root / "MODEL_CARD.md").read_text().split())
    assert "more than 7 % of their 8-word runs with training text were dropped; they were 1,234," in words


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
    (root / "model/model.safetensors").write_text("trained anew")
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


def test_a_training_that_nobody_recorded_is_not_mentioned(root: Path) -> None:
    file = root / "records/acceptance.json"
    save_json(file, load_json(file) | {"tried": []})
    assert script("card").main(["--root", str(root)]) == 0
    assert "kept aside" not in (root / "MODEL_CARD.md").read_text()


def test_the_best_floor_is_named_and_what_the_pool_adds(root: Path) -> None:
    file = root / "records/acceptance.json"
    record = load_json(file)
    floors = [{"speculator": 1, "floor": floor, "union_aside": share} for floor, share in ((0.0, 0.6), (0.25, 0.7))]
    for kind in ("teacher_forcing", "own_output"):
        record[kind]["accepted"]["first_alone/2"] = dict.fromkeys((*DOMAINS, "all"), 0.6)
    save_json(file, record | {"tried": record["tried"] + floors})
    words = " ".join(script("card").render(load_facts(root))["MODEL_CARD.md"].split())
    assert "The best is shipped: the weight 0.25 for speculator 1." in words
    assert "two of the pool hardly more often than among two of speculator 0 alone: at 0.612 against 0.600" in words
    record["own_output"]["accepted"]["first_alone/2"]["all"] = 0.5
    save_json(file, record)
    words = " ".join(script("card").render(load_facts(root))["MODEL_CARD.md"].split())
    assert "two of the pool more often than among two of speculator 0 alone" in words


@pytest.mark.parametrize(
    ("heldout", "said"),
    [
        ({"moe": 4.2, "dense": 4.2}, ""),
        ({"moe": 4.1, "dense": 4.2}, "lacks the moe"),
        ({"moe": 4.2}, "lacks the dense"),
    ],
)
def test_a_shipped_run_has_to_be_among_those_tried(
    root: Path, heldout: dict[str, float], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"steps": 100, "decay": 0.5, "weight_decay": 0.1, "dictionary": 2, "dropout": 0.1}
    save_json(root / "tried.json", {kind: [row | {"heldout": loss}] for kind, loss in heldout.items()})
    assert script("card").main(["--root", str(root)]) == 0
    capsys.readouterr()
    assert script("card").main(["--root", str(root), "--check"]) == (1 if said else 0)
    assert said in capsys.readouterr().err


def test_a_shipped_run_has_to_be_the_best_of_those_tried(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"steps": 100, "decay": 0.5, "weight_decay": 0.1, "dictionary": 2, "dropout": 0.1, "heldout": 4.2}
    shorter = row | {"steps": 50, "heldout": 4.3}
    save_json(root / "tried.json", {"moe": [row, shorter], "dense": [row]})
    assert script("card").main(["--root", str(root)]) == 0
    assert "100 steps in place of 50 gained 0.100 nats" in " ".join((root / "MODEL_CARD.md").read_text().split())
    assert script("card").main(["--root", str(root), "--check"]) == 0
    save_json(root / "tried.json", {"moe": [row, shorter | {"heldout": 4.1}], "dense": [row]})
    assert script("card").main(["--root", str(root)]) == 0
    assert script("card").main(["--root", str(root), "--check"]) == 1
    assert "a better moe run, of 4.1000, than the shipped one of 4.2000" in capsys.readouterr().err
    save_json(root / "tried.json", {"moe": [row | {"steps": 99}], "dense": [row]})
    assert script("card").main(["--root", str(root), "--check"]) == 1
    assert "lacks the moe run of 100 steps that ended at 4.2000" in capsys.readouterr().err


def test_weights_carry_the_words_that_licences_want_on_all_copies(root: Path) -> None:
    manifest = load_json(root / "manifest.json")
    (source,) = manifest["sources"]
    own = source | {"licence": "LicenseRef-X", "licence_text": "Keep this.\n\nAnd this."}
    free = source | {"licence": "LicenseRef-public-domain", "licence_text": "Free."}
    save_json(root / "manifest.json", manifest | {"sources": [own, free, source | {"licence_text": "BSD."}]})
    files = script("card").render(load_facts(root))
    for folder in ("model", "speculators/0"):
        text = files[f"{folder}/README.md"]
        assert text.startswith("---\nlicense: apache-2.0\n---\n")
        assert "> Keep this.\n>\n> And this.\n" in text
        assert "- dict-wn: Copyright Princeton University.\n" in text
        assert "Free." not in text
        assert "BSD." not in text


def test_a_notice_is_one_line_and_comes_once() -> None:
    """With a line break, a dash between years would become a list of its own."""
    long = "Copyright 2010\n- 2022 A.  " + "Changed. " * 90
    sources = [
        {"package": name, "notice": words} for name, words in (("a", long), ("b", "B."), ("c", long), ("b", "B."))
    ]
    first, second = notices(sources).splitlines()
    assert first == "- a, c: Copyright 2010 - 2022 A. " + "Changed. " * 89 + "Changed."
    assert second == "- b: B."


def test_pictures_are_well_formed_and_follow_the_page(root: Path) -> None:
    assert script("card").main(["--root", str(root)]) == 0
    for name in ("loss", "experts", "load"):
        svg = (root / f"plots/{name}.svg").read_text()
        ET.fromstring(svg)
        assert "prefers-color-scheme: dark" in svg
    assert (root / "plots/experts.svg").read_text().count("v12h-12z") == 3 * 2 * 16 + 5


def test_no_held_out_loss_is_cut_off() -> None:
    """Coordinates of a strong line map its losses straight, all inside the window; the faint one leaves it."""
    heldout = [(0.5, 4.0), (1.0, 3.5), (2.0, 3.0)]
    svg = ET.fromstring(loss_curves({"MoE": [(0.1, 9.0), (2.0, 2.5)]}, {"MoE": heldout}))
    kind = "{http://www.w3.org/2000/svg}"
    faint, strong = (
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in svg.iter(f"{kind}polyline")
    )
    window = svg.find(f"{kind}clipPath/{kind}rect")
    assert window is not None
    top = float(window.attrib["y"])
    ys = [y for _, y in strong]
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.2)
    assert min(ys) > top + 5
    assert faint[0][1] < top
    assert next(svg.iter(f"{kind}polyline")).attrib["clip-path"] == "url(#plot)"


def test_a_number_stands_by_what_it_is_of() -> None:
    svg = ET.fromstring(peaks({"domains": ["a"], "peak": {"a": [1.0, 3.0]}, "peak_of_all": [1.0, 1.0]}))
    kind = "{http://www.w3.org/2000/svg}"
    place = {text.text: float(text.attrib["x"]) for text in svg.iter(f"{kind}text")}
    bar, mark = list(svg.iter(f"{kind}rect"))[:2]
    assert place["2.00"] == pytest.approx(float(bar.attrib["x"]) + float(bar.attrib["width"]) - 4, abs=0.2)
    assert place["3.00"] == pytest.approx(float(mark.attrib["x"]) + 6, abs=0.2)


def test_experts_stand_by_the_domain_they_serve() -> None:
    share_DLE = loads(load_record(skewed()))
    assert share_DLE.mean(2) == pytest.approx(np.ones((3, 2)))
    order = expert_order(share_DLE[:, 0])
    assert set(order[:4]) == {0, 1, 2, 3}
    assert sorted(order) == list(range(16))
    assert [int(share_DLE[:, 0, e].argmax()) for e in order] == sorted(int(share_DLE[:, 0, e].argmax()) for e in order)


def test_neighbouring_rows_look_alike() -> None:
    one, other = np.array([2.0, 0.5, 1.0, 1.0]), np.array([0.5, 2.0, 1.0, 1.0])
    assert domain_order(np.stack([one, other, one * 1.01])[:, None]) == [0, 2, 1]


def test_a_cell_is_where_its_domain_and_expert_meet() -> None:
    """a uses expert 3 alone, b expert 1 alone; nobody uses 0 and 2, which stand behind 3."""
    svg = heat_map({"domains": ["a", "b"], "counts": {"a": [[0, 0, 0, 4]], "b": [[0, 4, 0, 0]]}})
    strongest = next(line for line in svg.splitlines() if "area a" in line and "1.00" in line)
    assert 'd="M96 64h12v12h-12zM135 77h12v12h-12z"' in strongest


def test_an_expert_nobody_uses_can_be_drawn() -> None:
    load = {"domains": ["a", "b"], "counts": {"a": [[4, 0, 0, 0]], "b": [[0, 0, 0, 0]]}}
    assert "nan" not in heat_map(load)
    assert "nan" not in peaks(load | {"peak": {"a": [4.0], "b": [0.0]}, "peak_of_all": [4.0]})


def test_round_numbers() -> None:
    assert steps(0, 9, 5) == [0, 2, 4, 6, 8]
    assert steps(2.9, 4.1, 6) == pytest.approx([3.0, 3.2, 3.4, 3.6, 3.8, 4.0])
    assert steps(0, 950, 6) == [0, 200, 400, 600, 800]


def test_a_curve_without_held_out_losses_can_be_drawn() -> None:
    ET.fromstring(loss_curves({"MoE": [(1.0, 9.0), (2.0, 5.0)]}, {"MoE": []}))


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
