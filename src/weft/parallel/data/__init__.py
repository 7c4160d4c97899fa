"""Data parallelism: replicas, shards of ZeRO, and the optimizer over them."""
