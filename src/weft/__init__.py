"""Weft trains the PyTorch models people already have: fast, in little memory, on many devices."""
