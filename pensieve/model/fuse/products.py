"""Replace single products (Linear, Conv1D) by products with packed weights.

If one parent calls several products one after another with the same input (for instance queries, keys and
values), they become one product.  The first call computes this product; the other calls take their columns of
its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pensieve.kernels.layer.protocol import LayerKernels, PackedWeights
from pensieve.model.fuse.match import product_weights
from pensieve.model.fuse.record import Child, ModuleCall


class SharedInput:
    """Hold the packed weights of products with the same input, and their shared result."""

    def __init__(self, packed: PackedWeights, sizes: Sequence[int]) -> None:
        self.packed = packed
        self._sizes = list(sizes)
        self._inputs: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, part: int, inputs: torch.Tensor) -> torch.Tensor:
        if inputs is not self._inputs or self._outputs[part] is None:
            rows = inputs.reshape(-1, inputs.shape[-1])
            out = torch.empty(
                (len(rows), sum(self._sizes)), dtype=inputs.dtype, device=inputs.device
            )
            self.packed.multiply(rows, out)
            result = out.view(*inputs.shape[:-1], out.shape[1])
            self._inputs, self._outputs = inputs, list(torch.split(result, self._sizes, dim=-1))
        output = self._outputs[part]
        assert output is not None
        self._outputs[part] = None
        if not any(each is not None for each in self._outputs):
            self._inputs = None
        return output


class PackedProduct(torch.nn.Module):
    """Replace a Linear or Conv1D."""

    def __init__(self, shared: SharedInput, part: int, like: torch.nn.Module) -> None:
        super().__init__()
        weight: torch.Tensor = like.weight  # type: ignore[assignment]
        self.weight = weight.new_empty(0)  # some models read its dtype
        self.bias = None
        self.shared = shared
        self._part = part

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all products that share the input, counted at the first product only."""
        return self.packed.num_bytes if self._part == 0 else 0

    @property
    def packed(self) -> PackedWeights:
        return self.shared.packed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.shared.output(self._part, inputs)


def pack_products(
    module: torch.nn.Module,
    calls: Sequence[ModuleCall],
    kernels: LayerKernels,
    *,
    int8: bool = False,
) -> int:
    """Replace the called products inside this module; return their number."""
    children = children_of(module)
    count = 0
    for group in _groups([call for call in calls if id(call.module) in children], children):
        packed = kernels.pack(product_weights(group), int8=int8)
        shared = SharedInput(packed, [call.output.shape[-1] for call in group])
        for part, call in enumerate(group):
            parent, name, _ = children[id(call.module)]
            setattr(parent, name, PackedProduct(shared, part, call.module))
            count += 1
    return count


def children_of(module: torch.nn.Module) -> dict[int, Child]:
    """Return every module inside this one with its parent, keyed by the module's id()."""
    return {
        id(child): Child(parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
    }


def _groups(calls: Sequence[ModuleCall], children: dict[int, Child]) -> Iterator[list[ModuleCall]]:
    """Group consecutive calls that have the same input and the same parent.

    A module that is called twice stays alone.
    """
    num_calls: dict[int, int] = {}
    for call in calls:
        num_calls[id(call.module)] = num_calls.get(id(call.module), 0) + 1
    group: list[ModuleCall] = []
    for call in calls:
        if group and not (
            call.input is group[0].input
            and children[id(call.module)].parent is children[id(group[0].module)].parent
            and num_calls[id(call.module)] == num_calls[id(group[0].module)] == 1
        ):
            yield group
            group = []
        if num_calls[id(call.module)] > 0:
            group.append(call)
            if num_calls[id(call.module)] > 1:
                num_calls[id(call.module)] = 0  # ignore its later calls
    if group:
        yield group
