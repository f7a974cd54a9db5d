"""The fixtures of the tests of checkpoints, for checkpoints in these formats."""

from tests.checkpoints.conftest import nothing_is_small

__all__ = ["nothing_is_small"]
