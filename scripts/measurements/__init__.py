"""Measurements and simulations that `scripts/measure NAME` runs, one per module.

planning    time of a scheduling decision
service     tokens that the service delivers, and its CPU time per turn, without a model
isolation   effect of a noisy tenant on another tenant (noisy_tenant.py)
swap        time to the first token of a turn whose history is not on the device
shared_pages  time of attention over pages that several slices share
loops       number of replies that loop in 200 conversations, by sampling values and API
batch       time of a batch, by how it shares prefixes
lanes       turns that daemons commit to one database, by the number of writing threads
files_entered  files of pensieve/ with functions that run during a plain turn

A simulation of a machine from machine_options:

machines    number of machines for a load, and their host memory (replica.py simulates one machine)

Used by scripts/paper:

batch_simulation  a batch that shares prefixes, with the daemon's engine
servers     single requests, with the schedules of vLLM, Orca and FastServe (schedules.py)
vllm_batch  a batch that shares prefixes, with the schedule of vLLM 0.5.4
"""
