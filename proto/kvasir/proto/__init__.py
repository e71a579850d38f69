"""Wire contracts: protobuf services, block hashing, refusal reasons. No I/O, no policy."""
