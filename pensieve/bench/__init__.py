"""Measures this machine and this build; each bench checks what it times."""
