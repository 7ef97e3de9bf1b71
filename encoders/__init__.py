"""Features in, embeddings out: one encoder architecture a file."""
