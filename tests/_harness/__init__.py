"""Multi-process test harness: persistent gloo workers, collective logs and fault injection.

Usage in a test module (job functions must be module-level, they are sent by reference)::

    def _job(rank, world_size, scale):
        value = torch.full((3,), float(rank)) * scale
        dist.all_reduce(value)
        return value

    def test_sum(run_world):
        results = run_world(2, _job, 10.0)  # one result per rank
"""

from tests._harness.errors import CollectiveMismatchError, ErrorInfo, WorldError
from tests._harness.pool import World, close_all, preload, world

__all__ = [
    "CollectiveMismatchError",
    "ErrorInfo",
    "World",
    "WorldError",
    "close_all",
    "preload",
    "world",
]
