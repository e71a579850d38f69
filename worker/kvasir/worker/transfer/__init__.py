"""KV transfer between workers: the receiver calls, the holder streams, the RPC is the lease."""
