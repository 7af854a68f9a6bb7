"""Run one model on several devices. Each rank is a process, and has a part of each layer, or some layers."""
