"""An Iteration made real with torch and transformers.

loader ─> probe ─> shape            a model whose every layer is known to go through our attention
             └─> fuse               its layers and products replaced by faster ones
executor                            launch and collect
  ├── kv: copier ─> memory          pages move between the tiers beside the compute
  │       streamer ─> memory        those of streamed turns, to the device and back, in each layer
  ├── forward ─> batch              an iteration's slices as tensors, and the model's logits
  │     ├── attention ─> kernels    one layer: wait, copy, write, attend
  │     ├── streamed_pass           the same where turns are streamed: group by group
  │     └── graphs                  decode iterations of a GPU as CUDA graphs
  │         piecewise_graphs        the others between their attentions
  ├── sampling                      logits to token ids
  └── reply ─> text                 token ids to text, and when a reply ends
parallel                            the same on several devices, a process for each
"""
