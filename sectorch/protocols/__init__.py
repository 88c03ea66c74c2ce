"""Whole protocols of the literature, each a package that reads beside its paper."""

from . import capc as capc
from . import capride as capride
from . import perturbation as perturbation
from . import privhfl as privhfl
from . import secsv as secsv

__all__ = [
    "capc",
    "capride",
    "perturbation",
    "privhfl",
    "secsv",
]
