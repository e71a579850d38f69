"""The operator: ModelService, the pure plan, and the runtimes that carry it out."""
