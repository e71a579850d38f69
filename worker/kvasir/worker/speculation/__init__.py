"""Speculative decoding: guess several tokens cheaply, verify them in one step."""
