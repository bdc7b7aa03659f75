"""K-FAC state in DeepSpeed's checkpoints: ``save_dir/tag/kfac/``.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* ``save_checkpoint`` moves ``latest`` last, so that what is on disk before it is called is
  complete by then; ``save_latest=False`` leaves that to us; it ends with a barrier;
* ``client_state`` comes back from ``load_checkpoint``, and from a universal checkpoint too;
* the tools that read a checkpoint (``zero_to_fp32``, ``ds_to_universal``) take files by their
  prefixes and suffixes, and leave the folder ``kfac`` alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ds_kfac.checkpoint import disk
from ds_kfac.checkpoint.manifest import FILE
from ds_kfac.checkpoint.stateful import Staged
from ds_kfac.comm.vote import together
from ds_kfac.errors import StateError
from ds_kfac.hosts import deepspeed_universal
from ds_kfac.preconditioner import KFAC

logger = logging.getLogger(__name__)

FOLDER = "kfac"
RECORD = "ds_kfac"
"""Key of ``client_state`` that says which K-FAC state belongs to a checkpoint."""


def install(engine: Any, kfac: KFAC) -> None:
    """Make the engine's checkpoints carry K-FAC state; undone by ``kfac.detach()``."""
    checkpoints = _Checkpoints(engine, kfac)
    for name in ("save_checkpoint", "load_checkpoint"):
        original, replacement = getattr(engine, name), getattr(checkpoints, name)

        def call(
            *args: Any,
            _original: Callable[..., Any] = original,
            _replacement: Callable[..., Any] = replacement,
            **kwargs: Any,
        ) -> Any:
            bound = inspect.signature(_original).bind(*args, **kwargs)
            bound.apply_defaults()
            return _replacement(_original, bound)

        # With the original's signature, which Hugging Face's Trainer looks at.
        setattr(engine, name, functools.wraps(original)(call))
        kfac.on_detach(functools.partial(engine.__dict__.pop, name, None))


class _Checkpoints:
    """Both directions for one engine."""

    def __init__(self, engine: Any, kfac: KFAC) -> None:
        self._engine = engine
        self._kfac = kfac

    def save_checkpoint(self, original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        """Save K-FAC's state first: it is complete before ``latest`` moves."""
        arguments, engine = bound.arguments, self._engine
        if not arguments["save_dir"]:
            return original(*bound.args, **bound.kwargs)  # DeepSpeed says what is wrong
        tag = arguments["tag"]
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        save_id = self._kfac.save(
            Path(arguments["save_dir"], tag, FOLDER),
            host_step=int(engine.global_steps),
            leads=engine.local_rank == 0 if engine.use_node_local_storage() else None,
        )
        # A new mapping: the default is one object for all calls.
        record = {"save_id": save_id, "tag": tag}
        arguments["client_state"] = {**(arguments["client_state"] or {}), RECORD: record}
        moves = arguments["save_latest"] and self._moves_latest()
        if moves:
            arguments["save_latest"] = False
        result = original(*bound.args, **bound.kwargs)
        if moves:
            self._move_latest(Path(arguments["save_dir"]), tag)
        return result

    def _moves_latest(self) -> bool:
        """Whether ``latest`` is moved here: DeepSpeed's first rank does not wait for the others.

        A rank killed while it writes its part left a ``latest`` that names half a checkpoint.
        Writers in the background have their own order.
        """
        return type(self._engine.checkpoint_engine).__name__ == "TorchCheckpointEngine"

    def _move_latest(self, folder: Path, tag: str) -> None:
        """Once all ranks have written everything; in one move, so that it is never empty."""
        leads = self._engine.global_rank == 0
        together(
            self._kfac.model_communicator,
            lambda: disk.write_atomically(folder / "latest", tag.encode()) if leads else None,
        )

    def load_checkpoint(self, original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        """Read and check K-FAC's state, load the engine, then take the state into use."""
        arguments, kfac = bound.arguments, self._kfac
        if arguments["load_module_only"] or not arguments["load_optimizer_states"]:
            if kfac.config.resume != "fresh":
                logger.info("optimizer states are not loaded, and K-FAC's state neither")
            path, client_state = original(*bound.args, **bound.kwargs)
            return path, _without_record(client_state)[0]
        folder = together(
            kfac.model_communicator,
            lambda: self._folder(arguments["load_dir"], arguments["tag"]),
        )
        universal = self._engine.load_universal_checkpoint()
        staged = None if universal else kfac.stage(folder)
        with deepspeed_universal.loading(self._engine) if universal else nullcontext():
            path, client_state = original(*bound.args, **bound.kwargs)
        client_state, record = _without_record(client_state)
        if universal:
            staged = kfac.stage(_universal_source(folder, record))
        if path is not None:
            self._check_pair(staged, record)
            kfac.adopt(staged)
        return path, client_state

    def _folder(self, load_dir: str, tag: Any) -> Path | None:
        """Where the state of a tag is; None if DeepSpeed will find no tag."""
        if tag is None:
            universal = self._engine.load_universal_checkpoint()
            pointer = Path(load_dir, "latest_universal" if universal else "latest")
            if not pointer.is_file():
                return None
            tag = pointer.read_text().strip()
            if not tag:
                raise StateError(
                    "E301",
                    f"{pointer} is empty: the job was killed while it was written. Name a tag; "
                    f"complete: {', '.join(_complete_tags(Path(load_dir))) or 'none'}",
                )
        return Path(load_dir, str(tag), FOLDER)

    def _check_pair(self, staged: Staged | None, record: Any) -> None:
        """Refuse a K-FAC state that was not saved together with the engine's.

        Every rank comes to the same result: manifest and record are the same everywhere.
        """
        if staged is None or staged.manifest is None:
            return
        manifest = staged.manifest
        if manifest.host_step != self._engine.global_steps:
            raise StateError(
                "E305",
                f"the K-FAC state was saved at step {manifest.host_step} of the engine, which has "
                f"loaded step {self._engine.global_steps}: the folders of two checkpoints are "
                "mixed. Set kfac.resume to 'fresh' to go on without the state",
            )
        save_id = record.get("save_id") if isinstance(record, dict) else None
        if manifest.save_id != save_id:
            raise StateError(
                "E305",
                f"the K-FAC state (save {manifest.save_id}) was not saved together with the "
                f"engine's checkpoint (save {save_id}): its folder was copied from another run, or "
                "the save was interrupted. Set kfac.resume to 'fresh' to go on without the state",
            )


def _complete_tags(folder: Path) -> list[str]:
    """Tags whose K-FAC state is complete, the oldest first."""
    found = [path for path in folder.glob(f"*/{FOLDER}/{FILE}") if path.is_file()]
    return [path.parents[1].name for path in sorted(found, key=lambda path: path.stat().st_mtime)]


def _without_record(client_state: Any) -> tuple[Any, Any]:
    """What the user had saved, and our own entry."""
    if not isinstance(client_state, dict):
        return client_state, None
    return {k: v for k, v in client_state.items() if k != RECORD}, client_state.get(RECORD)


def _universal_source(folder: Path | None, record: Any) -> Path | None:
    """The K-FAC state of a universal checkpoint.

    The conversion does not copy it; it is next to the universal folder, unless it was moved.
    """
    if folder is None or (folder / FILE).exists() or not isinstance(record, dict):
        return folder
    source = folder.parent.parent / Path(str(record.get("tag"))).name / FOLDER
    return source if source.is_dir() else folder
