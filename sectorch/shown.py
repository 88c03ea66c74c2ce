"""What a result shows of itself: tables and lines, as text and, where a notebook asks, as HTML."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.2;'
    'font-family:ui-monospace,Menlo,Consolas,monospace">{code}</pre>'
)


class Shown:
    """A result that can be looked at: `print(result.table())`, or by its name alone in a notebook."""

    def shown(self) -> Iterable[RenderableType]:
        """What there is to see, from top to bottom; a plain string is a line, with rich's markup."""
        raise NotImplementedError

    def table(self, width: int = 118) -> str:
        """As text, so many characters wide."""
        return self._written(width).export_text()

    def _repr_html_(self) -> str:
        return self._written(118).export_html(code_format=_HTML, inline_styles=True)

    def _written(self, width: int) -> Console:
        console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False)
        for part in self.shown():
            console.print(part)
        return console


class Facts(Shown):
    """A few named facts of one thing."""

    def __init__(self, title: str, facts: Mapping[str, object]):
        self._title, self._facts = title, facts

    def shown(self) -> Iterator[RenderableType]:
        """A row for each."""
        table = Table(title=self._title, title_justify="left", show_header=False)
        for name, value in self._facts.items():
            table.add_row(Text(name), Text(str(value)))
        yield table
