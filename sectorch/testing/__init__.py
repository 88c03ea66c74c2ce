"""Tests that anybody can point at operations of their own."""

from .check import check_op as check_op
