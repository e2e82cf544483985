"""The option --target of the commands that compile."""

from __future__ import annotations

import click

NATIVE = "cpu:native"


class TargetName(click.ParamType):
    """A target's name, or cpu:native, which becomes the fastest level of this machine: the plan says which."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As of any parameter type."""
        if value != NATIVE:
            return value
        from llmc.artifacts.plan import machine_features
        from llmc.profiles import best_level

        return str(best_level(machine_features()))
