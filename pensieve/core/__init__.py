"""Pure bookkeeping: what is where, what it is worth, what runs next.

Nothing in this room knows torch, a clock, a thread or a log: `now` is an argument, decisions are
values, and the same objects serve the daemon, the batch command, the simulator and the tests.

Words (used everywhere, also in logs, metrics, proto and SQL)

chunk           `chunk_tokens` (32) consecutive positions of a token prefix; logical: kept, copied,
                dropped, recomputed
page            the place of one chunk in one tier (`device_page`, `host_page`: ints)
slot            the row of one token in a page
slice           the positions of one turn that are computed in one iteration
hole            positions whose KV is missing
conversation    outlives processes; a *turn* of it is queued, scheduled, suspended, streamed
Iteration       the plan of one step; *Batch* is its tensors; *step* is the engine's verb
device, host    the two tiers, in this order; without a GPU both are arenas in RAM
swap_out        copy device to host; swap_in: copy host to device; reclaim: free a device page that
                nothing would miss; drop: forget the last copy; recompute: fill a hole
evict           the policy's word; moves no data
retention_value seconds of recompute per second idle; the lowest goes first
plan, launch, collect, commit   the four verbs of an iteration, two of core, two of the executor
"""
