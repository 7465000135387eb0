"""A small model in training, for tests that compare whole steps."""

from dataclasses import replace

import numpy as np

from forge import Device
from forge.data.loader import Loader
from forge.graph import Captured
from forge.models import GPT2, GPT2Config
from forge.optim.adamw import AdamW
from forge.training import step_state, to_device, train_step

SIZES = {"vocab_size": 61, "block_size": 24, "n_layer": 2, "n_head": 3, "n_embd": 48}
DROPOUT = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.2}


class Run:
    """A small model in training; `train_step` is its step, captured or not."""

    def __init__(self, device, precision="fp32", *, captured=False, step=train_step, **more):
        self.device = Device(device)
        self.model = GPT2(GPT2Config(**SIZES, **more))
        self.params = self.model.zeros(self.device, precision)
        self.params.load_(self.model.init(5))
        self.grads = self.params.zeros_like()
        self.optimizer = AdamW(self.params)
        self.loader = Loader(np.random.default_rng(0).integers(0, 61, 4000), 24, 8, 5)
        self.train_step = Captured(step, self.device, ("batch", "state")) if captured else step
        self.number = 0

    def steps(self, count, micro_batch=None):
        """Loss, norm and finiteness of steps with ragged targets and a moving learning rate."""
        results = []
        for _ in range(count):
            result = self.train_step(*self.arguments(micro_batch))
            results.append(tuple(x.item() for x in result))
        return results

    def arguments(self, micro_batch=None):
        """Those of the next step."""
        number, self.number = self.number, self.number + 1
        host = self.loader.batch(first_sample=8 * number, micro_batch=micro_batch)
        # Ragged: from each micro-batch other targets are left out.
        for k, micro in enumerate(host.micros):
            micro.targets[:, : 1 + number + 2 * k] = -100
        count = sum(int((micro.targets >= 0).sum()) for micro in host.micros)
        batch = to_device(replace(host, target_count=count), self.device)
        state = step_state(5, number, 1e-3 * (1 + number), self.device)
        return self.model, self.params, self.grads, self.optimizer, batch, state

    def bits(self):
        buffers = (self.params.flat, self.grads.flat, self.optimizer.m.flat, self.optimizer.v.flat)
        return [x.numpy().tobytes() for x in buffers]
