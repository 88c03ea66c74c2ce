"""The model files of `sectorch answer`: one, or several with names, read at the start and on SIGHUP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ...errors import ArgumentError, NetworkError, SectorchError
from ...nn.model_file import read_model
from ..names import NAME
from ..parties.answer import Answering

log = logging.getLogger("sectorch.answer")


def named(models: Sequence[str]) -> dict[str, Path]:
    """Model files by name, as a command line has them: FILE alone, or NAME=FILE for each of one or several.

    Raises:
        ArgumentError: several without a name, or of one name.
    """
    found: dict[str, Path] = {}
    for said in models:
        name, equals, path = said.partition("=")
        if not equals or not NAME.fullmatch(name) or Path(said).exists():
            name, path = "", said
        if name in found:
            what = f"two models are called {name}" if name else "several models have a name each"
            raise ArgumentError(f"{what}: NAME=FILE NAME=FILE ..., which are asked for as PARTY/NAME")
        found[name] = Path(path)
    if len(found) > 1 and "" in found:
        raise ArgumentError(
            f"several models have a name each: NAME=FILE for {found['']}, which is asked for as PARTY/NAME"
        )
    return found


def read_anew(party: Answering, models: dict[str, Path]) -> None:
    """Read the files again, and answer with what is in them; a model that cannot be read stays as it was."""
    for name, path in models.items():
        try:
            if not party.offer(*read_model(path), name):
                log.info("%s has the model that is answered with", path)
        except NetworkError as error:
            log.error("the server has not heard of the model in %s yet: %s", path, error)
        except SectorchError as error:
            log.error("%s is not used, and the model before it goes on: %s", path, error)
