"""Execute an Iteration with torch and transformers.

loader ─> probe ─> shape            loads a model and checks that every layer uses our attention
             └─> fuse               replaces its layers and products by faster ones
executor                            launches and collects iterations
  ├── kv: copier ─> memory          moves pages between the tiers while the device computes
  │       streamer ─> memory        moves the pages of streamed turns to the device and back, in each layer
  ├── forward ─> batch              turns an iteration's slices into tensors, and computes logits
  │     ├── attention ─> kernels    one layer: wait, copy, write, attend
  │     ├── streamed_pass           the same steps, group by group, for streamed turns
  │     └── graphs                  decode iterations on a GPU as CUDA graphs
  │         piecewise_graphs        for other iterations: CUDA graphs of the work between attentions
  ├── sampling                      turns logits into token ids
  └── reply ─> text                 turns token ids into text and detects the end of a reply
parallel                            the same work on several devices, one process per device
"""
