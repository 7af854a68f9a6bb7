"""The parts that `scripts/train_builtin.py` trains: tokenizer, contexts and network."""
