"""Whole protocols of the literature, each a package that reads beside its paper."""

from . import capc, capride, perturbation, privhfl, secsv

__all__ = [
    "capc",
    "capride",
    "perturbation",
    "privhfl",
    "secsv",
]
