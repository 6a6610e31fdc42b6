"""What the parts of the example hand to each other, and what is kept of it: all of it is JSON in a journal at some time."""

from __future__ import annotations

import msgspec


class Document(msgspec.Struct, frozen=True):
    """Input of a child run. ``name``: of a text file. ``sentences``: how many to keep."""

    name: str
    sentences: int = 6


class Summary(msgspec.Struct, frozen=True):
    """What one document says. ``terms``: its most used words, most used first. ``sentences``: in the order of the text."""

    document: str
    title: str
    words: int
    terms: list[str]
    sentences: list[str]


class ReportInput(msgspec.Struct, frozen=True, rename="camel"):
    """``documents``: names of text files. ``rehearse_crash_seconds``: the render step of the first attempt takes so much longer."""

    title: str
    documents: list[str]
    to: str
    rehearse_crash_seconds: float = 0


class Pdf(msgspec.Struct, frozen=True):
    """All of the file, in base64: the folder of a worker dies with the worker, the journal does not."""

    sha256: str
    content: str


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """The run's result. ``file``: the object's name in the store."""

    file: str
    sha256: str
    approved_by: str
    message_id: str
