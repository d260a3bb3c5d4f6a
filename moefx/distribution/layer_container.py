"""Find the layers of a decoder: the container of modules that hold most of its parameters."""

from __future__ import annotations

from torch import nn

from ..errors import InvalidInput

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_layer_container(model: nn.Module) -> str:
    """Return the name of the container of a decoder's layers: of the outermost lists of modules, the one with most
    parameters.

    Raises:
        InvalidInput: there is none.
    """
    sizes: dict[str, int] = {}

    def visit(module: nn.Module, path: str) -> None:
        for key, child in module.named_children():
            name = f"{path}.{key}" if path else key
            if isinstance(child, CONTAINERS):
                sizes[name] = sum(parameter.numel() for parameter in child.parameters())
            else:
                visit(child, name)

    visit(model, "")
    if not sizes:
        raise InvalidInput(
            f"{type(model).__name__} has no nn.ModuleList of layers to cut into stages: a pipeline takes decoders, "
            "with an embedding, a list of layers, a norm and a head as modules"
        )
    return max(sizes, key=sizes.__getitem__)
