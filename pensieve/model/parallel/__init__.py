"""One model on several devices: a process per rank, with a part of each layer, or some layers, and its KV."""
