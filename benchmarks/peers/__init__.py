"""Other engines on the same model file, as contenders of the benchmark."""
