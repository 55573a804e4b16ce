"""Layouts that a user has: read from several dialects, with what they leave open found by the search."""
