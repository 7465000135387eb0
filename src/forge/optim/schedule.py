"""Learning-rate schedules: pure functions of the step, in Python floats.

Nothing to save: a resumed run reads its rate off the step again.
"""

import math
from dataclasses import dataclass

from forge.errors import ArgumentError


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up to `peak`, then half a cosine down to `peak · floor_ratio`, then flat.

    Step k, counted from 0, has rate peak · (k+1) / (warmup+1) below `warmup_steps`; then
    floor + ½ (1 + cos π·x) (peak − floor), where x runs from 0 at the end of the warm-up to 1 at
    `decay_steps`; after it the floor. As in nanoGPT. Raises `ArgumentError` out of range.
    """

    peak: float
    warmup_steps: int
    decay_steps: int
    floor_ratio: float

    def __post_init__(self) -> None:
        for name, fits, range_ in (
            ("peak", 0 <= self.peak < math.inf, "in [0, inf)"),
            ("warmup_steps", self.warmup_steps >= 0, "of at least 0"),
            ("decay_steps", self.decay_steps >= self.warmup_steps, "of at least warmup_steps"),
            ("floor_ratio", 0 <= self.floor_ratio <= 1, "in [0, 1]"),
        ):
            if not fits:
                raise ArgumentError(
                    f"[schedule] expected {name} {range_}, got {getattr(self, name)}; "
                    f"the whole is {self}"
                )

    def __call__(self, step: int) -> float:
        """Learning rate of the update after `step` updates."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        floor = self.peak * self.floor_ratio
        if step >= self.decay_steps:
            return floor
        x = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return floor + 0.5 * (1 + math.cos(math.pi * x)) * (self.peak - floor)
