"""Model cards, one per family, installed as package data."""
