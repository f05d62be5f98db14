# SPDX-License-Identifier: Apache-2.0
"""Whoever asks for weights in backward gets them, by whatever way autograd was led there."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    Block,
    Net,
    Scenario,
    Turn,
    assert_close,
    assert_grads,
    build,
    by_block,
    check_all,
    mean_loss,
    mse,
    sharded_adamw,
    states,
    turns,
    varied,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import fully_shard


class Output:
    """Not a container that any tree utility knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Opaque(Block):
    """Returns a custom object, keeps an intermediate, and edits a view on its way."""

    def forward(self, x: Tensor) -> Any:
        self.stored = torch.tanh(self.up(self.norm(x)))
        return Output(x + self.down(self.stored))


class OpaqueNet(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x).value
        return Output(self.head(x))


def opaque(model: nn.Module, turn: Turn) -> Tensor:
    return turn.backward(model(turn.rand(4, 3)).value.square().mean())


def stored_only(model: nn.Module, turn: Turn) -> Tensor:
    """The loss never touches what forward returned."""
    model(turn.rand(4, 3))
    loss = sum(block.stored.square().mean() for block in model.blocks)
    for block in model.blocks:
        del block.stored
    return turn.backward(loss)


def stored_of_one(model: nn.Module, turn: Turn) -> Tensor:
    model(turn.rand(4, 3))
    return turn.backward(model.blocks[1].stored.square().mean())


class InPlaceViews(Net):
    """Edits views of its blocks' outputs in place, as a caller may."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            x[:, 1:3].mul_(0.5)
            x.view(-1)[::3].add_(1.0)
            x.transpose(0, 1)[0].zero_()
        out = self.head(x)
        out.t()[1:].mul_(2.0)
        return out


class Detached(Net):
    """Returns what has no gradient; the loss is a stored tensor, or one behind a detached block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inp(x))
        aside = self.blocks[1](x.detach())
        self.stored = self.head(self.blocks[2](x)).square().mean() + aside.square().mean()
        return aside.detach()


def detached(model: nn.Module, turn: Turn) -> Tensor:
    out = model(turn.rand(4, 3))
    assert not out.requires_grad
    return turn.backward(model.stored)


def returned_in_place(model: nn.Module, turn: Turn) -> Tensor:
    """Edit the root's own output in place before the loss."""
    out = model(turn.rand(4, 3))
    out[0].zero_()
    out.mul_(turn.rand(4, 5, salt=2))
    return turn.backward(out.square().mean())


def input_gradient(model: nn.Module, turn: Turn) -> Tensor:
    """Ask for the gradient of an input by autograd.grad, and then backward for real."""
    x = turn.rand(4, 3).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x)
    return turn.backward(model(x.detach()).square().mean()) + grad.sum().double() * turn.scale


def penalised(model: nn.Module, turn: Turn) -> Tensor:
    """Differentiate a gradient: backward itself saves weights for a second backward."""
    x = turn.rand(4, 3).requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with torch.no_grad():
        model(turn.rand(4, 3, salt=3))  # moves other weights to where these were
    return turn.backward(out.square().mean() + grad.square().mean())


def hooked(model: nn.Module) -> nn.Module:
    """Shard, and watch backward by module hooks, which wrap what goes in and out."""
    by_block(model)
    for module in (model, *model.blocks, model.blocks[0].up):
        module.register_full_backward_pre_hook(lambda module, grads: None)
        module.register_full_backward_hook(lambda module, grads_in, grads_out: None)
    return model


def with_input_gradient(model: nn.Module, turn: Turn) -> Tensor:
    return turn.backward(model(turn.rand(4, 3).requires_grad_()).square().mean())


OPAQUE = Scenario(OpaqueNet, shard=partial(fully_shard, units=Opaque), steps=3)
OPAQUE = varied(OPAQUE, build=partial(OpaqueNet, block=Opaque))
OUTPUTS = {
    "custom class": varied(OPAQUE, play=opaque),
    "loss from stored tensors": varied(OPAQUE, play=stored_only),
    "loss from one unit's tensor": varied(OPAQUE, play=stored_of_one),
    "views edited in place": Scenario(InPlaceViews, steps=3),
    "detached": Scenario(Detached, detached, steps=3),
    "edited output": Scenario(play=returned_in_place, steps=3),
    "autograd.grad": Scenario(play=input_gradient, steps=3),
    "backward hooks": Scenario(play=with_input_gradient, shard=hooked, steps=3),
    "double backward": Scenario(play=penalised, steps=3),
}


@pytest.mark.parametrize("world", [2, 3])
def test_outputs_of_every_kind(world: int) -> None:
    whole = [varied(s, shard=fully_shard) for s in OUTPUTS.values()]
    run_ranks(check_all, world, *OUTPUTS.values(), *whole)


# Hooks and version checks of others.


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Counts the shapes that it is asked to keep, and gives back clones."""

    def __init__(self) -> None:
        self.packed: list[tuple[int, ...]] = []
        super().__init__(self.pack, lambda tensor: tensor.clone())

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed.append(tuple(tensor.shape))
        return tensor.clone()


def hooks_outside(rank: int, world: int) -> None:
    model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
    for step, make in enumerate((Offload, torch.autograd.graph.save_on_cpu)):
        ours, theirs = make(), make()
        with ours:
            loss = mse_loss(model, Turn(rank, world, step))
        loss.backward()
        for turn in turns(rank, world, step, torch.float64):
            with theirs:
                loss = mse_loss(plain, turn)
            turn.backward(loss)
        assert_grads(model, plain, str(make))
        if isinstance(ours, Offload):
            # Activations of 4 rows reach the outer hook; weights (transposed or not) do not.
            hidden = [shape for shape in ours.packed if shape == (4, 13)]
            assert len(hidden) * world == len([s for s in theirs.packed if s == (4, 13)])
            assert not {(7, 13), (13, 7)} & set(ours.packed), "weights were packed by a stranger"
        model.zero_grad()
        plain.zero_grad()


def mse_loss(model: nn.Module, turn: Turn) -> Tensor:
    return F.mse_loss(model(turn.rand(4, 3)), turn.rand(4, 5, salt=1))


def test_saved_tensor_hooks_outside_still_see_activations() -> None:
    run_ranks(hooks_outside, 2)


class EditsActivation(Block):
    """Edits in place what exp saved for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.exp(self.up(x))
        out = x + self.down(hidden)
        hidden.mul_(2.0)
        return out


def stale(rank: int, world: int) -> None:
    """What plain torch refuses, a sharded model refuses: the next step is right all the same."""
    model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
    turn = Turn(rank, world, 0)
    for edit in (
        lambda m: m.blocks[1].up.weight.mul_(2.0),
        lambda m: m.head.weight.add_(1.0),
        lambda m: torch._foreach_mul_(list(m.blocks[0].parameters()), 0.5),
    ):
        for m in (model, plain):
            loss = mse_loss(m, turn)
            with torch.no_grad():
                edit(m)
            with pytest.raises(RuntimeError, match=r"modified|in-place change"):
                loss.backward()
            m.zero_grad()
    stepped(model, turn)
    assert states(model) == {"SHARDED"}
    mse(model, turn)
    for other in turns(rank, world, 0, torch.float64):
        mse(plain, other)
    assert_grads(model, plain, "after refusals")

    for m in (build(partial(Net, block=EditsActivation), torch.float64) for _ in range(2)):
        loss = mse_loss(m, turn)
        with pytest.raises(RuntimeError, match=r"modified|in-place change"):
            loss.backward()
    model = build(partial(Net, block=EditsActivation), torch.float64)
    fully_shard(model, units=EditsActivation)
    loss = mse_loss(model, turn)
    with pytest.raises(RuntimeError, match=r"modified|in-place change"):
        loss.backward()


def stepped(model: nn.Module, turn: Turn) -> None:
    """An optimizer's step between forward and backward is an edit too."""
    optimizer = sharded_adamw(model.parameters(), lr=0.0, weight_decay=0.0)
    first, second = mse_loss(model, turn), mse_loss(model, turn)
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified|in-place change"):
        second.backward()
    model.zero_grad()


def test_an_edit_between_forward_and_backward_raises() -> None:
    run_ranks(stale, 2)


# Autocast.


def autocast(rank: int, world: int) -> None:
    model, plain = by_block(build(Net, torch.float32)), build(Net, torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            region = torch.autocast("cpu", torch.bfloat16)
            with region:
                loss = mse_loss(model, Turn(rank, world, step, torch.float32))
            loss.backward()
            want = torch.zeros((), dtype=torch.float64)
            for turn in turns(rank, world, step, torch.float32):
                with region:
                    share = mse_loss(plain, turn)
                want += turn.backward(share)
            assert_close(mean_loss(loss), want, "loss")
            # The oracle adds the ranks' gradients up in its own order: fp32 rounding.
            assert_grads(model, plain, f"step {step}", rtol=1e-5)
            assert states(model) == {"SHARDED"}
            model.zero_grad()
            plain.zero_grad()
        cached_weights(model, plain)
    ours = [str(w.message) for w in caught if "mp_policy" in str(w.message)]
    assert len(ours) == 1, ours


def cached_weights(model: nn.Module, plain: nn.Module) -> None:
    """Within one region an edit is seen: autocast's cache of cast weights is off inside."""
    x = torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        for m in (model, plain):
            with torch.no_grad():
                m.blocks[0].up.weight.mul_(-2.0)
        got = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(x)
    assert_close(got, want, "second forward in one region")


def test_an_autocast_region() -> None:
    run_ranks(autocast, 2)
