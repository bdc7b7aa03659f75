"""What users read: the layer table, metrics and log lines."""
