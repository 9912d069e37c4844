"""mcore_patches."""
