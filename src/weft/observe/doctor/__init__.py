"""Checks of hosts, devices and links before a run: `weft doctor`.

Each host gathers facts as JSON (`examine`); host 0 judges the facts of all hosts together and prints one table (`judge`).
A file of a group has the functions that read its facts, and the pure functions that judge them.
"""
