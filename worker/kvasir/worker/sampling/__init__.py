"""Drawing output tokens from logits."""
