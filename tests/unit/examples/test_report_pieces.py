"""The report's pure parts: what is kept of a document, and the PDF made of it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from examples.report.extract import DOCUMENTS, read, summarise
from examples.report.model import Summary
from examples.report.typeset import typeset

AT = datetime(2026, 11, 21, tzinfo=UTC)
NAMES = sorted(path.name for path in DOCUMENTS.glob("*.txt"))


def test_there_are_five_documents_of_real_length_without_repetition() -> None:
    texts = [read(name) for name in NAMES]
    assert len(texts) == 5
    assert all(len(text.split()) > 2000 for text in texts)
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))


@pytest.mark.parametrize("name", NAMES)
def test_a_summary_is_made_of_whole_sentences_in_the_order_of_the_text(name: str) -> None:
    text = read(name)
    summary = summarise(name, text, 5)
    assert summary.title == text.splitlines()[0]
    positions = [text.index(sentence) for sentence in summary.sentences]
    assert len(positions) == 5
    assert positions == sorted(positions)
    assert all(sentence[-1] in ".?!" for sentence in summary.sentences)
    assert len(set(summary.terms)) == 6


def test_a_summary_is_the_same_every_time() -> None:
    text = read(NAMES[0])
    assert summarise(NAMES[0], text) == summarise(NAMES[0], text)


def test_headings_are_not_sentences() -> None:
    text = "Title\n\nOn water\n\nWater runs. Water falls and runs downhill.\n\nOn fire\n\nFire burns water away."
    assert summarise("x", text, 10).sentences == ["Water runs.", "Water falls and runs downhill.", "Fire burns water away."]


def test_the_same_summaries_give_the_same_pdf() -> None:
    summaries = [summarise(name, read(name)) for name in NAMES[:2]]
    first, second = (typeset("Five essays", summaries, AT) for _ in range(2))
    assert first.startswith(b"%PDF-")
    assert first == second
    assert first != typeset("Five essays", summaries[:1], AT)


def test_letters_that_the_font_lacks_do_not_stop_the_report() -> None:
    assert typeset("Ökonomie – “日本”", [Summary("x", "Ж", 1, ["λ"], ["Ein Satz — mit €."] * 40)], AT).startswith(b"%PDF-")
