"""The types of the constructor's arguments."""

from fabric_compat import plugins
from fabric_compat.plugins import (
    _PRECISION_INPUT,
    _PRECISION_INPUT_INT,
    _PRECISION_INPUT_STR,
    _PRECISION_INPUT_STR_ALIAS,
)

_PLUGIN_INPUT = plugins.Precision | plugins.ClusterEnvironment | plugins.CheckpointIO
