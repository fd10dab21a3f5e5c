"""What the plug-in refuses with."""

from __future__ import annotations


class PluginError(RuntimeError):
    """The plug-in can't work in this server; the message says why, and what to do."""
