"""K-FAC state in Megatron's checkpoints, as part of the optimizer's state.

In ``torch_dist`` checkpoints every entry of a layer's state is a sharded tensor of its own, which
the layer's owner writes; whoever owns the layer after a resume reads it, on any number of
data-parallel ranks and pipeline stages, and with whole layers on any number of tensor ranks. A
manifest, the same as beside ``safetensors``, says what there is to read. A state that
``ds-kfac convert`` has put into the checkpoint's folder goes before the one in its files.

Facts about megatron-core that this file relies on, each covered by a test:

* ``sharded_state_dict(..., is_loading=...)`` of the optimizer describes what is saved or loaded,
  on all ranks, and ``load_state_dict`` gets what ``dist_checkpointing.load`` made of it;
* a key that the checkpoint lacks makes ``load`` fail, so that what is wanted has to be decided
  where the checkpoint is known: in ``dist_checkpointing.load``;
* a ``LocalNonpersistentObject`` comes out of ``load`` as it went in.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_kfac.checkpoint import writer
from ds_kfac.checkpoint.manifest import FILE, Manifest, StoredFile, parse
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.vote import together
from ds_kfac.errors import StateError
from ds_kfac.hosts.megatron_files import KEY, MANIFEST, NUMBER, plain
from ds_kfac.preconditioner import KFAC

_MARK = "_ds_kfac_resolves"
_DEGREES = "degrees"


class Request:
    """Stands in a state dict for K-FAC's state until the checkpoint is known.

    Args:
        names: Stored names of the layers that this rank owns.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = names


class _Absent:
    """What a request becomes where the checkpoint has no K-FAC state."""


class _Converted:
    """What a request becomes where the checkpoint's folder has a converted state.

    Args:
        folder: Folder of the state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder


def install(kfac: KFAC, optimizer: Any, wrap: Callable[..., None]) -> None:
    """Make the optimizer's state carry K-FAC's.

    Args:
        kfac: The preconditioner.
        optimizer: Megatron's optimizer.
        wrap: Replaces a method of an object until ``kfac.detach()``: object, name, replacement
            that is given the original first, preconditioner.
    """
    carrier = _Carrier(kfac)
    for name in ("state_dict", "sharded_state_dict", "load_state_dict"):
        wrap(optimizer, name, getattr(carrier, name), kfac)
    _resolve_on_load()


class _Carrier:
    """Methods of an optimizer around the ones it had."""

    def __init__(self, kfac: KFAC) -> None:
        self._kfac = kfac

    def sharded_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """For torch_dist. A collective."""
        state = original(*args, **kwargs)
        is_loading = kwargs.get("is_loading", args[1] if len(args) > 1 else False)
        if is_loading:
            from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

            state[KEY] = LocalNonpersistentObject(Request(self._kfac.stored_names()))
        else:
            state[KEY] = _sharded(self._kfac)
        return state

    def state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """For the format ``torch``, which data-parallel rank 0 writes alone."""
        state = original(*args, **kwargs)
        state[KEY] = {**self._kfac.state_dict(), _DEGREES: _degrees()}
        return state

    def load_state_dict(self, original: Callable[..., Any], state: Any) -> Any:
        """Check K-FAC's state, load the optimizer's, take K-FAC's into use. A collective."""
        mine = state.get(KEY) if isinstance(state, Mapping) else None
        if isinstance(state, Mapping):
            state = {key: value for key, value in state.items() if key != KEY}
        if isinstance(mine, Request):
            raise StateError(
                "E304",
                "the checkpoint was read by a dist_checkpointing.load that was imported before "
                "ds_kfac.megatron.attach was called; call it as an attribute of the module "
                "megatron.core.dist_checkpointing",
            )
        kfac = self._kfac
        if mine is None or isinstance(mine, _Absent) or kfac.config.resume == "fresh":
            staged = kfac.stage(None)
        elif isinstance(mine, _Converted):
            staged = kfac.stage(mine.folder)
        elif "manifest" in mine:
            manifest = parse(bytes(mine["manifest"].cpu().numpy()), "K-FAC's state")
            layers = mine.get("layers", {})  # Megatron drops what is empty
            staged = kfac.stage_from(
                manifest, lambda names: {name: plain(layers.get(name, {})) for name in names}
            )
        else:
            together(Communicator(dist.group.WORLD, Ledger()), lambda: _check_degrees(mine))
            staged = kfac.stage_state(mine)
        result = original(state)
        kfac.adopt(staged)
        return result


def _degrees() -> dict[str, int]:
    """What a state without names of the whole model depends on."""
    from megatron.core import parallel_state

    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _check_degrees(state: Mapping[str, Any]) -> None:
    """Files of the format ``torch`` are those of model-parallel ranks.

    Raises:
        StateError: There were others (E303).
    """
    saved, now = state.get(_DEGREES), _degrees()
    if saved is not None and saved != now:
        listed = [
            f"{saved[name]} {name}-parallel ranks, this run has {ranks}"
            for name, ranks in now.items()
            if saved[name] != ranks
        ]
        raise StateError(
            "E303",
            f"the K-FAC state is that of {'; '.join(listed)}: files of the format 'torch' fit no "
            "other number. Save with --ckpt-format torch_dist to change it, or start K-FAC anew "
            "(kfac.resume: 'fresh')",
        )


def _sharded(kfac: KFAC) -> dict[str, Any]:
    """Sharded tensors of the layers that this rank owns, and of the manifest."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    contents = kfac.contents()
    manifest = torch.frombuffer(bytearray(_manifest(contents).dump()), dtype=torch.uint8)
    layers = {
        layer: {
            _name(key, value): ShardedTensor.from_rank_offsets(
                f"{KEY}/{layer}/{_name(key, value)}",
                torch.as_tensor(value).reshape(-1) if torch.as_tensor(value).ndim == 0 else value,
            )
            for key, value in entries.items()
        }
        for layer, entries in contents.layers.items()
    }
    return {
        "manifest": ShardedTensor.from_rank_offsets(MANIFEST, manifest, replica_id=dist.get_rank()),
        "layers": layers,
    }


def _name(key: str, value: Any) -> str:
    return key + NUMBER if torch.as_tensor(value).ndim == 0 else key


def _manifest(contents: writer.Contents) -> Manifest:
    """The same on all ranks. A collective over all of them."""
    world = Communicator(dist.group.WORLD, Ledger())
    save_id: str = world.gather_objects(secrets.token_hex(8))[0]
    # No file, but its place in the manifest: which rank has written a layer.
    part = StoredFile(
        name=f"step{contents.header['step']}-{save_id}-rank{world.rank:05d}.safetensors",
        bytes=0,
        sha256="0" * 64,
    )
    mine = (part if contents.layers else None, contents.specs, dict(contents.counters))
    return writer.manifest_of(save_id, world.gather_objects(mine), contents)


def _resolve_on_load() -> None:
    """Let ``dist_checkpointing.load`` replace requests; without any it stays what it was."""
    from megatron.core import dist_checkpointing

    original = dist_checkpointing.load
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        for holder in _holders(sharded_state_dict):
            holder[KEY] = _answer(holder[KEY], checkpoint_dir)
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    setattr(load, _MARK, True)
    dist_checkpointing.load = load


def _holders(state: Any) -> list[dict[str, Any]]:
    """Dictionaries with a request, at any depth."""
    if not isinstance(state, dict):
        return []
    found = [state] if isinstance(getattr(state.get(KEY), "obj", None), Request) else []
    return found + [holder for value in state.values() for holder in _holders(value)]


def _answer(request: Any, checkpoint: Any) -> Any:
    """What to load of a checkpoint; sharded tensors to be filled."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

    converted = Path(checkpoint) / "kfac"
    if (converted / FILE).exists():
        return LocalNonpersistentObject(_Converted(converted))
    known = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    if MANIFEST not in known:
        return LocalNonpersistentObject(_Absent())

    def wanted(key: str, replica: int = 0) -> Any:
        found = known[key]
        empty = torch.empty(found.global_shape, dtype=found.dtype)
        return ShardedTensor.from_rank_offsets(key, empty, replica_id=replica)

    layers: dict[str, dict[str, Any]] = {name: {} for name in request.obj.names}
    for key in known:
        owner, _, layer = key.partition("/")
        layer, _, entry = layer.rpartition("/")
        if owner == KEY and layer in layers:
            layers[layer][entry] = wanted(key)
    return {"manifest": wanted(MANIFEST, dist.get_rank()), "layers": layers}
