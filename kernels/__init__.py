"""Attention over paged caches and the numerical building blocks shared by encoders and models."""
