"""The houses of tests/frontend."""

from frontend_house import bare_house, house, make_house, make_resolved

__all__ = ["bare_house", "house", "make_house", "make_resolved"]
