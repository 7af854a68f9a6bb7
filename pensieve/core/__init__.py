"""Decides what runs next and where each piece of KV lies, without torch, clock or threads.

`now` is an argument, decisions are values, and the same objects serve the daemon, the batch command,
the simulator and the tests.

Words (used everywhere, also in logs, metrics, proto and SQL), with the nearest of vLLM and SGLang

chunk           `chunk_tokens` (32) consecutive positions of a token prefix; logical: kept, copied,
                dropped, recomputed.  vLLM: a KV block and its hash
page            the memory of one chunk in one tier (`device_page`, `host_page`: ints).
                vLLM: a physical block, `block_id`; SGLang: page
slot            the row of one token in a page.  vLLM: slot
page table      the device pages of a turn's chunks, in order.  vLLM: block table
branch          chunks with the same holders; a conversation is a path of branches.
                SGLang: a `TreeNode` of the radix cache
holder          a conversation that has a chunk in its path
pinned, idle    held by a running turn, or by none.  vLLM: `ref_cnt` > 0; SGLang: `lock_ref` > 0
conversation    a token log that turns extend; it outlives processes.  SGLang: session
turn            a message and its reply: queued, running, suspended, finished.  Both: request
group, opener   requests of a batch that share a prefix, and the one of them that computes it
suspend         a running turn gives up its pages and keeps its tokens.
                vLLM: preempt; SGLang: retract
slice           the positions of one turn that are computed in one iteration.
                vLLM: `num_scheduled_tokens` of a request; literature: chunked prefill
hole            positions whose KV is missing
Iteration       the plan of one step (vLLM: SchedulerOutput); *Batch* is its tensors; *step* is the
                engine's verb
device, host    the two tiers, in this order; without a GPU both are arenas in RAM.
                SGLang: HiCache; vLLM: KV offloading
clean, dirty    on the device, with or without a complete copy on the host
swap_out        copy device to host; swap_in: copy host to device.  SGLang: `write_backup`, `load_back`
reclaim         free a device page whose chunk the host has too, or that is marked to drop
drop            forget the last copy; *marked to drop*: on the device only, valid until its page is
                needed, and not to be copied
discard         make holes of what a failed turn computed
recompute       compute a hole again
available       device pages that can be taken at once: empty + reclaimable.
                vLLM: the free block queue, whose blocks stay cached until they are taken
evict           the policy's word for all that frees pages
retention_value seconds of recompute per second idle; the lowest goes first
role            a way to give something up: SWAP_OUT, RECLAIM, DROP; one retention queue each
ratio           how much likelier than others a conversation is to return
plan, launch, collect, commit   the four verbs of an iteration, two of core, two of the executor
"""
