"""Media in, features out: decoding under limits, log-mel spectrograms, speech detection."""
