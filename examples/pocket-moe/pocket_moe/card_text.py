"""Facts in, the model card out. Every number comes from a record; the words around it are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pocket_moe.card_facts import Facts
from pocket_moe.card_markdown import markdown_table, prose
from pocket_moe.card_tables import acceptance_rows, notices, run_rows, sample_rows, source_rows, tried_rows
from pocket_moe.config import PocketConfig
from pocket_moe.dense import dense_like
from pocket_moe.drafts_runs import tree_nodes
from pocket_moe.measure import ALL, table

_NAME: Final = "expertmesh-pocket-moe"
_GROUP: Final = 128  # inputs to one scale, of the quantisations in measure.py
_FRONT: Final = """---
license: apache-2.0
language:
- en
library_name: transformers
pipeline_tag: text-generation
tags:
- mixture-of-experts
- qwen3_moe
---
"""
_USE: Final = f"""## Use

```
expertmesh serve --model examples/pocket-moe/model --served-model-name {_NAME}
```

```python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.completions.create(
    model="{_NAME}", prompt="define: lighthouse\\n", max_tokens=48, temperature=0
)
print(answer.choices[0].text)
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "examples/pocket-moe/model"
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
prompt = tokenizer("define: lighthouse\\n", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=48)[0]))
```

A line feed ends the word to define; a chat message that is one term gets it from the template.
"""
_LIMITS: Final = """## Limits

- It makes things up, fluently. Definitions of words it never saw are guesses from their spelling.
- English only, in the words of its sources: a dictionary, old verse, satire, jargon, manuals. They are of their time.
- No instructions, no conversation: the chat template makes a prompt of the last message alone.
"""


def card(facts: Facts) -> str:
    sections = [_intro(facts), _USE, _training(facts), _perplexity(facts), _experts(facts), _outputs(facts)]
    return "\n".join([_FRONT, *sections, _speculators(facts), _checks(facts), _sources(facts), _LIMITS])


def _intro(facts: Facts) -> str:
    config, dense = facts.config, dense_like(facts.config)
    heads = f"{config.num_attention_heads} heads over {config.num_key_value_heads} keys of {config.head_dim}"
    rows = [
        ["", ""],
        ["layers", f"{config.num_hidden_layers} (`{config.model_type}`), hidden size {config.hidden_size}, {heads}"],
        ["experts", f"{config.num_experts} a layer, {config.width} wide; softmax chooses {config.num_experts_per_tok}"],
        ["vocabulary", f"{config.vocab_size:,} entries of byte-level BPE, tied embeddings"],
        ["size", f"{config.parameters() * 2 / 1e6:.1f} MB in bfloat16"],
        ["context", f"{config.max_position_embeddings:,} positions"],
        ["dense rival", f"one network as wide as a token's experts: {_millions(dense.parameters())} parameters"],
    ]
    text = prose(
        f"A pocket reference: a Mixture-of-Experts language model of {_millions(config.parameters())} parameters, of",
        f"which {_millions(facts.active)} work on a token. Given `define: WORD` it writes a definition; it continues",
        "prose, verse and documentation. It exists so that a server of such models has something real to serve: load,",
        "quantisation and speculation can be measured on it. Do not look anything up in it that matters.",
    )
    return f"# {_NAME}\n\n{text}\n{markdown_table(rows)}"


def _training(facts: Facts) -> str:
    moe, text = facts.moe, facts.text
    held = text["tokens"]["train"]
    how = prose(
        "AdamW on packed documents, with float32 masters; the experts run forward and backward through this",
        "repository's own kernels. Every token reaches all experts that its router chose: none is dropped. A balance",
        f"loss keeps routers from settling on few experts: at the end it is {moe.balance:.3f}, where 1 is even, and in",
        f"a batch the busiest expert of a layer has {moe.peak:.2f} times the mean load. There are {held:,} tokens in",
        f"{text['documents']['train']:,} documents; training read {moe.tokens / max(1, held):.1f} times as many.",
    )
    units = prose(
        "Minutes are those of the steps. Losses are in nats per token, the held-out one over a part of that split."
    )
    rows = run_rows({"this model": moe, "dense rival": facts.dense})
    curves = "![loss curves](plots/loss.svg)\n"
    return f"## Training\n\n{how}\n{markdown_table(rows)}\n{units}\n{_recipe(facts)}{curves}"


def _recipe(facts: Facts) -> str:
    if not facts.tried:
        return ""
    text = prose(
        "Dropout and weight decay are, for each of the two, those of the run with the lowest held-out loss. These were",
        "tried, those of equal steps on the same tokens; the rest of the recipe was settled on another draw of",
        "held-out documents:",
    )
    return f"{text}\n{markdown_table(tried_rows(facts.tried))}\n"


def _perplexity(facts: Facts) -> str:
    record = facts.perplexity
    ratios, lost = record["claims"]["ratio_over_fp32"], record["claims"]["dense_wins_in"]
    where = f"the dense model is as good or better in {', '.join(lost)}" if lost else "it is higher in every domain"
    what = prose(
        "Per token of the held-out split: 2 % of documents, headwords for the dictionary, in rows of",
        f'{record["length"]} tokens; "all" is over all tokens. fp32 and bf16 are the arithmetic; the weights are the',
        "shipped ones. int8 and int4 are the experts, symmetric and without calibration, with one scale per output",
        "channel or per group of 128 inputs, among bf16 layers.",
        *_groups(facts.config),
        "Permuted: in each layer expert p(e) works where e was",
        "chosen, p fixed and without a fixed point. Random: experts are drawn evenly for every token, weights kept.",
    )
    result = prose(
        f"The dense rival's perplexity is {ratios['dense']:.3f} times that of this model in fp32; {where}. Permuted",
        f"experts make it {ratios['deranged']:.2f} times as high, random ones {ratios['random']:.2f} times.",
    )
    split = prose(
        "The split is by document, and a document is an entry, a chapter or a section of a page: neighbours of a",
        "held-out section may be trained on.",
        *_dropped(facts.manifest),
        "`lighthouse` always stands in the training split, because the demo asks for it.",
    )
    return f"## Perplexity\n\n{markdown_table(_perplexity_rows(facts))}\n{what}\n{split}\n{result}"


def _perplexity_rows(facts: Facts) -> list[list[str]]:
    """The table of the record, with the number of a domain's held-out documents as its second column."""
    documents = facts.text["heldout_documents"]
    counts = documents | {ALL: sum(documents.values())}
    (header, *rows) = table(facts.perplexity)
    return [[header[0], "documents", *header[1:]], *([row[0], f"{counts[row[0]]:,}", *row[1:]] for row in rows)]


def _dropped(manifest: Mapping[str, Any]) -> list[str]:
    """Nothing for a manifest that does not say."""
    if not {"heldout_dropped", "heldout_most_shared"} <= manifest.keys():
        return []
    most, count = manifest["heldout_most_shared"], sum(manifest["heldout_dropped"].values())
    return [
        f"Held-out documents that share more than {100 * most:g} % of their 8-word runs with training text were",
        f"dropped; they were {count:,}, and `manifest.json` counts them by domain.",
    ]


def _groups(config: PocketConfig) -> list[str]:
    """Where a group is as long as all of ``w_out``'s inputs, it says so."""
    if config.width > _GROUP:
        return []
    return [f"`w_out` has {config.width} inputs, so groups of {_GROUP} and per channel differ only in `w_in`."]


def _experts(facts: Facts) -> str:
    load = facts.load
    peaks = {name: sum(layers) / len(layers) for name, layers in load["peak"].items()}
    even, uneven = (choose(peaks, key=lambda name: peaks[name]) for choose in (min, max))
    together = sum(load["peak_of_all"]) / len(load["peak_of_all"])
    text = prose(
        f"Of {sum(load['tokens'].values()):,} held-out tokens, from every domain as many as it has up to an equal",
        f"share. With all of them together the busiest expert of a layer has {together:.2f} times the mean load; with",
        f"one domain alone from {peaks[even]:.2f} ({even}) to {peaks[uneven]:.2f} ({uneven}), as means over layers.",
        "`records/experts.npz` holds every choice, to be replayed with `pocket_moe.records.ExpertTrace`.",
    )
    pictures = "![experts by domain](plots/experts.svg)\n\n{}\n![max over mean load](plots/load.svg)\n"
    return "## Who uses which experts\n\n" + pictures.format(text)


def _outputs(facts: Facts) -> str:
    unseen, known = ([sample for sample in facts.samples if sample.kind == kind] for kind in ("heldout", "known"))
    how = prose(
        "The first ten headwords of a seeded shuffle of each split; greedy, by the float32 oracle. A slash is a line's",
        "end; three dots end an answer that was cut off and a source that is longer.",
    )
    return (
        f"## {len(facts.samples)} outputs, not selected\n\n{how}\nHeadwords it never saw:\n\n"
        f"{markdown_table(sample_rows(unseen))}\nHeadwords it was trained on:\n\n{markdown_table(sample_rows(known))}"
    )


def _speculators(facts: Facts) -> str:
    record = facts.acceptance
    sizes = ", ".join(f"{size / 1e6:.2f}" for size in record["bytes"])
    tried = [
        f"{row['union_aside']:.4f} with speculator {row['speculator']} at {row['floor']:g}" for row in record["tried"]
    ]
    how = prose(
        f"`speculators/` holds dense llamas with the same tokenizer ({sizes} MB in bfloat16), boost-tuned: the first",
        "learned the target's greedy token at every position of training text and of the target's own continuations;",
        "each other one went on from the first, with positions that earlier ones predict at a lower weight.",
        *([f"The union's acceptance on rows kept aside, by that weight: {'; '.join(tried)}."] if tried else []),
    )
    ways = prose(
        "One each, k: the first choices of the first k speculators. Merged, k: k different tokens of the whole pool,",
        "everyone's first choice before everyone's second. First alone, k: the k best of speculator 0. A tree of k",
        "branches holds k tokens at one position: the first two tables are of depth one.",
    )
    text = prose("How often the target's greedy token is among those, at each position of the held-out text:")
    own = prose(
        "And where the text is the target's own greedy continuation of beginnings of held-out documents, as it is when",
        "the target is served:",
    )
    forced, written = (markdown_table(acceptance_rows(record[kind])) for kind in ("teacher_forcing", "own_output"))
    return f"## Speculators\n\n{how}\n{ways}\n{text}\n{forced}\n{own}\n{written}\n{_in_a_row(record)}"


def _in_a_row(record: Mapping[str, Any]) -> str:
    depth, wide = record["depth"], [branches for branches in record["branches"] if branches > 1]
    nodes = ", ".join(f"{tree_nodes(branches)} nodes for k = {branches}" for branches in wide)
    text = prose(
        f"Tokens in a row of {depth}, on that output: how many tokens of a draft of {depth} the target takes before",
        f"the first wrong one, as a mean over all positions with {depth} tokens of the same text behind them; the",
        f"token that the target adds itself does not count. One each, k: the longest of k drafts, {depth} tokens each.",
        "Merged and first alone, k: a choice among k tokens at each depth, for which a whole tree has",
        f"{nodes}; a smaller tree gets less.",
    )
    return f"{text}\n{markdown_table(acceptance_rows(record['own_output']['runs']))}"


def _checks(facts: Facts) -> str:
    greedy = prose(
        f"`records/greedy.jsonl` has {facts.prompts} prompts with the oracle's greedy answers for a whole server to",
        f"repeat. No choice of a token on their way is closer than {facts.smallest_margin:.1g} in logits.",
    )
    agreement = facts.agreement
    if agreement is None:
        return f"## Checks\n\n{greedy}"
    vllm = prose(
        f"vLLM {agreement['version']} serves the folder unchanged. In bfloat16, under teacher forcing, its greedy",
        f"token is the float32 oracle's at {agreement['agree_fp32']:.2%} of {agreement['tokens']:,} held-out tokens,",
        f"and our own bfloat16's at {agreement['agree_bf16']:.2%}.",
    )
    return f"## Checks\n\n{greedy}\n{vllm}"


def _sources(facts: Facts) -> str:
    sources = facts.manifest["sources"]
    text = prose(
        f"Packages of {facts.manifest['distribution']}; text cleaned and without duplicates. `manifest.json` has the",
        "words of each licence as the package's copyright file has them: in full, or a notice that refers to the full",
        "text in `/usr/share/common-licenses` of a Debian system.",
    )
    return f"## Sources\n\n{text}\n{markdown_table(source_rows(sources))}\nNotices:\n\n{notices(sources)}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} million"
