"""Compression of trained models: quantization and sparsity, in the format of compressed-tensors."""
