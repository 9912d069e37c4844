"""Training objectives, shared by both engines: pure functions from clean tokens and random numbers to a noisy batch.

An engine draws `Uniforms` on the CPU, creates a `NoisyBatch` with the objective, computes the logits at `noisy.mask`,
and sums `objective.loss_sum` over micro-batches and processes. Dividing by the sum of `noisy.normaliser` over the
global batch makes loss and gradients independent of how the batch is split.

`noise` contains the keyed random numbers, `batches` the clean and the noisy batch, `base` the base class and the loss
of one batch, `single_stream`, `two_streams`, `editing`, `resizing` and `trajectory` the published objectives,
`registry` the table of their names.
"""
