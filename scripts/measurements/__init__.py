"""Measurements and simulations that `scripts/measure NAME` runs, one per module.

planning    what a decision of the scheduler costs
service     tokens that the service delivers, and what a turn costs it, without a model
isolation   what one tenant notices of another one that does its worst (noisy_tenant)
swap        the first token of a turn whose history is not on the device
shared_pages  attention over pages that several slices begin with
loops       replies that loop, of 200 talks, by sampling values and API
batch       what a batch takes, by how it shares prefixes

Simulations of a machine from machine_options:

machines    number of machines for a load, and their host memory (replica: one of them)
servers     single requests, compared with the schedules of vLLM, Orca and FastServe (schedules)
batch_simulation    a batch that shares prefixes
"""
