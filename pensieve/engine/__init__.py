"""The loop that runs turns, and its messages, mailbox, metrics and journal.

    mailbox → plan → launch → collect → commit → sink

The same `Engine` runs in the daemon, in tests and in the simulator; only its ports (ports.py) differ. Other
threads may use only the mailbox and the outbox, which have the engine's only locks.
"""
