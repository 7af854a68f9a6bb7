"""Convert a GGUF file of llama.cpp or Ollama into a folder in the Hugging Face layout, once.

A GGUF file holds weights (usually quantised), tokenizer and chat template. `convert` writes them as
config.json, model.safetensors, tokenizer.json and so on. Nothing else depends on where the folder came
from, and the reference of exactness is plain `transformers` on that folder.

Nothing is guessed. llama.cpp has its own names for what a model computes. The names listed in
`architectures` and `tokenizer` mean exactly what `transformers` computes. A file with any other key, tensor
or rule is refused, and the error names it.
"""

from __future__ import annotations

MAGIC = b"GGUF"
