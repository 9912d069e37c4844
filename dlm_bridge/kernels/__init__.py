"""Kernels of other packages as operations of torch, which both training engines use."""
