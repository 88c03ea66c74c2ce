"""Prepared material on disk, sealed."""
