"""The router: OpenAI HTTP API, tokenisation, worker choice, retries and replay."""
