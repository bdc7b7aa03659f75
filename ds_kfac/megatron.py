"""K-FAC for megatron-core: ``ds_kfac.megatron.attach``."""

from ds_kfac.hosts.megatron import attach

__all__ = ["attach"]
