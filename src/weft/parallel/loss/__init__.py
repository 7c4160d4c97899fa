"""Losses over all targets, in the head, by weights, and of a teacher."""
