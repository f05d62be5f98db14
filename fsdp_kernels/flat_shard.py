# SPDX-License-Identifier: Apache-2.0
"""`FlatShard`: a sharded parameter that keeps its global shape and holds one rank's 1-D fragment.

The wrapper has the parameter's global shape, dtype and device; its data is the fragment, a 1-D view
of the bucket's flat `shard_master`. Element-wise operations act on the fragment, so every
element-wise `torch.optim` optimizer works as it is. Norms and the `GradScaler`'s non-finite flag
are global. Anything that would need the other ranks' elements, or would be silently wrong on a
fragment, raises and names `full_params()`.

Which operations are element-wise is not a list kept by hand: torch tags its pointwise operators.
`flat_ops.py` says what each kind of operation does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_foreach_types

from fsdp_kernels.comm.base import Comm
from fsdp_kernels.layout import BucketLayout, Fragment, rectangles
from fsdp_kernels.trace import label

if TYPE_CHECKING:
    from fsdp_kernels.bucket import Bucket

HINT = (
    "Each rank holds only a 1-D fragment of a sharded parameter: run this inside `with "
    "model.full_params():`, or on `p.full_tensor()`."
)


@dataclass(eq=False)
class Geometry:
    """Where a sharded tensor lies: its global shape, and every rank's fragment of it.

    Attributes:
        name: The parameter's fully qualified name, for messages.
        shape: Global shape.
        layout: The bucket's layout.
        index: The parameter's index in the bucket.
        comm: The ranks that hold the fragments; the root's communicator.
    """

    name: str
    shape: torch.Size
    layout: BucketLayout
    index: int
    comm: Comm

    @cached_property
    def fragment(self) -> Fragment:
        """This rank's fragment."""
        return self.layout.fragment(self.index, self.comm.rank)

    @cached_property
    def boxes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """This rank's fragment as boxes (offsets, sizes) of the global tensor, in flat order."""
        return rectangles(self.shape, self.fragment.start, self.fragment.stop)

    def matches(self, other: Geometry) -> bool:
        """Whether a tensor of the other geometry has the same elements on this rank."""
        if self is other:
            return True
        mine, theirs = self.fragment, other.fragment
        same_range = (mine.start, mine.stop) == (theirs.start, theirs.stop)
        return self.shape == other.shape and same_range and self.comm.world == other.comm.world

    def take(self, full: Tensor) -> Tensor:
        """Slice this rank's fragment out of a tensor that broadcasts to the global shape.

        Args:
            full: Any tensor whose shape broadcasts to the global shape.

        Returns:
            1-D tensor of the fragment's elements; a view where the input is contiguous and full.

        Raises:
            ValueError: The shape does not broadcast to the global shape.
        """
        try:
            expanded = full.expand(self.shape)
        except RuntimeError:
            raise ValueError(
                f"parameter '{self.name}': expected an operand of shape {tuple(self.shape)} or "
                f"one that broadcasts to it, got {tuple(full.shape)}. {HINT}"
            ) from None
        return expanded.reshape(-1)[self.fragment.start : self.fragment.stop]


class FlatShard(torch.Tensor):
    """One rank's fragment of a sharded tensor, with the tensor's global shape.

    Registered parameters are the user's own `nn.Parameter` objects, turned into this class in
    place. Moments, gradients and results of element-wise operations are `FlatShard`s of the same
    geometry.
    """

    _local: Tensor
    geometry: Geometry
    _owner: Bucket | None

    # Only the dispatcher-level protocol is used: it sees in-place operations through `.data` too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        geometry: Geometry,
        owner: Bucket | None = None,
        requires_grad: bool = False,
    ) -> FlatShard:
        """Wrap a local 1-D tensor.

        Args:
            local: The fragment, 1-D, `geometry.fragment.numel` elements.
            geometry: Where it lies.
            owner: The bucket, for registered parameters only.
            requires_grad: As for any tensor.
        """
        make = torch.Tensor._make_wrapper_subclass
        self: FlatShard = make(
            cls,
            geometry.shape,
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        self._local = local
        self.geometry = geometry
        self._owner = owner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the fragments, or refuse it (see `flat_ops`)."""
        from fsdp_kernels.flat_ops import dispatch

        return dispatch(func, args, kwargs or {})

    @classmethod
    def like(cls, other: FlatShard, local: Tensor) -> FlatShard:
        """Give a local 1-D tensor another `FlatShard`'s geometry; the result is no parameter."""
        return cls(local, other.geometry)

    # -- what a user reads ------------------------------------------------------------------------

    @property
    def bucket(self) -> Bucket:
        """The bucket that holds this parameter."""
        if self._owner is None:
            raise RuntimeError(
                f"parameter '{self.geometry.name}': expected a sharded parameter, got a FlatShard "
                "that belongs to no bucket (a moment, a gradient or a result). Use the "
                "registered parameter."
            )
        return self._owner

    @property
    def index(self) -> int:  # type: ignore[override]
        """The parameter's index in its bucket."""
        return self.geometry.index

    @property
    def fragment(self) -> Fragment:
        """This rank's fragment: ranges in the flattened parameter and in the rank's shard."""
        return self.geometry.fragment

    @property
    def is_sharded_parameter(self) -> bool:
        """Whether this is a registered parameter, not an alias, a gradient or a result."""
        return self._owner is not None

    def to_local(self) -> Tensor:
        """This rank's fragment, 1-D, an alias: in-place changes are what the next gather sends.

        Always at one address. No other rank sees a change before that gather, or a step. NumPy's
        changes bump no version counter: make one of torch's after them.
        """
        return self._local

    def full_tensor(self) -> Tensor:
        """Gather the whole tensor (collective: every rank must call it).

        Returns:
            A new tensor of the global shape and this dtype, on every rank, on the current stream.
        """
        geometry = self.geometry
        fragments = [
            geometry.layout.fragment(geometry.index, r) for r in range(geometry.comm.world)
        ]
        longest = max(fragment.numel for fragment in fragments)
        sent = self._local.new_zeros(longest)
        sent[: self._local.numel()].copy_(self._local)
        received = sent.new_empty(longest * geometry.comm.world)
        geometry.comm.all_gather(received, sent, label=label("full_tensor", geometry.name)).wait()
        parts = received.view(geometry.comm.world, longest)
        held = [part[: fragment.numel] for part, fragment in zip(parts, fragments, strict=True)]
        return torch.cat(held).view(geometry.shape)

    # -- what would be silently wrong -------------------------------------------------------------

    @property
    def grad(self) -> Tensor | None:
        """The mean gradient over ranks, a `FlatShard`, or None where no rank used the parameter."""
        return None if self._owner is None else self._owner.grads.grad(self.geometry.index)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._owner is None:
            self._refuse("a gradient assigned to something that is not a registered parameter")
        self._owner.set_grad(self.index, value)

    @property
    def data(self) -> Tensor:
        """An alias without autograd; in-place changes through it are seen as any other."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, FlatShard) and value._local is self._local:
            return  # what `module.to(...)` does when there is nothing to move
        self._refuse("an assignment to `.data`")

    def register_hook(self, hook: Callable[..., Any]) -> NoReturn:
        """Refuse: gradients never pass through the sharded parameter."""
        self._refuse("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> NoReturn:
        """Refuse: gradients never pass through the sharded parameter."""
        self._refuse("register_post_accumulate_grad_hook")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a sharded parameter is not part of any graph."""
        self._refuse("backward")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: the elements of the other ranks are not here."""
        self._refuse("numpy")

    def tolist(self) -> NoReturn:
        """Refuse: the elements of the other ranks are not here."""
        self._refuse("tolist")

    def data_ptr(self) -> NoReturn:
        """Refuse: the wrapper has no memory, and all would seem tied at address 0."""
        self._refuse("data_ptr (use `to_local().data_ptr()`)")

    def share_memory_(self) -> NoReturn:
        """Refuse: the wrapper has no memory to share."""
        self._refuse("share_memory_")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would belong to no bucket."""
        self._refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickle would hold one rank's fragment under the global shape."""
        self._refuse("pickle or torch.save")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"parameter '{self.geometry.name}': expected an element-wise operation, got {what}. "
            f"{HINT} To save or copy a model, use `fsdp_kernels.full_state_dict(model)` or "
            "`fsdp_kernels.checkpoint.save`."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say which part of what this rank holds; never gathers."""
        part, geometry = self.fragment, self.geometry
        return (
            f"FlatShard('{geometry.name}', shape={tuple(geometry.shape)}, dtype={self.dtype}, "
            f"rank {geometry.comm.rank} of {geometry.comm.world} holds elements [{part.start}, "
            f"{part.stop}))"
        )

    # -- torch.distributed.checkpoint's protocol --------------------------------------------------

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        """List what this rank writes: its fragment, as boxes of the global tensor."""
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets), i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=self.geometry.shape
                ),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the boxes of the global tensor that this rank holds."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self.geometry.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Give the view of the fragment that one of its boxes names; loading writes into it."""
        start = 0
        for offsets, sizes in self.geometry.boxes:
            numel = torch.Size(sizes).numel()
            if index.offset is not None and tuple(index.offset) == tuple(offsets):
                return self._local[start : start + numel].view(sizes)
            start += numel
        raise ValueError(
            f"parameter '{self.geometry.name}': expected the offsets of one of this rank's boxes, "
            f"got {index}. Load with the same FlatShards that the plan was made from."
        )


def _register_for_foreach() -> None:
    """List the class where torch lists types for `_foreach_*`, as DTensor does.

    Otherwise optimizers loop over parameters, and `clip_grad_norm_` makes one all-reduce for each.
    """
    for known in (_optim_foreach_types, _util_foreach_types):
        if FlatShard not in known:
            known.append(FlatShard)  # type: ignore[arg-type]


_register_for_foreach()
