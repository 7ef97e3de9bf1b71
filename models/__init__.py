"""Model families, their weights and where those come from."""
