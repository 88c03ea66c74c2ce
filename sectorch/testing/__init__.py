"""Tests that anybody can point at operations and protocols of their own."""

from .check import check_op as check_op
from .played import SHARED as SHARED
from .played import Given as Given
from .protocols import Finding as Finding
from .protocols import ProtocolFault as ProtocolFault
from .protocols import ProtocolReport as ProtocolReport
from .protocols import check_protocol as check_protocol
