"""The worker's gRPC service: what routers and operators see of an engine."""
