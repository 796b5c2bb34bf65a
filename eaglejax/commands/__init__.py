"""The commands of the `eaglejax` program, one module each."""
