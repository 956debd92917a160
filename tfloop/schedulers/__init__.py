"""Learning-rate schedules that Keras lacks.

All are `keras.optimizers.schedules.LearningRateSchedule`s: they serve a Keras optimizer and `fit`
as well as `ModuleLrScheduler`, and they serialise. Steps are counted from 0: the first update of
an optimizer asks for step 0. Where Keras has a shape already, use it; Burn's names map as follows,
`i` being the step:

| Burn | here | rate at step i |
|---|---|---|
| `f64`, `ConstantLr` | a Python float | c |
| `LinearLrScheduler(a, b, n)` | `PolynomialDecay(a, n, b, power=1)` | from a to b in n steps |
| `CosineAnnealingLrScheduler(a, n, b)` | `CosineDecay(a, n, alpha=b / a)` | half a cosine |
| `ExponentialLrScheduler(a, g)` | `ExponentialDecay(a, decay_steps=1, decay_rate=g)` | a g^i |
| `StepLrScheduler(a, n, g)` | `ExponentialDecay(a, n, g, staircase=True)` | a g^floor(i / n) |
| `NoamLrScheduler` | `tfloop.schedulers.Noam` | see there |
| `SequentialLrScheduler` | `tfloop.schedulers.Sequential` | one after the other |
| `ComposedLrScheduler` | `tfloop.schedulers.Composed` | product, sum or mean |

One difference: after n steps Burn's cosine goes up again, while `CosineDecay` stays at its end.
`CosineDecayRestarts` starts anew. Rates above 1 are as good as any other here.

`Warmup`, `OneCycle` and `Plateau` have no counterpart in Burn.
"""

from tfloop.schedulers._combined import Composed, Sequential, Warmup
from tfloop.schedulers._plateau import Plateau
from tfloop.schedulers._shapes import Noam, OneCycle

__all__ = ["Composed", "Noam", "OneCycle", "Plateau", "Sequential", "Warmup"]
