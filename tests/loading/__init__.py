"""Loading: whole models, and weights read in parts."""
