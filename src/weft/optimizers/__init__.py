"""Optimizers of sharded and unsharded parameters: 1-bit Adam, Muon and Adafactor. AdamW and others are those of PyTorch."""
