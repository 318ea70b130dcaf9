"""The fixture ``rank_pool``, for every file of this folder."""

pytest_plugins = ["fabric.testing.plugin"]
