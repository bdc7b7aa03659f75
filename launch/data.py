"""Byte-level text, its split into training and validation, and batches that ignore the rank count.

The default text needs no download: the sources of the Python standard library. Every file goes
whole into training or validation, by the hash of its name, so that the split does not depend on
the order of the files.
"""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VAL_ONE_IN = 20
"""One file in this many is kept for validation (and this share of a single file's bytes)."""

STDLIB_SKIPPED = frozenset(
    {"dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
    | {"__pycache__", "test", "tests"}
)
BINARY_PROBE_BYTES = 8192
FILE_END = b"\0"


class DataError(ValueError):
    """The text cannot be used for training; the message says why and what to do."""


@dataclass(frozen=True)
class Text:
    """A text cut into training and validation.

    Attributes:
        train: [bytes] uint8.
        val: [bytes] uint8.
        description: one line that identifies the text: size, hash, origin.
    """

    train: Tensor
    val: Tensor
    description: str

    def require(self, seq_len: int) -> None:
        """Check that one sequence of `seq_len` bytes and its shifted target fit in each part.

        Raises:
            DataError: a part is too short.
        """
        for part, data in (("training", self.train), ("validation", self.val)):
            if data.numel() < seq_len + 2:
                raise DataError(
                    f"the {part} text has {data.numel()} bytes, but a sequence length of "
                    f"{seq_len} needs at least {seq_len + 2}; give a longer text with --text "
                    "or a smaller --seq-len"
                )


def load_text(source: Path | None = None) -> Text:
    """Read a text: one file, a folder of text files, or (default) the standard library's sources.

    Args:
        source: a file, a folder, or None.

    Raises:
        DataError: there is nothing to read, or it is empty.
    """
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = list(_stdlib_files(root))
        origin = f"standard library of Python {platform.python_version()}"
    elif source.is_dir():
        root, files = source, list(_folder_files(source))
        origin = f"folder {source}"
    elif source.is_file():
        root, files, origin = source.parent, [source], f"file {source}"
    else:
        raise DataError(f"--text {source}: no such file or folder")
    if not files:
        raise DataError(f"no text files found in {root}; give a file or folder with --text")
    pieces = [(path.relative_to(root).as_posix(), _read(path)) for path in files]
    if sum(len(content) for _, content in pieces) == 0:
        raise DataError(f"the text is empty ({origin}); give another one with --text")
    train, val = _split(pieces)
    return Text(_tensor(train), _tensor(val), _describe(train, val, len(files), origin))


def _stdlib_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if STDLIB_SKIPPED.isdisjoint(path.relative_to(root).parts[:-1]):
            yield path


def _folder_files(root: Path) -> Iterator[Path]:
    """Yield the text files below `root`; hidden ones and those with NUL bytes are left out."""
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if hidden or not path.is_file():
            continue
        with path.open("rb") as stream:
            if b"\0" not in stream.read(BINARY_PROBE_BYTES):
                yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _split(pieces: list[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Split by file name, or by position where that would leave one side empty."""
    train, val = bytearray(), bytearray()
    for name, content in pieces:
        digest = hashlib.sha256(name.encode()).digest()
        part = val if int.from_bytes(digest, "big") % VAL_ONE_IN == 0 else train
        part += content + FILE_END
    if len(pieces) > 1 and train and val:
        return bytes(train), bytes(val)
    joined = FILE_END.join(content for _, content in pieces)
    cut = len(joined) - max(1, len(joined) // VAL_ONE_IN)
    return joined[:cut], joined[cut:]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _describe(train: bytes, val: bytes, files: int, origin: str) -> str:
    digest = hashlib.sha256(train + val).hexdigest()[:12]
    return (
        f"{origin}: {files} file(s), {len(train):,} bytes for training, "
        f"{len(val):,} for validation, sha256 {digest}"
    )


def _windows(data: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Cut inputs and next-byte targets, each [len(starts), seq_len] int64, out of `data`."""
    rows = data[starts[:, None] + torch.arange(seq_len + 1)].long()
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class Batches:
    """Training batches that depend on (seed, step) alone.

    The whole global batch is drawn everywhere and each rank takes its slice, so a run sees the
    same bytes in every step whatever its rank count or gradient accumulation.

    Attributes:
        data: [bytes] uint8.
        seq_len: bytes per sequence.
        global_batch: sequences per optimizer step, over all ranks and micro-batches.
        seed: which sequence of batches.
    """

    data: Tensor
    seq_len: int
    global_batch: int
    seed: int

    def starts(self, step: int) -> Tensor:
        """First positions of all sequences of a step, [global_batch] int64."""
        digest = hashlib.sha256(f"{self.seed}:{step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        last = self.data.numel() - self.seq_len
        return torch.randint(last, (self.global_batch,), generator=generator)

    def micro_batches(
        self, step: int, *, rank: int, world: int, count: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the (inputs, targets) of one rank, each [rows, seq_len] int64.

        Args:
            step: optimizer step.
            rank: data-parallel rank.
            world: number of data-parallel ranks.
            count: micro-batches per step.

        Raises:
            DataError: the global batch cannot be cut evenly.
        """
        if self.global_batch % (world * count):
            raise DataError(
                f"train_batch_size {self.global_batch} is not a multiple of {world} ranks x "
                f"{count} micro-batches"
            )
        rows = self.global_batch // (world * count)
        pieces = self.starts(step).view(world, count, rows)[rank]
        for starts in pieces:
            yield _windows(self.data, starts, self.seq_len)


def validation_sequences(data: Tensor, *, seq_len: int, count: int) -> tuple[Tensor, Tensor]:
    """Fixed sequences spread evenly over a text.

    Args:
        data: [bytes] uint8.
        seq_len: bytes per sequence.
        count: number of sequences; they overlap where the text is too short for so many.

    Returns:
        Inputs and targets, each [count, seq_len] int64.
    """
    last = data.numel() - seq_len - 1
    starts = (torch.arange(count) * last) // max(1, count - 1)
    return _windows(data, starts, seq_len)
