"""An example's folder with a record of every kind, small, for its card."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pocket_moe.config import POCKET
from pocket_moe.measure.measure import VARIANTS, claims
from pocket_moe.measure.samples import Sample, save_samples
from pocket_moe.measure.traffic import load_record
from pocket_moe.model.fingerprint import held, note
from pocket_moe.records import ExpertTrace, Greedy, save_csv, save_greedy, save_json

DOMAINS = ("dictionary", "verse", "perl & co")
TEXT = {
    "documents": {"train": 100, "heldout": 1234},
    "tokens": {"train": 10_000_000, "heldout": 3000},
    "heldout_documents": {"dictionary": 1200, "verse": 30, "perl & co": 4},
}
HEADER = ("step", "tokens", "lr", "loss", "balance", "peak", "tokens_per_second", "heldout")


def make_records(folder: Path) -> Path:
    """A folder with a record of every kind."""
    records = folder / "records"
    save_json(folder / "model/config.json", POCKET.to_json("bfloat16"))
    for part in ("model", "speculators/0"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "model.safetensors").write_text(part)
    weights = held(folder)
    model = {"weights": {"model": weights["model"]}}
    source = {"package": "dict-wn", "version": "1:3.0-37", "domain": "dictionary", "licence": "WordNet"}
    source |= {"notice": "Copyright Princeton University.", "licence_text": ""}
    source |= {"documents": 117000, "bytes": 12_345_678}
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
    margins = {"margin": 0.001798, "router_margin": 1.068e-05}
    answer = Greedy(id="a", domain="verse", prompt="x", prompt_ids=(1,), output_ids=(2,), text="y", **margins)
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
