"""Training objectives as pure functions, shared by both engines.

Clean tokens and random numbers go in, a noisy batch comes out.

An engine draws `Uniforms` on the CPU, lets the objective make a `NoisyBatch` of them, runs the model on it with logits
at `noisy.mask` only, and sums `objective.loss_sum` over its micro-batches and processes. Dividing by the sum of
`noisy.normaliser` over the whole global batch makes loss and gradients independent of how that batch was cut.

`noise` has the keyed random numbers, `batches` the clean and the noisy batch, `base` the base class and the loss of
one batch, `single_stream`, `two_streams`, `canvas`, `resizing` and `trajectory` the published objectives, `registry`
the table of their names.
"""
