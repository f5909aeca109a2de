"""LOOK: reads a Hub, a mirror or a local folder; produces facts and verdicts."""
