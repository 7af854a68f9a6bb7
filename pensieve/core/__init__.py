"""Decides what runs next and where each piece of KV lies, without torch, clock or threads.

`now` is an argument, decisions are values, and the same objects serve the daemon, the batch command,
the simulator and the tests.  The glossary of docs/structure.md explains the words.
"""
