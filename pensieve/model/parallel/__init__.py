"""Run one model on several devices: a process per rank, each with a part of each layer, or some layers."""
