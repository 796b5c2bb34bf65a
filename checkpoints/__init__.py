"""Reading and writing weights and tokenizers, and the shipped drafter."""
