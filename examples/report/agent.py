"""The agent: summaries by child runs, a PDF, its storage, a person's approval, the mail, the notification.

It reads from top to bottom like a script. What makes it durable is what it calls: a step, a child, a wait or an effect that is done
returns what it returned before. So when a worker dies, the next one starts at the top of ``report`` and is at once where the other was.

    spawn ×5 ── join ── render ── upload ── approved? ── send_mail ── notify
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from datetime import UTC, datetime

from examples.report.deliver import notify, send_mail, upload
from examples.report.model import Document, Pdf, Report, ReportInput, Summary
from examples.report.typeset import typeset
from perdure import Child, Run, agent, step


@step
async def render(run: Run, title: str, summaries: list[Summary], rehearse_crash_seconds: float) -> Pdf:
    await run.append("rendering", {"attempt": run.attempt})
    if run.attempt == 1:
        await asyncio.sleep(rehearse_crash_seconds)
    content = await asyncio.to_thread(typeset, title, summaries, datetime.now(UTC))
    return Pdf(hashlib.sha256(content).hexdigest(), base64.b64encode(content).decode())


@agent
async def report(run: Run, input: ReportInput) -> Report:
    children: list[Child[Summary]] = [
        await run.spawn(pool="summarise", input=Document(name), summary=f"Summarise {name}", result=Summary, key=name)
        for name in input.documents
    ]
    summaries = [child.result for child in await run.join(children)]
    pdf = await render(run, input.title, summaries, input.rehearse_crash_seconds)
    file = f"{run.name}.pdf"
    await upload(file, pdf.sha256, pdf.content)

    approval = await run.wait_signal("approved")  # for as long as it takes, and without a process
    approver = _name(approval.payload)
    await run.append("approved", {"by": approver})

    body = f"{len(summaries)} documents were read for you. {approver} has approved this report.\n"
    mail = await send_mail(input.to, input.title, body, file, pdf.sha256)
    await notify("report-sent", file)
    return Report(file, pdf.sha256, approver, mail.id)


def _name(payload: object) -> str:
    """People send signals by hand: ``{"by": "Ada"}``, or anything else, or nothing."""
    match payload:
        case {"by": str(name)} | str(name):
            return name
        case _:
            return "somebody"


if __name__ == "__main__":
    report.serve()
