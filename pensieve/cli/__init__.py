"""The command line, with one module per command. Slow imports are inside the command that needs them."""
