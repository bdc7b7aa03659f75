"""Layers, layouts and owners to plan with."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from ds_kfac.layers.blocks import cut
from ds_kfac.layers.spec import LayerSpec, ParamSlot
from ds_kfac.plan.topology import Layout, Piece


def make_spec(
    name: str = "fc",
    d_out: int = 4,
    d_in: int = 3,
    *,
    bias: bool = True,
    parts: int = 1,
    max_dim: int = 2048,
) -> LayerSpec:
    weight = ParamSlot(f"{name}.weight", (d_out, d_in), 0)
    slot = ParamSlot(f"{name}.bias", (d_out,), weight.numel) if bias else None
    return LayerSpec(
        name=name,
        kind="linear",
        d_in=d_in,
        d_out=d_out,
        weight=weight,
        bias=slot,
        parts=parts,
        a_blocks=cut(d_in + bias, max_dim),
        g_blocks=cut(d_out, max_dim),
    )


def sharded(numel: int, edges: Sequence[int], ranks: Sequence[int]) -> Layout:
    """Cut ``[0, numel)`` at the edges; piece i goes to ``ranks[i]``; empty pieces vanish."""
    bounds = [0, *sorted(edges), numel]
    pieces = [
        Piece(rank, start, end - start)
        for rank, start, end in zip(ranks, bounds, bounds[1:], strict=False)
        if end > start
    ]
    return Layout(tuple(pieces))


REPLICATED = Layout(replicated=True)


class Case:
    """Layers, where their gradients live, who owns them."""

    def __init__(
        self, specs: list[LayerSpec], layouts: dict[str, Layout], owners: list[int], size: int
    ) -> None:
        self.specs, self.layouts, self.owners, self.size = specs, layouts, owners, size

    def __repr__(self) -> str:
        return f"Case({self.specs}, {self.layouts}, {self.owners}, {self.size})"


def random_case(generator: random.Random, size: int) -> Case:
    """Layers of random shape, each sharded at random over the ranks or whole on all of them."""
    specs, layouts = [], {}
    for index in range(generator.randint(1, 6)):
        spec = make_spec(
            f"layer{index}",
            generator.randint(1, 6),
            generator.randint(1, 6),
            bias=generator.random() < 0.5,
            max_dim=generator.choice([2, 3, 2048]),
        )
        specs.append(spec)
        whole = generator.random() < 0.3
        for slot in spec.slots:
            if whole:
                layouts[slot.name] = REPLICATED
            else:
                edges = [generator.randint(0, slot.numel) for _ in range(size - 1)]
                # Every rank holds one slice of a parameter at most.
                ranks = generator.sample(range(size), size)
                layouts[slot.name] = sharded(slot.numel, edges, ranks)
    owners = [generator.randrange(size) for _ in specs]
    return Case(specs, layouts, owners, size)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random cases for 1 to 8 ranks."""
    size = draw(st.integers(1, 8))
    return random_case(draw(st.randoms(use_true_random=False)), size)
