"""Measurements and simulations that `scripts/measure NAME` runs, one per module.

planning    cost of a scheduling decision
service     tokens per second of the service, and its CPU time per turn, without a model
isolation   effect of a tenant that does its worst on another tenant (noisy_tenant)
swap        time to the first token of a turn whose history is not on the device
shared_pages  attention over pages that several slices share
batch       time of a batch, by how its requests share prefixes

Simulations of a machine from machine_options:

machines    number of machines for a load, and their host memory (replica: one of them)
servers     single requests, compared with the schedules of vLLM, Orca and FastServe (schedules)
batch_simulation    a batch that shares prefixes
"""
