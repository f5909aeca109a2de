"""Fixtures of every test module. `hub(*repos, **options)` starts a demo Hub that ends with the test."""

import contextlib

import pytest

from screen.demohub import DemoHub


@pytest.fixture
def hub():
    with contextlib.ExitStack() as running:
        yield lambda *repos, **options: running.enter_context(DemoHub(repos, **options))
