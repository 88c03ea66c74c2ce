"""Tests that anybody can point at operations, models and protocols of their own."""

from ..deprecation import renamed_names
from .calls import Call
from .check import check_op, check_program
from .modules import ModuleFault, ModuleReport, check_module
from .mutation import KINDS, MutationReport, PlantedFault, mutate_protocol
from .protocol_runs import SHARED, CheckOptions, Given
from .protocols import Finding, ProtocolFault, ProtocolReport, check_protocol

__getattr__ = renamed_names(__name__, Options="CheckOptions", Planted="PlantedFault")

__all__ = [
    "KINDS",
    "SHARED",
    "Call",
    "CheckOptions",
    "Finding",
    "Given",
    "ModuleFault",
    "ModuleReport",
    "MutationReport",
    "PlantedFault",
    "ProtocolFault",
    "ProtocolReport",
    "check_module",
    "check_op",
    "check_program",
    "check_protocol",
    "mutate_protocol",
    "strategies",
]
