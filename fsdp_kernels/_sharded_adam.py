# SPDX-License-Identifier: Apache-2.0
"""The algorithm of the sharded Adam optimizers: the whole tail in one kernel for each bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fsdp_kernels import ops
from fsdp_kernels._adam_load import (
    check_flags,
    check_hyper,
    check_max_norm,
    matching_entries,
    matching_groups,
)
from fsdp_kernels._adam_norm import sum_of_squares
from fsdp_kernels._adam_overlap import check_overlap
from fsdp_kernels._adam_plan import (
    BucketPlan,
    HyperTable,
    Launch,
    Masks,
    Plan,
    build_plan,
    check_sharded,
)
from fsdp_kernels._adam_state import FlatState
from fsdp_kernels.flat_shard import FlatShard
from fsdp_kernels.stepping import register
from fsdp_kernels.trace import span
from triton_ops._common import COEF_COLUMNS, AdamShard

if TYPE_CHECKING:
    from fsdp_kernels.bucket import Bucket

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


class _State(defaultdict[Tensor, Any]):
    """`optimizer.state`: reading what is not there shows an empty entry and adds none."""

    def __missing__(self, key: Tensor) -> Mapping[str, Any]:
        return MappingProxyType({})  # read-only: what is written into it would be lost


class ShardedAdamBase(torch.optim.Optimizer):
    """Adam for parameters that `fully_shard` sharded; the subclasses fix the kind of weight decay.

    A step is, on every rank:

    1. Wait for the gradients that are still being reduced.
    2. With `max_grad_norm`: one norm kernel for each bucket, one all-reduce of the squared norm.
    3. Fold 1 / loss scale and the clip factor into one device scalar.
    4. One small kernel advances the step counts of the parameters that have a gradient and turns
       every parameter's own hyper-parameters into a row of coefficients.
    5. One kernel for each bucket reads gradient, master and moments, and writes master, moments and
       the low-precision shard that the next gather sends.

    Nothing of it makes the host wait for the device.

    State lives in flat buffers, one set for each bucket, made at the first step in which the bucket
    has gradients; `state[p]` shows views of them. Write into these views, do not replace them. A
    parameter without a gradient keeps its bytes, moments and step count, and has no entry in
    `state` until it first gets one.

    Low-precision parameters get an fp32 master, shown as `state[p]["master"]`. What the user writes
    into a parameter between two steps is what the next step starts from: elements whose master no
    longer rounds to the parameter are taken from the parameter.

    Two optimizers may share a bucket; each then holds moments for the whole bucket.
    """

    _decoupled: bool
    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf and just calls us

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None,
        overlap_backward: bool,
        master_weights: bool,
    ) -> None:
        self._where = type(self).__name__
        check_max_norm(self._where, max_grad_norm)
        flags = {"overlap_backward": overlap_backward, "master_weights": master_weights}
        check_flags(self._where, flags)
        self.max_grad_norm = max_grad_norm
        self.overlap_backward = overlap_backward
        self.master_weights = master_weights
        self._plan: Plan | None = None
        self._plan_key: tuple[Any, ...] = ()
        self._flat: dict[int, FlatState] = {}  # by id of the bucket, which the state keeps alive
        self._steps = torch.empty(0)
        self._coefs = torch.empty(0)
        self._hyper = HyperTable()
        self._masks = Masks()
        self._entered: set[FlatShard] = set()
        self._norm: Tensor | None = None
        super().__init__(cast(Any, params), defaults)
        self.state = _State()
        if overlap_backward:
            check_overlap(self, self._where)
            register(self)

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the mean gradients that the last step saw, before clipping.

        None before the first step, and without `max_grad_norm` (pass `float("inf")` to have the
        norm but no clipping). The same number on every rank. Reading it waits for the device.
        """
        return None if self._norm is None else self._norm.item()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as `torch.optim.Optimizer.add_param_group`; it may come later."""
        if isinstance(param_group, dict):
            check_hyper(self._where, self.defaults | param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there.

        Args:
            closure: Computes the loss again, with gradients, and returns it.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: If a parameter is not sharded; with `overlap_backward`, if the last
                backward failed half-way, or in a `GradScaler`.
            ValueError: With `overlap_backward`, for a closure.
        """
        if self.overlap_backward:
            check_overlap(self, f"{self._where}.step", closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan("step")
        for runtime in plan.runtimes:
            runtime.before_step()
        active = [b for b in plan.buckets if b.bucket.shard_grads is not None]
        self._forget_dropped(plan)
        used = plan.used()  # before the norm: this also clears gradients that were set to None
        factor = self._factor(plan, active)
        if active:
            self._update(plan, active, used, factor)
        for b in plan.buckets:
            b.bucket.grads.taken = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those pending under `no_sync` too, or set them to zero."""
        if not self._is_sharded():
            return super().zero_grad(set_to_none)
        plan = self._current_plan("zero_grad")
        for runtime in plan.runtimes:
            runtime.recover()
        for b in plan.buckets:
            b.bucket.grads.check_there()
            if b.picked is None:
                if set_to_none:
                    b.bucket.drop_grads()
                else:
                    b.bucket.grads.zero()
                continue
            for p in b.params:
                if set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form: by index, moments as `FlatShard`s of this rank.

        Raises:
            RuntimeError: With `overlap_backward`, if the last backward failed half-way, or `step()`
                has not come after it.
        """
        if self.overlap_backward and self._is_sharded():
            for runtime in self._current_plan("state_dict").runtimes:
                runtime.recover()
                runtime.stepping.check_saved(f"{self._where}.state_dict")
        packed = super().state_dict()
        packed["state"] = {k: v for k, v in packed["state"].items() if v}
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state into the flat buffers, which stay where they are.

        Call it on every rank: after a failed backward it is collective.

        Args:
            state_dict: From this class or from `torch.optim.Adam` or `AdamW`. Moments may be
                `FlatShard`s of the same geometry or full tensors of the parameters' shape. Without
                "master", low-precision parameters start from their present values.

        Raises:
            ValueError: If it does not fit; nothing is changed then.
            RuntimeError: If a parameter is not sharded.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        where = f"{self._where}.load_state_dict"
        check_sharded(self.param_groups, where)
        saved = state_dict["param_groups"]
        groups = matching_groups(where, saved, self.param_groups, self.defaults)
        loaded = matching_entries(where, state_dict, groups)
        self.param_groups = groups
        plan = self._current_plan("load_state_dict")
        self._forget(plan, [p for p in plan.rows if p not in loaded])
        for p, entry in loaded.items():
            self._load_entry(plan, p, entry)
        for runtime in plan.runtimes:
            # First: else the next call would find the failure, after the load.
            runtime.finish_failed()
            runtime.stepping.reset()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def materialise(self, params: Iterable[Tensor]) -> None:
        """Make the state of some parameters now, with zero moments, as a place to load into."""
        plan = self._current_plan("materialise")
        for p in params:
            self._enter(plan, cast(FlatShard, p))

    def _is_sharded(self) -> bool:
        params = chain.from_iterable(g["params"] for g in self.param_groups)
        return all(isinstance(p, FlatShard) for p in params)

    def _current_plan(self, verb: str) -> Plan:
        """Return the plan, rebuilt if the groups changed since the last call."""
        # Lists of parameters are compared by identity and length: cheap, and groups only grow.
        key = tuple(
            (id(g["params"]), len(g["params"]), g["amsgrad"], g["maximize"])
            for g in self.param_groups
        )
        if self._plan is not None and key == self._plan_key:
            return self._plan
        plan = build_plan(self.param_groups, f"{self._where}.{verb}")
        steps = torch.zeros(len(plan.rows), dtype=torch.float32, device=plan.device)
        old = self._plan
        for p, row in plan.rows.items():
            if old is not None and p in old.rows:
                steps[row] = self._steps[old.rows[p]]
        self._steps = steps
        self._coefs = torch.zeros(
            (len(plan.rows), COEF_COLUMNS), dtype=torch.float64, device=plan.device
        )
        self._hyper, self._masks = HyperTable(), Masks()
        self._plan, self._plan_key = plan, key
        self._entered &= plan.rows.keys()
        for b in plan.buckets:
            if id(b.bucket) in self._flat:
                self._flat[id(b.bucket)].ensure(amsgrad=b.amsgrad)
        for p in self._entered & self.state.keys():
            self._enter(plan, p)
        return plan

    def _factor(self, plan: Plan, active: list[BucketPlan]) -> Tensor:
        """Return 1 / loss scale x clip as float64 [1] on the device; records the norm."""
        factor = plan.one
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            scale = torch.as_tensor(scale).to(plan.device, torch.float64, non_blocking=True)
            factor = scale.reshape(1).reciprocal()
        if self.max_grad_norm is None:
            return factor
        with span("norm", ""):
            norm = sum_of_squares(plan, active).sqrt_() * factor
        self._norm = norm
        return factor * (self.max_grad_norm / (norm + _CLIP_EPS)).clamp_(max=1.0)

    def _update(self, plan: Plan, active: list[BucketPlan], used: Tensor, factor: Tensor) -> None:
        """Advance the steps, then update every bucket that has gradients."""
        ops.adam_coefs(
            self._hyper.rows(plan, self.param_groups),
            self._steps,
            used,
            self._skip(plan),
            self._coefs,
            decoupled=self._decoupled,
        )
        self._enter_used(plan)
        for b in active:
            with span("step", b.bucket.unit.name, b.bucket.index):
                self._launch(b, factor, None)

    def _launch(self, b: BucketPlan, factor: Tensor, peers: Sequence[Tensor] | None) -> None:
        """Update one bucket with its reduced gradients, or with those of the ranks."""
        scale = b.bucket.grad_scale

        def adam(shard: AdamShard, launch: Launch) -> None:
            options: dict[str, Any] = {
                "scale": scale,
                "decoupled": self._decoupled,
                "maximize": launch.maximize,
            }
            if peers is None:
                ops.adam(shard, launch.table, self._coefs, factor, **options)
            else:
                ops.reduce_adam(peers, shard, launch.table, self._coefs, factor, **options)

        self._state_of(b).step(b, adam, None if peers is not None else b.bucket.shard_grads)

    # -- steps in backward: see `stepping.Stepper` ------------------------------------------------

    def owned(self) -> Iterable[Bucket]:
        """Return the buckets that this optimizer steps in backward, as soon as they are reduced."""
        if not self._is_sharded():
            return []  # not yet; step() says so
        check_overlap(self, f"{self._where}: backward")
        plan = self._current_plan("backward")
        return [b.bucket for b in plan.buckets if b.holds_all_trainable()]

    @torch.no_grad()
    def step_bucket(
        self, bucket: Bucket, used: Sequence[bool], peers: Sequence[Tensor] | None
    ) -> None:
        """Step one bucket in backward."""
        plan = self._current_plan("backward")
        b = plan.of_bucket[id(bucket)]
        self._forget_dropped(plan)
        rows = slice(b.first_row, b.first_row + len(b.params))
        ops.adam_coefs(
            self._hyper.rows(plan, self.param_groups)[rows],
            self._steps[rows],
            self._masks.of(b, used),
            None,
            self._coefs[rows],
            decoupled=self._decoupled,
        )
        for p in b.params:
            if used[p.index] and p not in self._entered:
                self._enter(plan, p)
        self._launch(b, plan.one, peers)

    def accept_failed_backward(self) -> None:
        """Go on after a backward that failed half-way, with some units stepped and others not.

        For `overlap_backward=True`. The stepped units keep their new values, moments and step
        counts, the others their old ones; all gradients are gone. Call it on every rank
        (collective).

        Raises:
            RuntimeError: The ranks have not stepped the same units.
        """
        for runtime in self._current_plan("accept_failed_backward").runtimes:
            runtime.finish_failed()
            runtime.stepping.accept()

    def _skip(self, plan: Plan) -> Tensor | None:
        """Return GradScaler's non-finite flag as float [1]; it is the same on every rank."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return None
        return torch.as_tensor(found_inf).to(plan.device, torch.float32).reshape(1)

    def _state_of(self, b: BucketPlan) -> FlatState:
        """Return the bucket's flat state, made when first asked for."""
        state = self._flat.get(id(b.bucket))
        if state is None:
            state = FlatState.create(
                b.bucket, amsgrad=b.amsgrad, master_weights=self.master_weights
            )
            self._flat[id(b.bucket)] = state
        return state

    def _enter_used(self, plan: Plan) -> None:
        """Give `state` an entry for every parameter that has its first gradient now."""
        if len(self._entered) < len(plan.rows):
            for p in plan.used_params():
                if p not in self._entered:
                    self._enter(plan, p)

    def _enter(self, plan: Plan, p: FlatShard) -> None:
        state = self._state_of(plan.of_bucket[id(p.bucket)])
        amsgrad = self.param_groups[plan.groups[p]]["amsgrad"]
        entry = self.state.setdefault(p, {})
        entry.update(state.entry(p, self._steps[plan.rows[p]], amsgrad=amsgrad))
        self._entered.add(p)

    def _forget_dropped(self, plan: Plan) -> None:
        """Start afresh where the user dropped entries of `state`."""
        if len(self.state) < len(self._entered):
            self._forget(plan, [p for p in self._entered if p not in self.state])

    def _forget(self, plan: Plan, params: list[FlatShard]) -> None:
        """Drop the state of some parameters, as if they had never been stepped."""
        for p in params:
            self.state.pop(p, None)
            self._entered.discard(p)
            self._steps[plan.rows[p]] = 0
            if id(p.bucket) in self._flat:
                self._flat[id(p.bucket)].reset(p)

    def _load_entry(self, plan: Plan, p: FlatShard, entry: Mapping[str, Any]) -> None:
        self._enter(plan, p)
        self._steps[plan.rows[p]] = entry["step"]
        state = self._flat[id(p.bucket)]
        part = slice(p.fragment.shard_start, p.fragment.shard_stop)
        for name, flat in state.buffers(amsgrad=True).items():
            if name in entry:
                flat[part].copy_(entry[name])  # perhaps onto itself
            elif name == "master":
                flat[part].copy_(p.to_local())
        # The parameters may be loaded later, or not at all: look at them again at the next step.
        state.seen = None
