"""Layers in FP8, rounded to few bits, or in float32."""
