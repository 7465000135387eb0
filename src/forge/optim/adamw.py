"""AdamW over flat buffers, with clipping by the global norm."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forge import ops
from forge.errors import attribute_hints
from forge.params import Params
from forge.tensor import Tensor, tensor, zeros


class AdamW:
    """The moments of every parameter and the settings of the update (Loshchilov, Hutter, 2019).

    Decay applies to parameters of rank 2, the matrices and embeddings, and to no norm or bias.
    `max_norm` scales gradients down to that global norm (None: never); `frozen` names parameters
    that stay, and raises `ArgumentError` for others. `updates` counts the updates made: a device
    scalar, as are all inputs of an update.
    """

    __getattr__ = attribute_hints(
        {
            "param_groups": "AdamW(params, weight_decay=…); the rate is an argument of step_",
            "state_dict": "optimizer.m.numpy(), optimizer.v.numpy() and optimizer.updates",
            "step": "optimizer.step_(params, grads, loss, lr)",
            "zero_grad": "grads.zero_()",
        }
    )

    def __init__(
        self,
        params: Params,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_norm: float | None = 1.0,
        frozen: Iterable[str] = (),
    ) -> None:
        device = params.flat.device
        self.m = params.zeros_like()
        self.v = params.zeros_like()
        self.updates = zeros((), "int64", device)
        self.beta1, self.beta2, self.eps, self.max_norm = beta1, beta2, eps, max_norm
        self.tiles = params.tiles(skip=frozen)
        rates = [(1.0, weight_decay if len(s.shape) == 2 else 0.0) for s in params.segments]
        self.rates = tensor(np.array(rates, np.float32).reshape(-1, 2), device=device)

    def step_(
        self, params: Params, grads: Params, loss: Tensor, lr: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update params in place; returns the norm of the gradient and whether all was finite.

        `loss` and `lr` are scalars on the device. Where the loss or the norm is not finite (the
        second result is 0), nothing changes and `updates` stands still.
        """
        norm = ops.global_norm(grads.flat)
        finite = ops.all_finite(loss, norm)
        ops.adamw_(
            params.flat,
            grads.flat,
            self.m.flat,
            self.v.flat,
            self.tiles,
            self.rates,
            lr=lr,
            step=self.updates,
            norm=norm,
            finite=finite,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            max_norm=self.max_norm,
            working=params.working,
        )
        return norm, finite
