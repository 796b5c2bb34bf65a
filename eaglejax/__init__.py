"""INT4 language models served faster by EAGLE-3 speculative decoding, in JAX."""
