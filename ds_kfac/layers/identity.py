"""Whether the model still consists of the modules and parameters that were found at attach."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ds_kfac.errors import CoverageError
from ds_kfac.layers.spec import LayerSpec


class Identity:
    """Remembers where each layer's module hangs in the model, and its weight in the module.

    Quantising, fusing and adapter libraries put other modules in their place. Hooks of the old
    ones never fire again, and the optimizer's parameters are no longer those of the model.

    Args:
        model: The model.
        specs: Its layers.
    """

    def __init__(self, model: nn.Module, specs: Iterable[LayerSpec]) -> None:
        self._places: list[tuple[str, nn.Module, str, nn.Module, str, nn.Parameter]] = []
        modules = dict(model.named_modules())
        for spec in specs:
            parent, _, key = spec.name.rpartition(".")
            module, above = modules.get(spec.name), modules.get(parent)
            leaf = spec.weight.name.rpartition(".")[2]
            weight = None if module is None else module._parameters.get(leaf)
            # A layer may be the model itself, or live in it only on other ranks.
            if module is not None and above is not None and weight is not None and key:
                self._places.append((spec.name, above, key, module, leaf, weight))

    def check(self) -> None:
        """Compare with what is there now: a few look-ups per layer.

        Raises:
            CoverageError: A module or a weight was replaced (E133).
        """
        for name, above, key, module, leaf, weight in self._places:
            now = above._modules.get(key)
            if now is not module:
                change = f"{type(module).__name__} -> {type(now).__name__}"
            elif now._parameters.get(leaf) is not weight:
                change = f"another parameter in {leaf}"
            else:
                continue
            raise CoverageError(
                "E133",
                f"layer {name} was replaced after K-FAC was attached ({change}): call detach() "
                "before and attach again after the change, or list it in kfac.skip_layers",
            )
