"""`llmc serve`'s options, as far as the command line itself refuses them."""

from __future__ import annotations

import click
import pytest

from llmc.cli.serve import parse_weights


def test_weights_are_names_and_numbers() -> None:
    assert parse_weights("interactive=3, batch=0.5") == {"interactive": 3.0, "batch": 0.5}


@pytest.mark.parametrize("text", ["", "batch", "batch=", "=1", "batch=many", "batch=1,batch=2", "batch=1,"])
def test_weights_that_cannot_be_read_are_shown(text: str) -> None:
    with pytest.raises(click.BadParameter, match="give name=weight, separated by commas"):
        parse_weights(text)
