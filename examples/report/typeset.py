"""Turns summaries into a PDF. The same summaries and date give the same bytes."""

from __future__ import annotations

from datetime import datetime

from fpdf import FPDF, XPos, YPos
from fpdf.enums import TableBordersLayout, TableCellFillMode
from fpdf.fonts import FontFace

from examples.report.model import Summary

INK, MUTED, ACCENT, PAPER = (30, 34, 42), (108, 116, 130), (22, 78, 99), (240, 245, 247)
WORDS_PER_MINUTE = 230
MARGIN = 22.0


def typeset(title: str, summaries: list[Summary], at: datetime) -> bytes:
    """``at`` is the date on the first page and in the file's metadata."""
    pdf = _Report(title, at)
    pdf.cover(summaries)
    for number, summary in enumerate(summaries, 1):
        pdf.chapter(number, summary)
    return bytes(pdf.output())


class _Report(FPDF):
    def __init__(self, title: str, at: datetime) -> None:
        super().__init__(format="A4")
        self.heading = title
        self.at = at
        self.core_fonts_encoding = "cp1252"
        self.set_title(title)
        self.set_creator("Perdure, example report")
        self.set_creation_date(at)
        self.set_margins(MARGIN, MARGIN, MARGIN)
        self.set_auto_page_break(auto=True, margin=MARGIN + 6)

    def normalize_text(self, text: str) -> str:
        """The built-in fonts know Western European letters; any other becomes a question mark rather than an error."""
        return super().normalize_text(text.encode("cp1252", "replace").decode("cp1252"))

    def footer(self) -> None:
        self.set_y(-16)
        self._ink(MUTED, 8)
        self.cell(self.epw / 2, 5, self.heading)
        self.cell(self.epw / 2, 5, f"{self.page_no()} / {{nb}}", align="R")

    def cover(self, summaries: list[Summary]) -> None:
        self.add_page()
        self.set_fill_color(*ACCENT)
        self.rect(0, 0, self.w, 52, style="F")
        self.set_y(22)
        self._ink((255, 255, 255), 24, "B")
        self.multi_cell(self.epw, 11, self.heading, align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)
        self._ink((205, 222, 229), 10)
        self.cell(0, 8, f"{len(summaries)} documents, {sum(s.words for s in summaries):,} words. {self.at:%d %B %Y}")
        self.set_y(62)
        self._ink(INK, 10)
        self.set_draw_color(210, 218, 224)
        self.set_fill_color(*PAPER)
        with self.table(
            col_widths=(7, 82, 15, 16),
            text_align=("RIGHT", "LEFT", "RIGHT", "RIGHT"),
            borders_layout=TableBordersLayout.HORIZONTAL_LINES,
            headings_style=FontFace(emphasis="BOLD", color=ACCENT, fill_color=PAPER),
            cell_fill_color=(255, 255, 255),
            cell_fill_mode=TableCellFillMode.ALL,
            line_height=6,
            padding=(1.6, 2),
        ) as table:
            table.row(("", "Document", "Words", "Read in"))
            for number, summary in enumerate(summaries, 1):
                minutes = max(1, round(summary.words / WORDS_PER_MINUTE))
                table.row((str(number), summary.title, f"{summary.words:,}", f"{minutes} min"))
        self.ln(8)

    def chapter(self, number: int, summary: Summary) -> None:
        """Never leaves its heading alone at the foot of a page."""
        if self.will_page_break(58):
            self.add_page()
        self.start_section(summary.title)
        self._ink(ACCENT, 14, "B")
        self.multi_cell(self.epw, 7, f"{number}. {summary.title}", align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)
        self._ink(MUTED, 9, "I")
        self.cell(0, 6, ", ".join(summary.terms), new_x=XPos.LMARGIN, new_y=YPos.NEXT)
        self.ln(1.5)
        for sentence in summary.sentences:
            self._point(sentence)
        self.ln(6)

    def _point(self, sentence: str) -> None:
        self._ink(INK, 10.5)
        height = self.multi_cell(self.epw - 7, 5.4, sentence, dry_run=True, output="HEIGHT")
        assert isinstance(height, float)
        if self.will_page_break(height):
            self.add_page()
        self.set_fill_color(*ACCENT)
        self.ellipse(self.l_margin + 1.5, self.get_y() + 2.1, 1.4, 1.4, style="F")
        self.set_x(self.l_margin + 7)
        self.multi_cell(self.epw - 7, 5.4, sentence, align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)
        self.ln(1.6)

    def _ink(self, color: tuple[int, int, int], size: float, style: str = "") -> None:
        self.set_text_color(*color)
        self.set_font("helvetica", style, size)
