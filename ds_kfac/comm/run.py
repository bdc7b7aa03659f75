"""Execute a program: factors to their owners, gradients to owners, directions back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.guard import Guard
from ds_kfac.plan.program import Exchange, ReduceItem, ReduceRound, Segment
from ds_kfac.plan.spread import Spread

PackItem = Callable[[ReduceItem, Tensor], None]


class GradientExchange:
    """Moves flat layer gradients between their holders and their owners.

    Args:
        exchange: The table of slices and owners.
        communicator: The ranks that share the layers' work.
        wire_dtype: Dtype on the way out: that of the stored gradients. Directions come back
            in the compute dtype, so that a layer's result does not depend on who owned it.
        dtype: Compute dtype.
        device: Where gradients live.
        guard: Keeps errors of this rank's reading and packing, whose part is then zero.
    """

    def __init__(
        self,
        exchange: Exchange,
        communicator: Communicator,
        *,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        guard: Guard,
    ) -> None:
        self._guard = guard
        self._exchange = exchange
        self._comm = communicator
        self._wire_dtype = wire_dtype
        self._dtype = dtype
        self._device = device
        rank = communicator.rank
        self.owned = exchange.owned(rank)
        self.computed = exchange.computed(rank)
        row = exchange.grid.row(rank) if exchange.workers > 1 else []
        self._row = {other: exchange.computed(other) for other in row if other != rank}
        # Directions go to every holder of a slice, gradients come from one of them.
        self._outgoing = exchange.outgoing(rank)
        self._incoming = exchange.incoming(rank)
        self._local = exchange.local(rank)
        self._read_here = exchange.local(rank, sources_only=True)
        self._sent = exchange.outgoing(rank, sources_only=True)
        self._received = exchange.incoming(rank, sources_only=True)
        self._shared = [
            [layer for layer in exchange.owned(owner) if layer in exchange.replicated]
            for owner in range(communicator.size)
        ]
        self._planned = self._plan()

    def to_owners(self, views: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Collect the gradients of the layers this rank owns.

        Args:
            views: Per parameter, this rank's flat gradient: the held slice, or the whole when
                replicated. A parameter without gradient in this step counts as zero.

        Returns:
            Per owned layer its flat gradient ``[numel]`` in wire dtype.
        """
        flats = {
            layer: torch.zeros(
                self._exchange.numels[layer], dtype=self._wire_dtype, device=self._device
            )
            for layer in self.owned
            if layer not in self._exchange.replicated
        }
        here = [(s, _slice(flats, s)) for s in self._read_here]
        self._guard.run(lambda: self._read(here, views))
        if self._exchange.moves_gradients:
            received = self._send_shards(views)
            for segment, part in _split(received, self._received):
                _slice(flats, segment).copy_(part)
        return flats

    def from_owners(
        self, directions: Mapping[int, Tensor]
    ) -> tuple[list[tuple[Segment, Tensor]], dict[int, Tensor]]:
        """Hand directions back.

        Args:
            directions: Per computed layer its flat direction ``[numel]``, compute dtype.

        Returns:
            The slices this rank holds of sharded layers, and the full flat directions of
            replicated layers.
        """
        for kind, planned in self._planned.items():
            self._comm.ledger.plan(kind, planned)
        slices = [(s, _slice(directions, s)) for s in self._local]
        if self._exchange.moves_shards:
            parts = [_slice(directions, s) for part in self._incoming for s in part]
            sizes, back = _sizes(self._incoming), _sizes(self._outgoing)
            send = _concatenate(parts, self._dtype, self._device)
            received = self._comm.all_to_all(send, sizes, back, "directions")
            slices += _split(received, self._outgoing)
        return slices, self._share_replicated(directions)

    def _plan(self) -> dict[str, int]:
        """Bytes this rank sends per step, by ledger kind, from the program alone."""
        rank, size = self._comm.rank, self._comm.size
        if size == 1:
            return {}
        out, back = self._exchange.sent_numel(rank)
        planned = {}
        if self._exchange.moves_gradients:
            planned["gradients"] = out * _itemsize(self._wire_dtype)
        if self._exchange.moves_shards or back:
            planned["directions"] = back * _itemsize(self._dtype)
        return planned

    def _send_shards(self, views: Mapping[str, Tensor]) -> Tensor:
        sizes, receive = _sizes(self._sent), _sizes(self._received)
        send = torch.zeros(sum(sizes), dtype=self._wire_dtype, device=self._device)
        self._guard.run(lambda: self._read(_split(send, self._sent), views))
        return self._comm.all_to_all(send, sizes, receive, "gradients")

    def _share_replicated(self, directions: Mapping[int, Tensor]) -> dict[int, Tensor]:
        shared = self._exchange.replicated
        if self._exchange.workers > 1:
            return self._pass_on(directions)
        if self._comm.size == 1 or not shared:
            return {layer: flat for layer, flat in directions.items() if layer in shared}
        if self._exchange.spread is not None:
            return self._spread_out(directions, self._exchange.spread)
        part = torch.zeros(self._exchange.gather_numel, dtype=self._dtype, device=self._device)
        mine = self._shared[self._comm.rank]
        for layer, target in self._layout_of_part(part, mine):
            target.copy_(directions[layer])
        gathered = self._comm.all_gather(part, "directions")
        result: dict[int, Tensor] = {}
        for owner, theirs in enumerate(self._shared):
            result.update(self._layout_of_part(gathered[owner], theirs))
        return result

    def _pass_on(self, directions: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Directions from the gradient workers of this rank's row, and its own to the others."""
        grid = self._exchange.grid
        result = dict(directions)
        if grid.columns == 1:
            return result
        row = list(self._row)
        own = _concatenate([directions[i] for i in self.computed], self._dtype, self._device)
        numels = self._exchange.column_numels
        send = [own.numel() * (r in row) for r in range(grid.size)]
        receive = [numels[grid.column_of(r)] * (r in row) for r in range(grid.size)]
        received = self._comm.all_to_all(own.repeat(len(row)), send, receive, "directions")
        for other, part in zip(row, torch.split(received, [receive[r] for r in row]), strict=True):
            result.update(self._layout_of_part(part, self._row[other]))
        return result

    def _spread_out(self, directions: Mapping[int, Tensor], spread: Spread) -> dict[int, Tensor]:
        """Directions in equal shares: dealt out by owners, then gathered by all."""
        rank, ranks = self._comm.rank, range(self._comm.size)
        mine = [part for part in spread.slices if part.owner == rank]  # by share already
        parts = [directions[s.layer][s.start : s.start + s.numel] for s in mine]
        coming = [part for part in spread.slices if part.share == rank]
        coming.sort(key=lambda part: part.owner)
        sizes = (
            _count_by((s.share, s.numel) for s in mine),
            _count_by((s.owner, s.numel) for s in coming),
        )
        received = self._comm.all_to_all(
            _concatenate(parts, self._dtype, self._device),
            [sizes[0].get(r, 0) for r in ranks],
            [sizes[1].get(r, 0) for r in ranks],
            "directions",
        )
        share = torch.zeros(spread.share_numel, dtype=self._dtype, device=self._device)
        pieces = torch.split(received, [s.numel for s in coming]) if coming else ()
        for part, piece in zip(coming, pieces, strict=True):
            share[part.position : part.position + part.numel].copy_(piece)
        flat = self._comm.all_gather(share, "directions").view(-1)
        layers = sorted(self._exchange.replicated)
        return dict(self._layout_of_part(flat, layers))

    def _layout_of_part(self, part: Tensor, layers: Sequence[int]) -> list[tuple[int, Tensor]]:
        sizes = [self._exchange.numels[layer] for layer in layers]
        pieces = torch.split(part[: sum(sizes)], sizes) if sizes else ()
        return list(zip(layers, pieces, strict=True))

    def _read(self, targets: Sequence[tuple[Segment, Tensor]], views: Mapping[str, Tensor]) -> None:
        for segment, out in targets:
            view = views.get(segment.param)
            if view is not None:
                # The holder's view starts at its slice, whole-parameter views at offset zero.
                out.copy_(view[: segment.numel])


def reduce_factors(
    rounds: Sequence[ReduceRound],
    communicator: Communicator,
    pack: PackItem,
    *,
    dtype: torch.dtype,
    device: torch.device,
    names: Sequence[str] = (),
) -> list[tuple[ReduceItem, Tensor]]:
    """Sum packed factors over ranks; each arrives at its owner and nowhere else.

    Args:
        rounds: Rounds of the program.
        communicator: The data group.
        pack: Writes this rank's share of an item into ``[numel]`` (zeros when it has none);
            may free its source.
        dtype: Factor dtype.
        device: Device of the buffers.
        names: Of all layers, for messages.

    Returns:
        The summed items this rank owns.
    """
    owned: list[tuple[ReduceItem, Tensor]] = []
    for reduce_round in rounds:
        of_round = sorted({item.layer for items in reduce_round.items for item in items})
        communicator.progress.at("statistics", [names[layer] for layer in of_round if names])
        size = (communicator.size, reduce_round.part_numel)
        buffer = torch.zeros(size, dtype=dtype, device=device)
        for owner, items in enumerate(reduce_round.items):
            for item in items:
                pack(item, buffer[owner, item.offset : item.offset + item.numel])
        part = buffer[0]
        if communicator.size > 1:
            part = communicator.reduce_scatter(buffer, "factors")
            others = reduce_round.part_numel * (communicator.size - 1)
            communicator.ledger.plan("factors", others * _itemsize(dtype))
        mine = reduce_round.items[communicator.rank]
        owned += [(item, part[item.offset : item.offset + item.numel]) for item in mine]
    return owned


def _slice(flats: Mapping[int, Tensor], segment: Segment) -> Tensor:
    return flats[segment.layer][segment.start : segment.start + segment.numel]


def _split(buffer: Tensor, parts: Sequence[Sequence[Segment]]) -> list[tuple[Segment, Tensor]]:
    segments = [segment for part in parts for segment in part]
    pieces = torch.split(buffer, [s.numel for s in segments]) if segments else ()
    return list(zip(segments, pieces, strict=True))


def _count_by(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for key, numel in pairs:
        counts[key] = counts.get(key, 0) + numel
    return counts


def _sizes(parts: Sequence[Sequence[Segment]]) -> list[int]:
    return [sum(segment.numel for segment in part) for part in parts]


def _concatenate(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat([part.to(dtype) for part in parts])


def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
