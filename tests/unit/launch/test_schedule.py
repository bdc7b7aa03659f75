"""Linear warm-up in steps, then a cosine to zero."""

import pytest
import torch

from launch.schedule import fit_warmup, scheduler, warmup_cosine


def test_values_at_the_corners() -> None:
    def factor(step: int) -> float:
        return warmup_cosine(step, warmup=40, total=400)

    assert factor(0) == pytest.approx(1 / 40)
    assert factor(19) == pytest.approx(0.5)
    assert factor(39) == factor(40) == 1.0
    assert factor(220) == pytest.approx(0.5)
    assert 0 < factor(399) < 1e-4
    assert factor(400) == factor(1000) == 0.0


def test_no_warmup_starts_at_the_top() -> None:
    assert warmup_cosine(0, warmup=0, total=10) == 1.0


@pytest.mark.parametrize(("total", "warmup"), [(400, 40), (80, 40), (6, 3), (1, 0)])
def test_short_runs_shorten_the_warmup(total: int, warmup: int) -> None:
    assert fit_warmup(40, total) == warmup


def test_every_group_keeps_its_own_learning_rate() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]]}], lr=2
    )
    schedule = scheduler(warmup=4, total=12)(optimizer)
    for step in range(12):
        factor = warmup_cosine(step, warmup=4, total=12)
        assert schedule.get_last_lr() == pytest.approx([0.1 * factor, 2 * factor])
        optimizer.step()
        schedule.step()
