"""The loop that runs turns, and its messages, mailbox, metrics and journal.

    mailbox → plan → launch → collect → commit → sink

The same `Engine` runs in the daemon, in tests and under the simulator's virtual clock; only the four ports
differ.  The mailbox and the outbox are the two objects that other threads may touch, and have its only
locks.
"""
