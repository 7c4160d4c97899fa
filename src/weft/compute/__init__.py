"""Attention primitives and dropout."""
