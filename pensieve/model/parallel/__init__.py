"""One model on several devices: a process per rank, with a part of each layer and of the KV, or some layers."""
