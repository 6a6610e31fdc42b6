"""Reads one text document and keeps what matters in it: pure functions, nothing durable here.

sumy ranks the sentences by the words that each shares with all the others; the best come back in the order of the
text. Sentences are cut by Punkt, which learns abbreviations from the document itself, so nothing is downloaded.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from nltk.tokenize.punkt import PunktSentenceTokenizer  # type: ignore[import-untyped]
from sumy.models.dom import ObjectDocumentModel, Paragraph, Sentence
from sumy.nlp.stemmers import Stemmer
from sumy.summarizers.reduction import ReductionSummarizer
from sumy.utils import get_stop_words

from examples.report.model import Summary

DOCUMENTS = Path(__file__).parent / "documents"

_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_STEMMER = Stemmer("english")
_STOP_WORDS = get_stop_words("english") | {"percent", "hundred", "thousand", "million", "billion", "years", "year"}


def read(document: str) -> str:
    """``document`` is a file name, relative to the folder of examples or absolute. Raises FileNotFoundError."""
    return (DOCUMENTS / document).read_text(encoding="utf-8")


def summarise(document: str, text: str, count: int = 5) -> Summary:
    """``text``: a title on the first line, then paragraphs with blank lines between them. ``count``: how many sentences to keep."""
    title, *paragraphs = (" ".join(block.split()) for block in text.strip().split("\n\n"))
    tokenizer = _Tokenizer(text)
    model = ObjectDocumentModel(
        Paragraph(Sentence(sentence, tokenizer) for sentence in tokenizer.to_sentences(paragraph))
        for paragraph in paragraphs
        if not _is_heading(paragraph)
    )
    summarizer = ReductionSummarizer(_STEMMER)
    summarizer.stop_words = _STOP_WORDS
    return Summary(
        document=document,
        title=title,
        words=len(text.split()),
        terms=_terms(text),
        sentences=[str(sentence) for sentence in summarizer(model, count)],
    )


class _Tokenizer:
    """The two calls sumy makes of a tokenizer; its own one needs data files that do not come with the package."""

    def __init__(self, text: str) -> None:
        self._punkt = PunktSentenceTokenizer(text)

    def to_sentences(self, paragraph: str) -> list[str]:
        return list(self._punkt.tokenize(paragraph))

    def to_words(self, sentence: str) -> tuple[str, ...]:
        return tuple(_WORD.findall(sentence))


def _is_heading(paragraph: str) -> bool:
    return len(paragraph) < 100 and paragraph[-1] not in ".!?:;\"'”’)"


def _terms(text: str, count: int = 6) -> list[str]:
    """Counted by stem, shown in the form that is used most."""
    forms: dict[str, Counter[str]] = defaultdict(Counter)
    for word in _WORD.findall(text.lower()):
        if len(word) > 3 and word not in _STOP_WORDS:
            forms[_STEMMER(word)][word] += 1
    ranked = sorted(forms.values(), key=Counter.total, reverse=True)
    return [words.most_common(1)[0][0] for words in ranked[:count]]
