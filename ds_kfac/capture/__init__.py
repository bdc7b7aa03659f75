"""Statistics of one optimizer step, collected in forward and backward."""
