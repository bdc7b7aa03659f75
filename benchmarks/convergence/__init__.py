"""Steps and time to a loss: K-FAC against tuned baselines on text and images."""
