"""Tests that anybody can point at operations, models and protocols of their own."""

from .calls import Call as Call
from .case import Options as Options
from .check import check_op as check_op
from .modules import ModuleFault as ModuleFault
from .modules import ModuleReport as ModuleReport
from .modules import check_module as check_module
from .mutants import KINDS as KINDS
from .mutation import MutationReport as MutationReport
from .mutation import Planted as Planted
from .mutation import mutate_protocol as mutate_protocol
from .played import SHARED as SHARED
from .played import Given as Given
from .protocols import Finding as Finding
from .protocols import ProtocolFault as ProtocolFault
from .protocols import ProtocolReport as ProtocolReport
from .protocols import check_protocol as check_protocol
from .revealing import check_program as check_program

__all__ = [
    "KINDS",
    "SHARED",
    "Call",
    "Finding",
    "Given",
    "ModuleFault",
    "ModuleReport",
    "MutationReport",
    "Options",
    "Planted",
    "ProtocolFault",
    "ProtocolReport",
    "check_module",
    "check_op",
    "check_program",
    "check_protocol",
    "mutate_protocol",
    "strategies",
]
