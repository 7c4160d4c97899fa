"""Rows, their documents, and the attention that sees them whole: context parallelism."""
