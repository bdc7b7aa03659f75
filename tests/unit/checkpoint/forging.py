"""Checkpoints that somebody damaged, or forged with care: hashes and checksums are right."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["content"]
    return content


def reseal(folder: Path, content: dict[str, Any], **whole: Any) -> None:
    """Write a manifest with a correct checksum."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(canonical.encode()).hexdigest()
    manifest = {
        "format": "ds_kfac checkpoint",
        "version": 1,
        "checksum": checksum,
        "content": content,
    }
    (folder / "manifest.json").write_text(json.dumps({**manifest, **whole}))


def data_file(folder: Path, index: int = 0) -> Path:
    return folder / content_of(folder)["files"][index]["name"]


def rehash(folder: Path, index: int = 0) -> None:
    """Let the manifest agree with a changed data file."""
    content = content_of(folder)
    data = data_file(folder, index).read_bytes()
    content["files"][index] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    reseal(folder, content)


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the manifest's content and seal it again."""

    def forge(folder: Path) -> None:
        content = content_of(folder)
        change(content)
        reseal(folder, content)

    return forge


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors of the first file; hash and size are right again."""

    def forge(folder: Path) -> None:
        path = data_file(folder)
        found = load_file(path)
        change(found)
        save_file(found, path)
        rehash(folder)

    return forge


def raw(change: Callable[[bytes], bytes], *, hashed: bool) -> Callable[[Path], None]:
    """Change the bytes of the first file."""

    def forge(folder: Path) -> None:
        path = data_file(folder)
        path.write_bytes(change(path.read_bytes()))
        if hashed:
            rehash(folder)

    return forge


def flip(data: bytes) -> bytes:
    """One bit, in the middle of the tensors."""
    place = len(data) - 40
    return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]


def link(folder: Path) -> None:
    """The data file becomes a link to itself elsewhere."""
    path = data_file(folder)
    target = folder.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def pipe(folder: Path) -> None:
    """Opening it would wait for ever."""
    path = data_file(folder)
    path.unlink()
    os.mkfifo(path)


def manifest_text(change: Callable[[str], str]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(change(path.read_text()))

    return forge


def manifest_link(folder: Path) -> None:
    path = folder / "manifest.json"
    path.rename(folder / "other.json")
    path.symlink_to("other.json")


def named(name: str) -> Callable[[Path], None]:
    """The manifest calls its file by another name."""
    return edit(lambda content: content["files"][0].update(name=name))


HUGE_HEADER = struct.pack("<Q", 1 << 60)
FIRST = "0/a.0.total"
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    # Damage.
    "a flipped bit": (raw(flip, hashed=False), "E301 .*sha256 differs"),
    "a truncated file": (raw(lambda data: data[:-40], hashed=False), "E301 .*is 40 bytes short"),
    "a longer file": (raw(lambda data: data + b"xx", hashed=False), "E301 .*is 2 bytes too long"),
    "a missing file": (lambda folder: data_file(folder).unlink(), "E301 .*cannot be read: No such"),
    "a changed manifest": (
        manifest_text(lambda text: text.replace('"step": 3', '"step": 2')),
        "E301 .*checksum differs",
    ),
    "half a manifest": (
        manifest_text(lambda text: text[: len(text) // 2]),
        "E306 .*not a manifest",
    ),
    # Names that lead out of the folder, and things that are not files.
    "path traversal": (named("../step3-0123456789abcdef-rank00000.safetensors"), "E306 .*files"),
    "an absolute path": (named("/etc/passwd"), "E306 .*files.0.name"),
    "a name with a line break": (
        named("step3-0123456789abcdef-rank00000.safetensors\n"),
        "E306 .*files.0.name",
    ),
    "a symbolic link": (link, "E306 .*symbolic link"),
    "a linked manifest": (manifest_link, "E306 .*symbolic link"),
    "a pipe": (pipe, "E306 .*not a regular file"),
    # Files whose hashes are right.
    "a huge header": (raw(lambda data: HUGE_HEADER + data[8:], hashed=True), "E301 .*safetensors"),
    "a header that is no JSON": (
        raw(lambda data: data[:8] + b"\xff" * 40 + data[48:], hashed=True),
        "E301 .*safetensors",
    ),
    "a pickle": (raw(lambda data: b"\x80\x04K\x01.", hashed=True), "E301 .*safetensors"),
    "an empty file": (raw(lambda data: b"", hashed=True), "E301 .*safetensors"),
    "a wrong dtype": (
        tensors(lambda t: t.update({FIRST: t[FIRST].to(torch.bfloat16)})),
        "E302 .*bfloat16, expected torch.float32",
    ),
    "a wrong shape": (
        tensors(lambda t: t.update({FIRST: torch.zeros(3)})),
        r"E302 .*layer 0: a.0.total is \(3,\), expected \(15,\)",
    ),
    "not a number": (
        tensors(lambda t: t[FIRST].fill_(float("nan"))),
        "E302 .*a.0.total is not finite",
    ),
    "an unknown entry": (
        tensors(lambda t: t.update({"0/evil": torch.zeros(1)})),
        "E302 .*layer 0: evil is unknown",
    ),
    "a missing entry": (tensors(lambda t: t.pop(FIRST)), "E302 .*a.0.total is missing"),
    "an unlisted layer": (
        tensors(lambda t: t.update({"ghost/a.0.total": torch.zeros(1)})),
        "E306 .*manifest: ghost",
    ),
    # Manifests whose checksum is right.
    "an unknown version": (
        lambda folder: reseal(folder, content_of(folder), version=2),
        "E308 .*has version 2; this version of ds_kfac reads 1",
    ),
    "another format": (
        lambda folder: reseal(folder, content_of(folder), format="pickle"),
        "E306 .*not a manifest of ds_kfac",
    ),
    "a duplicate layer": (
        edit(lambda content: content["layers"].append(content["layers"][0])),
        "E306 .*layer '0' occurs twice",
    ),
    "a duplicate file": (
        edit(lambda content: content["files"].append(content["files"][0])),
        "E306 .*occurs twice",
    ),
    "a duplicate key": (
        manifest_text(lambda text: text.replace('"step": 3', '"step": 3, "step": 3')),
        "E306 .*'step' occurs twice",
    ),
    "a layer in no file": (
        edit(lambda content: content["layers"][0].update(file=7)),
        "E306 .*in file 7, which is none",
    ),
    "counters that are not finite": (
        edit(lambda content: content["counters"][0].update(steps=float("inf"))),
        "E306 .*Infinity is not a number",
    ),
    "negative counters": (
        edit(lambda content: content["counters"][0].update(skipped=-1)),
        "E306 .*counters.0.skipped",
    ),
    "a counter that is a fraction": (
        edit(lambda content: content["counters"][0].update(captures=1.5)),
        "E306 .*counters.0.captures",
    ),
    "an unknown counter": (
        edit(lambda content: content["counters"][0].update(bogus=1)),
        "E302 .*wrong counters",
    ),
    "a counter beyond exact numbers": (
        edit(lambda content: content["counters"][0].update(skipped=2**53 + 1)),
        "E302 .*wrong counters",
    ),
    "counters of a future": (
        edit(lambda content: content["counters"][0].update(captures=2**40)),
        "E302 .*more than one per step",
    ),
    "a state of the past": (
        edit(lambda c: (c.update(step=1), c["counters"][0].update(c["counters"][0], steps=1))),
        "E302 .*wrong counters",
    ),
    "a layer of a future": (
        tensors(lambda t: t["0/folded_at"].fill_(10**6)),
        "E302 .*layer 0: folded_at is 1000000, above 3: the state is of step 3",
    ),
    "counters of another step": (
        edit(lambda content: content["counters"][0].update(steps=9)),
        "E306 .*not those of step 3",
    ),
    "no counters": (edit(lambda content: content.update(counters=[])), "E306 .*counters"),
    "endless nesting": (manifest_text(lambda text: "[" * 100_000), "E306 .*not a manifest"),
    "a list": (manifest_text(lambda text: "[1]"), "E306 .*not a manifest of ds_kfac"),
    "an unknown field": (edit(lambda content: content.update(run="rm")), "E306 .*run"),
    # Other models.
    "a missing layer": (
        edit(lambda content: content["layers"].pop()),
        "E302 .*layer 2: not in the checkpoint",
    ),
    "a foreign layer": (
        edit(lambda content: content["layers"].append({**content["layers"][0], "name": "h.9"})),
        "E302 .*layer h.9: not preconditioned in this model",
    ),
    "other dims": (
        edit(lambda content: content["layers"][0].update(d_out=7)),
        "E302 .*layer 0: is 6 x 5 in the model, 7 x 5 in the checkpoint",
    ),
    "other blocks": (
        edit(lambda content: content["layers"][0].update(a_blocks=[[0, 2], [2, 5]])),
        "E302 .*layer 0: is cut into other blocks .*max_factor_dim",
    ),
}
