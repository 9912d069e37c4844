"""How a sampler's forwards run: eagerly or as CUDA graphs, with or without keys and values kept between them."""
