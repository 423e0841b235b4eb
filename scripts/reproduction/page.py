"""One self-contained HTML page: headings with their contents, our own Markdown tables, pictures inside."""

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from scripts.reproduction.claims import Claim, Verdict, answer

TEMPLATE = Path(__file__).with_name("page.html")
_WORDS = 28  # characters from which a cell is a sentence, which may break and is set to the left


class Page:
    """A page that grows from top to bottom.

    Args:
        title: of the page.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._contents: list[str] = []
        self._body: list[str] = []

    def html(self) -> str:
        """The whole page."""
        filled = {"title": escape(self._title), "contents": "\n".join(self._contents), "body": "\n".join(self._body)}
        return Template(TEMPLATE.read_text()).substitute(filled)

    def heading(self, text: str, anchor: str, level: int = 2, aside: str = "") -> None:
        """A heading, which the contents list too."""
        said = f' <span class="aside">{escape(aside)}</span>' if aside else ""
        self._body.append(f'<h{level} id="{escape(anchor)}">{escape(text)}{said}</h{level}>')
        self._contents.append(f'<a class="level{level}" href="#{escape(anchor)}">{escape(text)}</a>')

    def text(self, sentence: str) -> None:
        """A paragraph."""
        self._body.append(f"<p>{inline(sentence)}</p>")

    def markdown(self, text: str) -> None:
        """Paragraphs and tables, as ours are written."""
        for block in re.split(r"\n\s*\n", text.strip()):
            self._body.append(html_table(block) if block.startswith("|") else f"<p>{inline(block)}</p>")

    def table(self, caption: str, text: str) -> None:
        """A table under its caption."""
        self._body.append(f'<p class="caption">{inline(caption)}</p>')
        self.markdown(text)

    def picture(self, caption: str, path: Path) -> None:
        """A PNG, taken into the page; where it is not there, that is said."""
        if not path.exists():
            self.text(f"The picture {path.name} is not there; run the item's command with --again.")
            return
        data = base64.b64encode(path.read_bytes()).decode()
        image = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        self._body.append(f"<figure>{image}<figcaption>{inline(caption)}</figcaption></figure>")

    def notes(self, notes: Sequence[str]) -> None:
        """Sentences under a table."""
        if notes:
            self._body.append(f"<ul>{''.join(f'<li>{inline(note)}</li>' for note in notes)}</ul>")

    def facts(self, told: Sequence[tuple[str, str]]) -> None:
        """What, and how, a line each."""
        lines = "".join(f"<dt>{inline(what)}</dt><dd>{inline(how)}</dd>" for what, how in told)
        self._body.append(f'<dl class="facts">{lines}</dl>')

    def folded(self, summary: str, text: str) -> None:
        """Markdown that opens on a click."""
        self._body.append(f"<details><summary>{escape(summary)}</summary>")
        self.markdown(text)
        self._body.append("</details>")

    def claims(self, judged: Sequence[tuple[Claim, Verdict]]) -> None:
        """The table of claims, the answer in color and in a word; what else has to be known in a row of its own."""
        header = ("claim", "measure", "the paper", "ours", "agrees")
        rows = []
        for claim, found in judged:
            name = f"<strong>{inline(claim.name)}</strong> <span class='aside'>{inline(claim.section)}</span>"
            cells = [f"{name}<br>{inline(claim.statement)}", inline(claim.measure), inline(claim.paper)]
            cells += [inline(found.value), badge(answer(found))]
            named = zip(header, cells, strict=True)
            line = "".join(f'<td data-name="{column}">{cell}</td>' for column, cell in named)
            note = f'<tr class="note"><td></td><td colspan="4" data-name="note">{inline(found.note)}</td></tr>'
            rows += [f"<tr>{line}</tr>", note if found.note else ""]
        columns = "".join(f"<th>{name}</th>" for name in header)
        table = f'<table class="claims"><thead><tr>{columns}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        self._body.append(f'<div class="scroll">{table}</div>')


def inline(text: str) -> str:
    """Escaped text with **bold** and `code`; a number and its unit stay on one line."""
    found = re.sub(r"(?<=\d) (?=[%M]\b|%)", "\u00a0", escape(text))
    found = re.sub(r"`([^`]+)`", r"<code>\1</code>", found)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", found)


def badge(word: str) -> str:
    """A verdict in its color."""
    return f'<span class="answer {word if word in ("yes", "no") else "open"}">{word}</span>'


def html_table(text: str) -> str:
    """A Markdown table as HTML; numbers to the right, as its rule says, and sentences to the left."""
    header, rule, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines())
    right = [mark.endswith(":") for mark in rule]
    sentences = [any(len(row[i]) > _WORDS for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ["words" if sentences[i] else "number" if right[i] else "name" for i in range(len(header))]
        shown = [badge(cell) if cell in ("yes", "no") else inline(cell) for cell in cells]
        return "".join(f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in zip(kinds, shown, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{line(header, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
