"""Decide what runs next and where each piece of KV is kept, without torch, clock or threads.

`now` is an argument and decisions are values, so the daemon, the batch command, the simulator and the tests
use the same objects. The glossary in docs/structure.md explains the terms.
"""
