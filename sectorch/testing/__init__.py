"""Tests that anybody can point at operations, models and protocols of their own."""

from ..deprecation import renamed_names
from .calls import Call as Call
from .check import check_op as check_op
from .check import check_program as check_program
from .modules import ModuleFault as ModuleFault
from .modules import ModuleReport as ModuleReport
from .modules import check_module as check_module
from .mutation import KINDS as KINDS
from .mutation import MutationReport as MutationReport
from .mutation import PlantedFault as PlantedFault
from .mutation import mutate_protocol as mutate_protocol
from .protocol_runs import SHARED as SHARED
from .protocol_runs import CheckOptions as CheckOptions
from .protocol_runs import Given as Given
from .protocols import Finding as Finding
from .protocols import ProtocolFault as ProtocolFault
from .protocols import ProtocolReport as ProtocolReport
from .protocols import check_protocol as check_protocol

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
