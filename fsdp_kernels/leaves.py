# SPDX-License-Identifier: Apache-2.0
"""The leaves of one bucket: the plain `nn.Parameter`s that modules see while it is gathered.

A leaf is one object for the bucket's whole life and only its data changes, so autograd accumulates
into it once a backward however often its module was called. While the unit is freed, a leaf's data
is one NaN expanded to the full shape: it costs four bytes, keeps the shape that autograd compares,
and cannot be mistaken for a weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsdp_kernels.flat_shard import FlatShard

_Owner = TypeVar("_Owner")


@dataclass(frozen=True)
class Site:
    """One place where a parameter is registered: `module._parameters[name]`."""

    module: nn.Module
    name: str
    index: int


class Leaves(list[nn.Parameter]):
    """One leaf for each parameter of a bucket, in segment order, and where modules look for it.

    A shown leaf stands in its module's `__dict__`, which Python reads before `_parameters`, where
    the sharded parameter stays registered.

    Attributes:
        sites: The places where the parameters are registered.

    Args:
        shapes: The parameters' shapes.
        dtype: The compute dtype.
        device: Where full parameters live.
    """

    def __init__(self, shapes: list[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        freed = [torch.full((), value, dtype=dtype, device=device).expand(s) for s in shapes]
        super().__init__(nn.Parameter(view, requires_grad=False) for view in freed)
        self._freed = freed
        self._versions = [leaf._version for leaf in self]
        self._trainable = -1
        self._params: list[FlatShard] = []
        self.sites: list[Site] = []
        self._shown_in: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    def adopt(self, params: list[FlatShard], sites: list[Site]) -> None:
        """Take the registered parameters and the places where they are registered."""
        self._params = params
        self.sites = sites
        self._shown_in = [(s.module.__dict__, s.name, self[s.index]) for s in sites]
        for param, leaf in zip(params, self, strict=True):
            leaf.requires_grad_(param.requires_grad)

    # -- what modules see -------------------------------------------------------------------------

    def fill(self, views: list[Tensor]) -> None:
        """Let the leaves be views of what was gathered."""
        for leaf, view in zip(self, views, strict=True):
            leaf.data = view

    def empty(self) -> None:
        """Let the leaves be NaN, of the same shapes."""
        for leaf, view in zip(self, self._freed, strict=True):
            leaf.data = view

    def show(self) -> None:
        """Let the modules' attributes be the leaves."""
        for names, name, leaf in self._shown_in:
            names[name] = leaf

    def hide(self) -> None:
        """Let the modules' attributes be the sharded parameters again."""
        for names, name, _ in self._shown_in:
            names.pop(name, None)

    def check_sites(self) -> None:
        """Refuse to run when a registered parameter was replaced: its values would be ignored.

        Raises:
            RuntimeError: One was.
        """
        params = self._params
        for site in self.sites:
            registered: Any = site.module._parameters.get(site.name)
            if registered is not params[site.index]:
                raise RuntimeError(
                    f"parameter '{params[site.index].geometry.name}': expected the sharded "
                    "parameter, got another object in its place (an assignment, functional_call "
                    "or load_state_dict(assign=True)). The gathered weights would hide it: edit "
                    "inside `with model.full_params():`, or shard the model afterwards."
                )

    # -- what autograd sees -----------------------------------------------------------------------

    def follow_requires_grad(self) -> None:
        """Let the leaves follow the parameters' `requires_grad`; the layout never moves."""
        for param, leaf in zip(self._params, self, strict=True):
            if leaf.requires_grad != param.requires_grad:
                leaf.requires_grad_(param.requires_grad)
                self._trainable = -1

    def count_trainable(self) -> int:
        """How many require a gradient now."""
        if self._trainable < 0:
            self._trainable = sum(leaf.requires_grad for leaf in self)
        return self._trainable

    def find_changed(self) -> int | None:
        """The first leaf that was changed in place since this was last asked, or None."""
        for i, leaf in enumerate(self):
            if leaf._version != self._versions[i]:
                self._versions = [leaf._version for leaf in self]
                return i
        return None

    def on_arrival(self, owner: _Owner, note: Callable[[_Owner, int], None]) -> None:
        """Call `note(owner, index)` each time autograd has left a gradient in a leaf.

        Args:
            owner: Who is told; not kept alive.
            note: What to call.
        """

        # NOTE: torch holds these hooks where the garbage collector cannot see them. A strong
        # reference to the owner, which reaches everything, would keep the model for ever.
        reference = weakref.ref(owner)

        def hook(index: int) -> Callable[[Tensor], None]:
            def arrived(_: Tensor) -> None:
                told = reference()
                if told is not None:
                    note(told, index)

            return arrived

        for index, leaf in enumerate(self):
            if not leaf.is_floating_point():
                continue
            requires_grad = leaf.requires_grad
            leaf.requires_grad_(True)  # a frozen one may be unfrozen later, and hooks ask for it
            leaf.register_post_accumulate_grad_hook(hook(index))  # type: ignore[no-untyped-call]
            leaf.requires_grad_(requires_grad)
