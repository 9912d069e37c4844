"""One suite that every family passes; each family contributes its facts in a file of its own."""
