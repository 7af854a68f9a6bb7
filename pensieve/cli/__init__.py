"""The command line.  Heavy imports happen inside the command that needs them."""
