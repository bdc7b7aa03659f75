"""The small GPT: size, causality, reproducible weights."""

import pytest
import torch

from launch.model import GPT, GPTConfig, next_byte_loss


def test_default_model_has_the_documented_size() -> None:
    model = GPT(GPTConfig())
    embeddings, head, final_norm = 256 * 128 + 128 * 128, 256 * 128, 2 * 128
    block = (3 + 1 + 4 + 4) * 128 * 128 + 2 * 2 * 128
    expected = embeddings + 6 * block + final_norm + head
    assert sum(p.numel() for p in model.parameters()) == expected == 1_264_896


def test_linear_layers_have_no_bias_and_the_known_names() -> None:
    model = GPT(GPTConfig(layers=1, width=32))
    names = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert names == {f"blocks.0.{n}" for n in ("qkv", "proj", "fc1", "fc2")} | {"head"}
    assert all(m.bias is None for m in model.modules() if isinstance(m, torch.nn.Linear))


def test_no_position_sees_the_future() -> None:
    model = GPT(GPTConfig(layers=2, width=32, seq_len=16))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_weights_depend_on_the_seed_alone() -> None:
    config = GPTConfig(layers=1, width=32)
    torch.manual_seed(1)
    first = GPT(config, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second, other = GPT(config, seed=5), GPT(config, seed=6)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.head.weight, other.head.weight)
    assert state.numel() > 0


def test_untrained_loss_is_near_that_of_guessing() -> None:
    model = GPT(GPTConfig(layers=2, width=64))
    tokens = torch.randint(256, (8, 128))
    loss = next_byte_loss(model(tokens), tokens)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(5.545, abs=0.5)


def test_parameters_fall_into_hidden_and_other() -> None:
    model = GPT(GPTConfig(layers=2, width=32))
    hidden, other = model.hidden_parameters(), model.other_parameters()
    assert len(hidden) == 8
    assert len(hidden) + len(other) == len(list(model.parameters()))
    assert any(p is model.head.weight for p in other)
    assert any(p is model.tok.weight for p in other)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"layers": 0}, "layers must be at least 1, got 0"), ({"heads": 3}, "not a multiple")],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)
