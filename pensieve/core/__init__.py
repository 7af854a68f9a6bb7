"""Decide what runs next and where each piece of KV is kept, without torch, clock or threads.

The time (`now`) is an argument, and decisions are plain values. So the daemon, the batch command, the
simulator and the tests use the same objects. The glossary in docs/structure.md explains the terms.
"""
