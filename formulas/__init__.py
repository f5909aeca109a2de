"""THINK: arithmetic over facts about a checkpoint. No network, disk or clock outside cli, console and report."""

__version__ = "0.1.0"
