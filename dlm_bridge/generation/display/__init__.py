"""Display of denoising: a trace, live in a terminal or as an animated page."""
