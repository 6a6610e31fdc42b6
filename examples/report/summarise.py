"""The agent of the child runs: one document in, its summary out. Synchronous code is as good as asynchronous."""

from __future__ import annotations

from examples.report.extract import read, summarise
from examples.report.model import Document, Summary
from perdure import SyncRun, agent


@agent
def summarise_document(run: SyncRun, document: Document) -> Summary:
    run.log.info("reading %s", document.name)
    return summarise(document.name, read(document.name), document.sentences)


if __name__ == "__main__":
    summarise_document.serve()
