"""The command line, a file per command.  Heavy imports happen inside the command that needs them."""
