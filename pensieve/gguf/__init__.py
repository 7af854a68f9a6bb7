"""Convert a GGUF file of llama.cpp or Ollama into a folder in the Hugging Face layout.

A GGUF file contains weights (usually quantised), the tokenizer and the chat template. `convert` writes them
as config.json, model.safetensors, tokenizer.json and so on. The rest of Pensieve handles the folder like any
other model. Its results are compared with those of plain `transformers` on the same folder.

Nothing is guessed. `architectures` and `tokenizer` list the names in GGUF files whose meaning is exactly what
`transformers` computes. A file with any other key, tensor or rule is refused, and the error names it.
"""

from __future__ import annotations

MAGIC = b"GGUF"
