"""Memory savings: recompute, offload, split weights and quantized states, and accounting of live memory."""
