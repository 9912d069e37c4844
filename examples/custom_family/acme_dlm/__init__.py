"""A model family in a package of its own: dlm-bridge finds it by its entry point."""
