"""What people have from llama.cpp and Ollama, turned once into a folder that everything else understands.

A GGUF file holds weights (mostly quantised), tokenizer and chat template.  `convert` writes the same as
config.json, model.safetensors, tokenizer.json and their like; from then on nothing knows where it came
from, and the reference of exactness is plain `transformers` on that folder.

Nothing is guessed.  llama.cpp has its own names for what a model computes; those that are listed here
(`architectures`, `tokenizer`) mean exactly what `transformers` computes, and a file that says anything else
is refused with the key, tensor or rule that is not known.
"""

from __future__ import annotations

MAGIC = b"GGUF"
