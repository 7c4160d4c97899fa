"""Gradients in fewer bytes: codecs, error feedback, and the reductions that use them."""
