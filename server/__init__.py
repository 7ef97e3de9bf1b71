"""The command line and the OpenAI-compatible HTTP API."""
