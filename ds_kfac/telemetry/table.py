"""The layer table as text."""

from __future__ import annotations

from collections.abc import Sequence

from ds_kfac.layers.spec import LayerSpec, LayerTable


def layer_table(table: LayerTable, owners: Sequence[int]) -> str:
    """One line per layer and per module that was left out, and the coverage line.

    Args:
        table: The layers.
        owners: Owning data rank of each layer.
    """
    head = ("layer", "kind", "d_out x d_in", "blocks G x A", "owner")
    rows = [
        (
            spec.name,
            spec.kind,
            _dims(spec),
            f"{len(spec.g_blocks)} x {len(spec.a_blocks)}",
            f"rank {owner}",
        )
        for spec, owner in zip(table.layers, owners, strict=True)
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    if table.left_out:
        lines.append("left to the base optimizer:")
        lines += [
            f"  {item.name or '(root)'} ({item.type_name}, {item.numel:,} parameters): "
            + item.reason
            for item in table.left_out
        ]
    lines.append(table.coverage())
    return "\n".join(lines)


def _dims(spec: LayerSpec) -> str:
    bias = " + bias" if spec.bias is not None else ""
    parts = f" ({spec.parts} parts)" if spec.parts > 1 else ""
    cut = ""
    if spec.shards is not None:
        side = "rows" if spec.shards.rows else "columns"
        cut = f" ({side} over {spec.shards.size} ranks)"
    return f"{spec.d_out} x {spec.d_in}{bias}{parts}{cut}"
