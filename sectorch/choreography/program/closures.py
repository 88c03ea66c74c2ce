"""What the functions of a program's steps take past their arguments: it has to be the same in every call."""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType
from typing import Any

from ..applied import Applied
from ..located import Located

_EMPTY = object()


class Closures:
    """The variables that noted functions close over, as they were then."""

    def __init__(self):
        self._noted: dict[int, tuple[CellType, Any]] = {}
        self.located = False
        """Whether one holds a located value, which is one call's."""

    @property
    def changed(self) -> bool:
        """Whether one holds something else now: a loop has given it another value, say."""
        return any(_content(cell) is not content for cell, content in self._noted.values())

    def note(self, f: Any) -> None:
        """Remember what a function closes over, and the functions in there; anything else has no closure."""
        if isinstance(f, Applied):
            f = f.f
        elif isinstance(f, partial):
            f = f.func
        if not isinstance(f, FunctionType):
            return
        for cell in f.__closure__ or ():
            if id(cell) in self._noted:
                continue
            content = _content(cell)
            self._noted[id(cell)] = cell, content
            fields = [getattr(content, name, None) for name in getattr(content, "__dataclass_fields__", ())]
            self.located |= any(type(value) is Located for value in (content, *fields))
            self.note(content)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _EMPTY
