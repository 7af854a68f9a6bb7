"""Schedules of other servers, to compare with: requests without a history, on the same costs and clock.

serving     requests, what a schedule is, and the run of one to the end
orca        first come, first served; KV is reserved for the longest context
vllm        first come, first served; KV in blocks, and the latest is preempted when they run out
fastserve   a multi-level feedback queue with preemption; KV is reserved, and goes to the host and back
"""
