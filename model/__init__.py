"""Weights, tokenizer and one forward pass. Importing this package imports neither torch nor transformers."""
