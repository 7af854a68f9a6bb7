"""An Iteration made real with torch and transformers.

loader ─> probe ─> shape         a model whose every layer is known to go through our attention
executor                         launch and collect
  ├── copier ─> kv_memory        pages move between the tiers beside the compute
  ├── batch                      an iteration's slices as tensors
  ├── attention ─> kernels       one layer: wait, copy, write, attend
  ├── sampler                    logits to token ids
  └── decoding ─> text           token ids to text, and when a reply ends
"""
