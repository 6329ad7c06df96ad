"""What is dropped as a duplicate, and that nothing held out is ever seen in training."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.pocket.packages import TOPICS, prose

from pocket_moe.corpus.dedupe import Deduper, unlike
from pocket_moe.corpus.split import SMALLEST_HELDOUT, chosen, split_documents, split_entries
from pocket_moe.readers.text import Document
from pocket_moe.readers.wordnet import Entry, Sense


def _document(name: str, *paragraphs: str) -> Document:
    return Document(id=name, domain="d", text="\n\n".join([f"About {name}", *paragraphs]))


def test_equal_paragraphs_and_nearly_equal_documents_are_dropped() -> None:
    anchor, mast, keel = prose("anchor", 1), prose("mast", 2), prose("keel", 3)
    first = _document("first", anchor, "As follows:")
    repeats = _document("repeats", anchor.upper(), mast, "As follows:")
    nearly = _document("nearly", mast + " And so.", anchor[:-9])
    new = _document("new", keel)
    deduper = Deduper()
    kept = list(deduper.keep([first, repeats, nearly, new]))
    assert [document.id for document in kept] == ["first", "repeats", "new"]
    assert kept[1].text == f"About repeats\n\n{mast}\n\nAs follows:"
    assert (deduper.dropped_paragraphs, deduper.dropped_documents) == (1, 1)


def test_a_held_out_document_that_repeats_a_tenth_of_training_text_is_dropped() -> None:
    words = [f"w{index}" for index in range(107)]  # a hundred runs of eight
    tenth, more = " ".join(words[:17]), " ".join(words[:18])
    heldout = {"d": [_document("copy", " ".join(words))], "e": [_document("short", "no run of eight here")]}
    assert unlike(heldout, [_document("tenth", f"before {tenth} after")]) == heldout
    assert unlike(heldout, [_document("more", f"before {more.upper()} after")]) == heldout | {"d": []}


def test_two_percent_are_held_out_and_at_least_some() -> None:
    assert len(chosen(map(str, range(5000)))) == 100
    assert len(chosen(map(str, range(400)))) == SMALLEST_HELDOUT
    assert len(chosen(map(str, range(16)))) == 2
    assert chosen(["only"]) == set()


@given(st.permutations([_document(topic, prose(topic, 1)) for topic in TOPICS]))
def test_the_split_depends_on_ids_alone(documents: list[Document]) -> None:
    split = split_documents(documents)
    assert {document.id for document in split.heldout} == chosen(TOPICS)
    assert sorted(document.id for document in split.train + split.heldout) == sorted(TOPICS)


WORDS = [f"{topic}{ending}" for topic in TOPICS for ending in ("", "-s", " s", "ly")]
ENTRIES = st.lists(
    st.builds(
        lambda word, glosses: Entry(
            headword=word, senses=tuple(Sense(part="noun", gloss=f"the meaning {gloss} of it") for gloss in glosses)
        ),
        st.sampled_from(WORDS + [word.title() for word in WORDS]),
        st.lists(st.integers(0, 60), min_size=1, max_size=4),
    ),
    min_size=30,
    max_size=80,
)


@given(ENTRIES)
@settings(max_examples=50)
def test_no_gloss_and_no_headword_is_on_both_sides(entries: list[Entry]) -> None:
    split = split_entries(entries, "dictionary", "p")

    def glosses(documents: list[Document]) -> set[str]:
        return {word for document in documents for word in document.text.lower().split() if word.isdigit()}

    def words(documents: list[Document]) -> set[str]:
        return {document.id.lower().replace("-", " ") for document in documents}

    assert not glosses(split.train) & glosses(split.heldout)
    assert not words(split.train) & words(split.heldout)
    assert split.heldout or len({entry.headword.lower() for entry in entries}) < 16


def test_a_synonym_without_another_gloss_follows_to_the_held_out_side_and_shown_words_stay() -> None:
    glosses = {f"w{i}": f"{'(rare) ' * (i % 2)}gloss {i // 2}" for i in range(1000)} | {"lighthouse": "gloss 7"}
    entries = [Entry(headword=word, senses=(Sense(part="noun", gloss=gloss),)) for word, gloss in glosses.items()]
    split = split_entries(entries, "dictionary", "p")
    words = {document.id.removeprefix("p:") for document in split.heldout}
    assert len(split.train) + len(split.heldout) == len(entries)
    assert SMALLEST_HELDOUT < len(words) <= 2 * SMALLEST_HELDOUT
    assert {f"w{int(word[1:]) ^ 1}" for word in words} == words
    assert not words & {"lighthouse", "w14", "w15"}
