"""The text, its split, and batches that do not depend on the number of ranks."""

from pathlib import Path

import pytest
import torch

from launch.data import Batches, DataError, Text, load_text, validation_sequences


def folder_of(root: Path, files: int = 60) -> Path:
    for index in range(files):
        (root / f"part{index:02d}.txt").write_bytes(bytes([65 + index % 26]) * 100)
    return root


@pytest.fixture(scope="module")
def stdlib() -> Text:
    return load_text()


def test_default_text_is_the_standard_library_and_is_large_enough(stdlib: Text) -> None:
    assert stdlib.train.dtype == stdlib.val.dtype == torch.uint8
    assert stdlib.train.numel() > 4_000_000
    assert 0.01 < stdlib.val.numel() / stdlib.train.numel() < 0.2
    assert "standard library of Python 3" in stdlib.description
    assert "sha256" in stdlib.description


def test_loading_twice_gives_the_same_text(stdlib: Text) -> None:
    again = load_text()
    assert torch.equal(again.train, stdlib.train)
    assert torch.equal(again.val, stdlib.val)
    assert again.description == stdlib.description


def test_folder_is_split_by_file_name_only(tmp_path: Path) -> None:
    before = load_text(folder_of(tmp_path))
    held_out = set(before.val.tolist())
    (tmp_path / "part00.txt").write_bytes(b"changed" * 30)
    after = load_text(tmp_path)
    assert 0 < before.val.numel() < before.train.numel()
    assert set(after.val.tolist()) - set(b"changed") == held_out - {65}


def test_folder_leaves_out_binary_and_hidden_files(tmp_path: Path) -> None:
    folder_of(tmp_path)
    expected = load_text(tmp_path)
    (tmp_path / "image.bin").write_bytes(b"\0\1\2" * 100)
    (tmp_path / ".secret").write_bytes(b"zzz" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"zzz" * 100)
    assert torch.equal(load_text(tmp_path).train, expected.train)


def test_single_file_keeps_its_tail_for_validation(tmp_path: Path) -> None:
    content = bytes(range(1, 201)) * 10
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    text = load_text(path)
    assert bytes(text.train.tolist()) + bytes(text.val.tolist()) == content
    assert text.val.numel() == len(content) // 20


def test_few_files_still_get_a_validation_part(tmp_path: Path) -> None:
    text = load_text(folder_of(tmp_path, files=2))
    assert text.train.numel() > 0
    assert text.val.numel() > 0


def test_missing_text_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*no such file or folder"):
        load_text(tmp_path / "nowhere")


def test_folder_without_text_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no text files found in .*--text"):
        load_text(tmp_path)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="the text is empty"):
        load_text(tmp_path / "empty.txt")


@pytest.mark.parametrize(("length", "part"), [(60, "training"), (400, "validation")])
def test_too_short_text_names_the_part_and_the_cure(tmp_path: Path, length: int, part: str) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * length)
    with pytest.raises(DataError, match=rf"the {part} text has .* at least 130.*--seq-len"):
        load_text(path).require(128)


def test_shortest_accepted_text_can_be_sampled() -> None:
    data = torch.arange(10, dtype=torch.uint8)
    Text(data, data, "").require(8)
    batches = Batches(data, seq_len=8, global_batch=64, seed=0)
    assert set(batches.starts(0).tolist()) == {0, 1}
    validation_sequences(data, seq_len=8, count=5)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_global_batch_does_not_depend_on_ranks_or_accumulation(world: int, count: int) -> None:
    data = torch.randint(256, (5000,), dtype=torch.uint8)
    batches = Batches(data, seq_len=32, global_batch=16, seed=3)
    whole, _ = next(batches.micro_batches(7, rank=0, world=1, count=1))
    pieces = [
        inputs
        for rank in range(world)
        for inputs, _ in batches.micro_batches(7, rank=rank, world=world, count=count)
    ]
    assert len(pieces) == world * count
    assert torch.equal(torch.cat(pieces), whole)


def test_targets_are_the_next_bytes() -> None:
    data = torch.randint(256, (500,), dtype=torch.uint8)
    batches = Batches(data, seq_len=16, global_batch=4, seed=0)
    inputs, targets = next(batches.micro_batches(0, rank=0, world=1, count=1))
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    start = int(batches.starts(0)[0])
    assert torch.equal(targets[0], data[start + 1 : start + 17].long())


def test_batches_change_with_step_and_seed() -> None:
    data = torch.zeros(100_000, dtype=torch.uint8)
    first = Batches(data, seq_len=8, global_batch=32, seed=0)
    second = Batches(data, seq_len=8, global_batch=32, seed=1)
    assert torch.equal(first.starts(5), first.starts(5))
    assert not torch.equal(first.starts(5), first.starts(6))
    assert not torch.equal(first.starts(5), second.starts(5))


def test_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    batches = Batches(torch.zeros(100, dtype=torch.uint8), seq_len=8, global_batch=16, seed=0)
    with pytest.raises(DataError, match="train_batch_size 16 is not a multiple of 3 ranks"):
        next(batches.micro_batches(0, rank=0, world=3, count=1))


def test_validation_sequences_cover_the_text_evenly() -> None:
    data = torch.arange(250, dtype=torch.uint8)
    inputs, targets = validation_sequences(data, seq_len=9, count=11)
    assert inputs[:, 0].tolist() == [24 * index for index in range(11)]
    assert targets[-1, -1] == 249
    again, _ = validation_sequences(data, seq_len=9, count=11)
    assert torch.equal(inputs, again)
