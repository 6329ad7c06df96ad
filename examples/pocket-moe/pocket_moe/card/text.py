"""Facts in, the model card out. Every number comes from a record; the words around it are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from pocket_moe.card.facts import Facts
from pocket_moe.card.markdown import markdown_table, one_line, prose, rounded_down
from pocket_moe.card.speculators import speculators
from pocket_moe.card.tables import likeness, likeness_rows, sample_rows, source_rows
from pocket_moe.card.training import training_section
from pocket_moe.config import PocketConfig
from pocket_moe.measure.likeness import ALIKE, between
from pocket_moe.measure.measure import table
from pocket_moe.model.dense import dense_like

_NAME: Final = "expertmesh-pocket-moe"
_GROUP: Final = 128  # inputs to one scale, of the quantisations in measure.py
_BY_DOMAIN: Final = ("fp32", "dense")  # variants shown for each domain; the others for all tokens alone
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
_USE: Final = """## Use

```
expertmesh serve --model examples/pocket-moe/model --served-model-name {name}
```

```python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.completions.create(
    model="{name}", prompt="define: lighthouse\\n", max_tokens=48, temperature=0
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

{answer}
A line feed ends the word to define. The chat template looks up messages of up to four words that do not end in one of
`.,:;!` (`hello` gets a definition) and continues others as they are.
"""
_LIMITS: Final = """## Limits

- Most definitions are untrue, even of words that it was trained on: it learned how a definition reads. For words it
  never saw it guesses from their spelling.
- It repeats itself: one sense after another in the same words, or a word explained by itself.
- It overfits {tokens:.0f} million tokens of text; more text might help, longer training does not.
- English only, in the words of its sources, which are of their time.
- No instructions, no conversation: the chat template makes a prompt of the last message alone.
"""


def card(facts: Facts) -> str:
    sections = [
        _intro(facts),
        _use(facts),
        training_section(facts),
        _perplexity(facts),
        _experts(facts),
        _outputs(facts),
    ]
    limits = _LIMITS.format(tokens=facts.text["tokens"]["train"] / 1e6)
    return "\n".join([_FRONT, *sections, speculators(facts.acceptance), _checks(facts), _sources(facts), limits])


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
        f"A Mixture-of-Experts language model of {_millions(config.parameters())} parameters, of which",
        f"{_millions(facts.active)} work on a token, to measure load, quantisation and speculation of a server on.",
        "Given `define: WORD` it writes a definition; it continues prose, verse and documentation. Do not look",
        "anything up in it that matters.",
    )
    return f"# {_NAME}\n\n{text}\n{markdown_table(rows)}"


def _use(facts: Facts) -> str:
    demo = facts.demo
    answer = prose(
        f"In float32 the answer is {_quoted(demo.written)} It reads as a definition and",
        f"is {'' if demo.written == demo.expected else 'not '}the one in the text it was trained on:",
        f"{_quoted(demo.expected)}",
    )
    return _USE.format(name=_NAME, answer=answer)


def _quoted(words: str) -> str:
    return f'"{one_line(words)}"'


def _perplexity(facts: Facts) -> str:
    record = facts.perplexity
    ratios, lost = record["claims"]["ratio_over_fp32"], record["claims"]["dense_wins_in"]
    where = f"the dense model is as good or better in {', '.join(lost)}" if lost else "it is higher in every domain"
    what = prose(
        "Per token of the held-out split (2 % of documents, headwords for the dictionary), in rows of",
        f"{record['length']} tokens; `records/perplexity.csv` has every variant by domain. int8 and int4 are the",
        "experts, symmetric and without calibration, with one scale per output channel or per group of 128 inputs,",
        "among bf16 layers.",
        *_groups(facts.config),
        "Permuted: in each layer another, fixed expert works for each that was chosen. Random: experts are drawn",
        "evenly for every token, weights kept.",
    )
    result = prose(
        f"The dense rival's perplexity is {ratios['dense']:.3f} times that of this model in fp32; {where}.",
    )
    split = prose(
        "The split is by document (an entry, a chapter or a section of a page): neighbours of a held-out section may",
        "be trained on.",
        *_dropped(facts.manifest),
        "`lighthouse` always stands in the training split: this card asks for it.",
    )
    (header, *_, every) = table(record)
    tables = f"{markdown_table([header, every])}\n{markdown_table(table(record, _BY_DOMAIN))}"
    return f"## Perplexity\n\n{tables}\n{what}\n{split}\n{result}"


def _dropped(manifest: Mapping[str, Any]) -> list[str]:
    """Nothing for a manifest that does not say."""
    if not {"heldout_dropped", "heldout_most_shared"} <= manifest.keys():
        return []
    most, count = manifest["heldout_most_shared"], sum(manifest["heldout_dropped"].values())
    return [
        f"Held-out documents that share more than {100 * most:g} % of their 8-word runs with training text were",
        f"dropped: {count:,}.",
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
        f"Of {sum(load['tokens'].values()):,} held-out tokens from all domains the busiest expert of a layer has",
        f"{together:.2f} times the mean load, with one domain alone from {peaks[even]:.2f} ({even}) to",
        f"{peaks[uneven]:.2f} ({uneven}), as means over layers. `pocket_moe.records.ExpertTrace` replays every choice.",
    )
    table = markdown_table(likeness_rows(load))
    pictures = "![experts by domain](plots/experts.svg)\n\n{}\n{}\n{}\n![max over mean load](plots/load.svg)\n"
    return "## Who uses which experts\n\n" + pictures.format(_likeness(load), table, text)


def _likeness(load: Mapping[str, Any]) -> str:
    apart_DD, (largest, *_) = likeness(load)
    return prose(
        "A number is the share of a domain's choices that would have to go to other experts to be spread as those of",
        f"another domain. Domains at most {ALIKE:g} apart are joined to a group. The {len(largest)} of group A,",
        f"manuals and hackers' jargon, are {between(apart_DD, largest, largest):.2f} apart: the kind of text tells",
        "domains apart.",
    )


def _outputs(facts: Facts) -> str:
    unseen, known = ([sample for sample in facts.samples if sample.kind == kind] for kind in ("heldout", "known"))
    how = prose(
        "The first ten headwords of a seeded shuffle of each split; greedy, by the float32 oracle. A slash is a line's",
        "end; three dots end what was cut off (`records/samples.jsonl` has all).",
    )
    return (
        f"## {len(facts.samples)} outputs, not selected\n\n{how}\nHeadwords it never saw:\n\n"
        f"{markdown_table(sample_rows(unseen))}\nHeadwords it was trained on:\n\n{markdown_table(sample_rows(known))}"
    )


def _checks(facts: Facts) -> str:
    greedy = prose(
        f"`records/greedy.jsonl` has {facts.prompts} prompts with the oracle's greedy answers for a whole server to",
        f"repeat. The best token is never less than {rounded_down(facts.smallest_margin)} in logits before the second,",
        f"and the last expert chosen never less than {rounded_down(facts.smallest_router_margin)} in probability",
        "before the first that was not.",
    )
    equal = prose(*_same_logits(facts.logits))
    agreement = facts.agreement
    if agreement is None:
        return f"## Checks\n\n{greedy}\n{equal}"
    vllm = prose(
        f"vLLM {agreement['version']} serves the folder unchanged. In bfloat16, under teacher forcing, its greedy",
        f"token is the float32 oracle's at {agreement['agree_fp32']:.2%} of {agreement['tokens']:,} held-out tokens,",
        f"and our own bfloat16's at {agreement['agree_bf16']:.2%}.",
    )
    return f"## Checks\n\n{greedy}\n{equal}\n{vllm}"


def _same_logits(record: Mapping[str, Any]) -> list[str]:
    largest = record["largest_logit"]
    return [
        "transformers loads the folder unchanged. Over those answers its float32 logits are at most",
        f"{record['largest_difference']:.2g} from the oracle's, where logits reach {largest:.0f} and a unit in the",
        f"last place is {np.spacing(np.float32(largest)):.2g}; {record['within_1e-5']} of {record['answers']} answers",
        "stay within 1e-05.",
    ]


def _sources(facts: Facts) -> str:
    sources = facts.manifest["sources"]
    text = prose(
        f"Packages of {facts.manifest['distribution']}; text cleaned and without duplicates. The `README.md` with",
        "the weights has all notices, `manifest.json` each licence as the package's copyright file has it (some refer",
        "to `/usr/share/common-licenses` of a Debian system).",
    )
    return f"## Sources\n\n{text}\n{markdown_table(source_rows(sources))}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} million"
