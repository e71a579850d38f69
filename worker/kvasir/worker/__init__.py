"""A worker: model, paged KV cache, scheduler, KV transfer, its own health and load."""
