"""The OpenAI-compatible HTTP API: requests to generations, tokens to responses."""
