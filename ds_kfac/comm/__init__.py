"""The only door to ``torch.distributed`` besides the hosts."""
