"""K-FAC state on several ranks: errors and resharding, under DistributedDataParallel."""

from __future__ import annotations

import pytest

from tests._harness import world
from tests.hosts import checkpoint_jobs as jobs

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("what", "code"), [("version", "E308"), ("shape", "E302"), ("step", "E203")]
)
def test_a_state_that_fits_on_one_rank_only_is_loaded_nowhere(what: str, code: str) -> None:
    """The good rank loaded and went on to the next vote, the bad one raised: a hang on NCCL."""
    errors = world(2).run_expecting_errors(jobs.load_damaged_on_one_rank, what)
    assert all(error is not None for error in errors)
    assert {error.same_error for error in errors if error} == {
        (errors[0].type_name, errors[0].text)  # type: ignore[union-attr]
    }
    assert f"KFAC-{code}" in errors[0].text  # type: ignore[union-attr]
