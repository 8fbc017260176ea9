"""Tile orders."""
