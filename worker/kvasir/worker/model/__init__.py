"""The model: where it comes from, its weights, its decoder and its KV cache."""
