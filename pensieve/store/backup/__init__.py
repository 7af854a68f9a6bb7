"""Copies of a history in a folder, from which it is restored as it was at any shipped moment.

    FOLDER/history                  which history this folder is for
    FOLDER/lock                     one process writes to it
    FOLDER/generation-000001/       base.db, base.json, 00000001.segment, 00000002.segment, …
    FOLDER/generation-000002/       …

A *generation* is a whole copy of the database, the base, and a chain of segments.  A *segment* holds the
pages that transactions have changed since the one before it, as they were at one moment between two
transactions; so the base with the first k segments written over it is the database of that moment.  Each
of them carries the history's identity, its time, a checksum over all of it, and the checksum of what it
follows.  Every file is written under another name, synced and renamed, and so is a generation with its base.

How a change gets there, and why nothing is missed or torn:

    store thread    capture.py    One connection writes, and it alone checkpoints.  While somebody ships, it
                                  checkpoints only here: what was committed is read from the write-ahead log
                                  into memory (a *feed*) in the same job, between transactions.  SQLite
                                  begins the log anew only behind a complete checkpoint, so no frame is
                                  overwritten unread.
    backup thread   writing.py    takes what gathered in the feed and writes it to the folder.  However slow
                                  the folder is, nobody else waits; what gathers is bounded, and beyond that
                                  the chain breaks: the feed is dropped, and another generation begins.

The base is copied from the file of the database while transactions go on, without a read transaction, which
would keep deletions from truncating the log.  What is copied so is torn as a whole, but the feed begins
before the copy does, with every frame of the log as it lies, and a page of the file changes only by a
checkpoint of frames that are in the feed.  Pages of the feed are written over what was copied, and when
the copy has come to its end and the feed was collected once more, the base is the database of that
moment.

Deletions erase text from the live files alone.  In a backup it lies until its generation is dropped
(`drop_old`), which is said to the operator in docs/operating.md.
"""
