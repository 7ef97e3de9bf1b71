"""Sensorium: one engine that hears, sees and reads, behind one OpenAI-compatible API."""
