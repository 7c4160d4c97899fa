"""Gradient compression: codecs, error feedback, and compressed reductions."""
