"""Holding less at once."""
