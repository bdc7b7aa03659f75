"""State on disk: safetensors per rank and one JSON manifest, complete or invisible."""
