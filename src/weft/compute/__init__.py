"""Doing less work per step."""
